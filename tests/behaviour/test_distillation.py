"""Distillation, as docs/guide/distillation.md says: a student learns, and is used without its teacher."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch

from tests.behaviour.conftest import SCENES, SHORT, TILES, losses, result
from tests.behaviour.test_tuning import run, state
from tests.simulators import needs_current_card

TERMS = ["Labels,weight: 0.5", "Logits", "FeatureMaps,levels: [[1,0],[3,-1]]", "Attention"]
LEARN = f"model.distillation=[{','.join(f'{{_target_: exp.vision.distillation.{term}}}' for term in TERMS)}]"
PUPIL = [
    "experiment=dinov3_dubai_distillation", "backend=cpu", *SHORT, *TILES[-5:], "model.head.channels=16", LEARN,
]  # fmt: skip
ENCODER = [
    *("experiment=dinov3_distillation", *SCENES[1:]),
    *("model.backbone.embed_dim=8", "model.backbone.num_heads=1"),
]
CARD = {"SIM_GCU_PROFILE": "s60", "SIM_GCU_STRICT": "1"}
NOTHING_LEFT = {"rank": 0, "calls_per_step": 0, "bytes_per_step": 0, "operators": {}}


def refused(exp, *settings):
    """The first line of the message of a run that must be refused."""
    done = exp(*settings, "output_dir=refused")
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[0]


@pytest.mark.legacy
def test_a_segmenter_learns_from_a_run_and_is_used_when_that_is_gone(exp, trained):
    shutil.copytree(trained("tiles"), exp.path("teacher"))
    learn = [*PUPIL, "model.teacher.init_from=teacher"]
    folder = run(exp, "student", *learn)
    names = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]).keys()
    assert {"loss_crossentropy", "loss_logits", "loss_patches", "loss_attention"} <= names
    best = exp.path("teacher") / "checkpoints" / "best.pth"
    assert result(folder)["data"]["teacher"] == {"best.pth": hashlib.sha256(best.read_bytes()).hexdigest()}
    assert not any("teacher" in name for name in state(folder, "best.pth"))
    # The rest of the training again, bit for bit; but not from a teacher that has changed meanwhile.
    for name in ("rest", "refused"):
        shutil.copytree(folder / "checkpoints", exp.path(name) / "checkpoints")
        (exp.path(name) / "checkpoints" / "step_00000004.pth").unlink()
    again, last = state(run(exp, "rest", *learn, "resume=auto")), state(folder)
    assert [name for name, value in last.items() if not torch.equal(value, again[name])] == []
    (exp.path("teacher") / "result.json").unlink()  # it has the digest of the former weights
    torch.save({"state_dict": state(exp.path("teacher")), "data": torch.load(str(best))["data"]}, str(best))
    assert "teacher/best.pth has changed" in refused(exp, *learn, "resume=auto")
    shutil.rmtree(exp.path("teacher"))
    tested = run(exp, "tested", "task=eval", "init_from=student", "plots=false", "backend=cpu")
    assert result(tested)["metrics"] == pytest.approx(result(folder)["metrics"], abs=1e-6)
    run(exp, "out", "task=export", "init_from=student", "task.formats=[torchscript]", "backend=cpu")


def test_images_without_labels_take_part(exp, trained):
    layout = "layout: {_target_: exp.vision.data.layouts.ImageFolders}"
    sources = f"data.sources=[{{sample_data: dubai, weight: 1}}, {{sample_data: eurosat_rgb, {layout}, weight: 3}}]"
    folder = run(exp, "student", *PUPIL, f"model.teacher.init_from={trained('tiles')}", sources, "max_steps=2")
    found = result(folder)
    assert found["data"]["sources"]["eurosat_rgb"] == {"share": 0.75, "train": 500, "val": 0}
    assert set(found["metrics"]) == {"mIoU", "mFscore", "pixel_accuracy"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shares = [line["loss_crossentropy"] for line in lines if "loss_crossentropy" in line]
    assert 0.0 < max(shares) < 0.75 * 0.5 * 1.61  # of five classes; the mean is over all pixels, with labels or not


def test_stored_features_stand_in_for_the_teacher_where_images_do_not_change(exp, trained):
    teacher, whole = trained("tiles"), "[{type: Resize, scale: [64,64], keep_ratio: false}]"
    run(exp, "stored", "task=features", f"init_from={teacher}", "task.store=store", "task.patches=true", "backend=cpu",
        f"data.eval_pipeline={whole}", "task.feature_dtype=float32")  # fmt: skip
    term = "{_target_: exp.vision.distillation.FeatureMaps, mse: 1}"
    learn = [*PUPIL, f"model.distillation=[{term}]", f"data.eval_pipeline={whole}", "max_steps=2"]
    stored = [*learn, "model.teacher.store=store", "model.teacher.sample_data=null"]
    same = f"data.train_pipeline={whole}"
    read = losses(run(exp, "read", *stored, same))
    assert read == pytest.approx(
        losses(run(exp, "computed", *learn, same, f"model.teacher.init_from={teacher}")), rel=1e-4
    )
    assert "RandomResize in data.train_pipeline" in refused(exp, *stored)
    assert "eval_pipeline" in refused(exp, *stored, "data.eval_pipeline=[]", "data.train_pipeline=[]")


def test_what_does_not_fit_a_teacher_is_refused_by_name(exp, trained):
    tiles = f"model.teacher.init_from={trained('tiles')}"
    for settings, reason in (
        ([tiles, "data.palette={land: 8429F6, building: 3C1098, road: 6EC1E4, vegetation: FEDD3A, water: E2A929}"],
         "the data have land, building"),
        ([tiles, "+model/backbone@model.teacher.backbone=tiny"], "leave it out"),
        (["model.teacher.sample_data=null"], "model.teacher.init_from must be set"),
        ([f"model.teacher.init_from={trained('tiles')}/metrics.jsonl"], "model.teacher.init_from"),
        ([tiles, "model/backbone=dinov3_convnext_tiny"], "Attention needs both networks, and model has no"),
    ):  # fmt: skip
        assert reason in refused(exp, *PUPIL, *settings)


def test_an_encoder_is_used_without_its_teacher(exp, trained):
    shutil.copytree(trained("scenes"), exp.path("teacher"))
    folder = run(exp, "student", *ENCODER, "model.teacher.init_from=teacher")
    assert set(result(folder)["metrics"]) == {"cosine_cls", "cosine_patches"}
    student = state(folder, "best.pth")
    assert not any("teacher" in key for key in student)
    tested = run(exp, "tested", "task=eval", "init_from=student", "plots=false", "backend=cpu")
    assert result(tested)["metrics"] == pytest.approx(result(folder)["metrics"], abs=1e-6)
    shutil.rmtree(exp.path("teacher"))
    run(exp, "out", "task=export", "init_from=student", "task.formats=[huggingface]", "backend=cpu")
    later = run(exp, "later", *SCENES, *ENCODER[-2:], "init_from=out/export/huggingface", "max_steps=1", "optim.lr=0",
                "schedule.warmup_steps=0")  # fmt: skip
    backbone = {key: value for key, value in student.items() if key.startswith("backbone.")}
    assert all(torch.equal(value, state(later, "best.pth")[key]) for key, value in backbone.items())
    assert "model.teacher.init_from" in refused(exp, "task=eval", "init_from=student", "backend=cpu")


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["segmenter", "encoder"])
def test_two_processes_compute_what_one_does(exp, trained, kind):
    segments = kind == "segmenter"
    settings = [*(PUPIL if segments else ENCODER),
                f"model.teacher.init_from={trained('tiles' if segments else 'scenes')}"]  # fmt: skip
    alone, both = run(exp, "alone", *settings), run(exp, "both", *settings, "nproc=2")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.extended
@needs_current_card
@pytest.mark.parametrize("kind", ["segmenter", "encoder"])
def test_no_step_leaves_the_card(exp, trained, kind):
    segments = kind == "segmenter"
    settings = [*(PUPIL if segments else ENCODER),
                f"model.teacher.init_from={trained('tiles' if segments else 'scenes')}"]  # fmt: skip
    folder = run(exp, "card", *settings, "backend=gcu", "backend.simulate=true", **CARD)
    assert result(folder)["cpu_fallbacks"] == NOTHING_LEFT
