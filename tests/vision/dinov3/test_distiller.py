"""Distillation: the loss, a teacher that is nowhere else, and students that others begin with."""

from __future__ import annotations

import json
import shutil

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from exp.errors import ConfigError
from exp.vision.dinov3 import Distiller, SceneClassifier
from tests.conftest import run_exp
from tests.simulators import needs_current_card
from tests.vision.dinov3.test_lora import SCENES

STUDENT = {"embed_dim": 16, "depth": 1, "num_heads": 1, "layer_scale": 0.5}
TEACHER = {"size": "tiny", "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.fixture
def weights(tmp_path):
    """A teacher's weights: of a run, with another head and normalisation."""
    torch.manual_seed(3)
    model = SceneClassifier(4, **TEACHER, layer_scale=0.5, normalization="satellite")
    torch.save(model.state_dict(), tmp_path / "teacher.pth")
    return model.eval(), str(tmp_path / "teacher.pth")


def student(file, patch_size=16, **settings):
    torch.manual_seed(0)
    return Distiller(3, {**TEACHER, "init_from": file}, **STUDENT, patch_size=patch_size, **settings)


def images(side=48):
    return torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_losses_and_agreement_by_their_formulas(weights):
    teacher, file = weights
    model = student(file, cls_weight=0.5, patch_weight=2.0, smooth_l1_share=0.25)
    total, losses = model.parse_losses(model(image=images(), mode="loss"))
    (theirs,), (ours,) = teacher.features(images()), model.features(images())

    def standardised(x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()

    cosine_cls = F.cosine_similarity(model.project_cls(ours.cls), standardised(theirs.cls), dim=-1)
    projected, wanted = model.project_patches(ours.patches), standardised(theirs.patches)
    cosine = F.cosine_similarity(projected, wanted, dim=-1)
    distance = (projected - wanted).abs()
    smooth = torch.where(distance < 1, distance.square() / 2, distance - 0.5).mean()
    torch.testing.assert_close(losses["loss_cls"], 0.5 * (1 - cosine_cls.mean()), rtol=1e-4, atol=1e-5)
    patches = 2.0 * (0.75 * (1 - cosine.mean()) + 0.25 * smooth)
    torch.testing.assert_close(losses["loss_patches"], patches, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total, losses["loss_cls"] + losses["loss_patches"])
    alike = model(image=images(), mode="predict")
    torch.testing.assert_close(alike.cls, cosine_cls, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alike.patches, cosine.mean(dim=(1, 2)), rtol=1e-4, atol=1e-5)


def test_the_teacher_is_nowhere_but_in_the_loss(weights):
    model = student(weights[1])
    names = {name for name, _ in model.named_parameters()}
    before = torch.random.get_rng_state()
    model(image=images(), mode="loss")["loss_cls"].backward()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {name for name, _ in model.named_parameters()} == names
    assert not any("teacher" in name for name in model.state_dict())
    assert all(p.grad is None and not p.requires_grad for p in model._made[0].parameters())
    assert model.train()._made[0].training is False


def test_grids_of_another_patch_size_meet(weights):
    model = student(weights[1], patch_size=8)
    losses = model(image=images(), mode="loss")  # 6 x 6 patches beside 3 x 3
    assert torch.isfinite(losses["loss_patches"])
    assert model(image=images(40), mode="predict").patches.shape == (3,)


@pytest.mark.parametrize("settings", [{"cls_weight": 0.0}, {"patch_weight": 0.0}, {"smooth_l1_share": 0.0}, {}])
def test_every_trainable_parameter_gets_a_gradient(weights, settings):
    model = student(weights[1], **settings).train()
    model.parse_losses(model(image=images(), mode="loss"))[0].backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad != (p.grad is not None)] == []


def test_a_student_learns(weights):
    model = student(weights[1]).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = model(image=images(), mode="predict").patches.mean().item()
    for _ in range(30):
        optimizer.zero_grad()
        model.parse_losses(model(image=images(), mode="loss"))[0].backward()
        optimizer.step()
    assert model(image=images(), mode="predict").patches.mean().item() > first + 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": {"size": "vits61"}}, "model.teacher.size=vits61 is not one of"),
        ({"cls_weight": 0.0, "patch_weight": 0.0}, "must not be negative, nor both 0"),
        ({"smooth_l1_share": 2.0}, "model.smooth_l1_share=2.0 must be from 0 to 1"),
        ({"blocks": [0]}, "model.blocks: a student is compared with its teacher after the last block"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        Distiller(3, **{**STUDENT, **settings})


def test_weights_of_another_size_say_which_keys_mend_it(weights):
    model = Distiller(3, {**TEACHER, "depth": 1, "init_from": weights[1]}, **STUDENT)
    with pytest.raises(ConfigError, match=r"^model\.teacher: .* holds a model 32 wide, 2 .*model\.teacher\.depth=2"):
        model.start_epoch(0)
    with pytest.raises(ConfigError, match=r"^model\.teacher: no checkpoint at nowhere\.pth"):
        Distiller(3, {**TEACHER, "init_from": "nowhere.pth"}, **STUDENT).start_epoch(0)


# -- through the command line ------------------------------------------------------------------------------------------

DISTIL = [
    "experiment=dinov3_distillation", *SCENES[1:], "model.teacher.embed_dim=16", "model.teacher.depth=2",
    "model.teacher.num_heads=2", "model.teacher.patch_size=16", "model.teacher.init_from=teacher",
    "model.embed_dim=8", "model.num_heads=1", "model.dropout=0.1",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A teacher and its student, trained a little."""
    folder = tmp_path_factory.mktemp("distillation")
    for settings in ([*SCENES, "output_dir=teacher"], [*DISTIL, "output_dir=student"]):
        done = run_exp(folder, *settings)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder


def state(folder, name, file="step_00000004.pth"):
    return torch.load(folder / name / "checkpoints" / file)


def losses(folder, name):
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def test_a_student_resumes_exactly_without_its_teacher_in_the_file(runs):
    result = json.loads((runs / "student" / "result.json").read_text())
    assert set(result["metrics"]) == {"cosine_cls", "cosine_patches"}
    content = state(runs, "student")
    assert not any("teacher" in key for key in content["state_dict"])
    assert len(content["state_dict"]) < 60
    shutil.copytree(runs / "student" / "checkpoints", runs / "rest" / "checkpoints")
    (runs / "rest" / "checkpoints" / "step_00000004.pth").unlink()
    done = run_exp(runs, *DISTIL, "output_dir=rest", "resume=auto")
    assert done.returncode == 0, done.stderr
    for key, value in content["state_dict"].items():
        assert torch.equal(value, state(runs, "rest")["state_dict"][key]), key


def test_others_begin_with_the_student_and_its_export(runs):
    exported = run_exp(
        runs, "task=export", "init_from=student", "task.formats=[huggingface]", "backend=cpu", "output_dir=out",
        "model.teacher.init_from=gone",
    )  # fmt: skip
    assert exported.returncode == 0, exported.stderr
    small = ["model.embed_dim=8", "model.num_heads=1", "max_steps=1", "optim.lr=0"]
    for number, source in enumerate(("student", "out/export/huggingface")):
        done = run_exp(runs, *SCENES, *small, f"init_from={source}", f"output_dir=later{number}")
        assert done.returncode == 0, done.stderr
        assert "missing in the file: head.weight, head.bias" in done.stdout
    source, *later = (state(runs, name, "best.pth")["state_dict"] for name in ("student", "later0", "later1"))
    for name, value in source.items():
        if name.startswith("backbone."):
            assert all(torch.equal(value, each[name]) for each in later), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.teacher.init_from=null"], "model.teacher.init_from must be set"),
        (["data=eurosat"], "learns features, not classes, and these data measure classes; set data=distillation"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(runs, settings, message):
    done = run_exp(runs, *DISTIL, *settings, "output_dir=refused")
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[0]
    assert not (runs / "refused").exists()


@pytest.mark.slow
def test_ones_own_images_of_any_size_in_one_folder(runs):
    """As docs/tuning.md writes it: data.root alone."""
    (runs / "mine").mkdir()
    for number in range(16):
        pixels = np.random.default_rng(number).integers(0, 256, (40 + 7 * number, 120 - 5 * number, 3), dtype=np.uint8)
        cv2.imwrite(str(runs / "mine" / f"{number}.png"), pixels)
    own = ["data.root=mine", "data.split=[0.5,0.5,0]", "output_dir=of_mine"]
    done = run_exp(runs, *DISTIL, *own)
    assert done.returncode == 0, done.stderr
    data = json.loads((runs / "of_mine" / "result.json").read_text())["data"]
    assert data == {"train": 8, "val": 8, "tested_on": "val"}


@pytest.mark.slow
@pytest.mark.parametrize("where", [["nproc=2", "model.dropout=0"]])
def test_two_processes_compute_what_one_does(runs, where):
    for name, settings in (("alone", ["model.dropout=0"]), ("both", where)):
        done = run_exp(runs, *DISTIL, *settings, f"output_dir={name}")
        assert done.returncode == 0, done.stderr
    assert losses(runs, "both") == pytest.approx(losses(runs, "alone"), rel=1e-5)


@pytest.mark.slow
@needs_current_card
def test_no_step_leaves_the_card(runs):
    card = {"SIM_GCU_PROFILE": "s60", "SIM_GCU_STRICT": "1"}
    done = run_exp(runs, *DISTIL, "backend=gcu", "backend.simulate=true", "output_dir=card", **card)
    assert done.returncode == 0, done.stderr
    left = json.loads((runs / "card" / "result.json").read_text())["left_device"]
    assert left == {"rank": 0, "calls_per_step": 0, "bytes_per_step": 0, "operators": {}}
