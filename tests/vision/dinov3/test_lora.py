"""Low-rank updates: what is trained, merging, files; trainings on one and several processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from exp.compat import supports_full_sharding
from exp.engine.fit import Weights, fit_weights
from exp.errors import ConfigError
from exp.vision.dinov3 import SceneClassifier, Segmenter
from exp.vision.dinov3.lora import is_of_lora
from tests.conftest import run_exp

SMALL = {"embed_dim": 32, "depth": 3, "num_heads": 2, "layer_scale": 0.5}


def model(seed=0, kind=SceneClassifier, **settings):
    torch.manual_seed(seed)
    lora = settings.pop("lora", {"rank": 4, "alpha": 8.0})
    return kind(3, **{**SMALL, **settings}, lora=lora)


def moved(trained):
    """Updates as a training leaves them."""
    torch.manual_seed(7)
    for name, parameter in trained.named_parameters():
        if is_of_lora(name):
            parameter.data.normal_(std=0.1)
    return trained.eval()


IMAGE = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", ["vits16", "vits16plus"])
def test_only_updates_and_head_are_trained_and_all_of_them_count(size):
    adapted = model(size=size).train()
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name for name in trained if name.startswith("backbone.")} == {
        name for name, _ in adapted.named_parameters() if is_of_lora(name)
    }
    assert {"head.weight", "head.bias"} < trained
    mlp = ["w1", "w2", "w3"] if size.endswith("plus") else ["fc1", "fc2"]
    names = {name.split("lora.")[1].split(".")[0] for name in trained if "lora." in name}
    assert sorted(names) == sorted(["q", "k", "v", "proj", *mlp])
    count = sum(p.numel() for name, p in adapted.named_parameters() if is_of_lora(name))
    hidden = adapted.size.hidden_dim
    assert count == 3 * 4 * (4 * (32 + 32) + len(mlp) * (32 + hidden))
    moved(adapted).train()
    adapted(image=IMAGE, label=torch.tensor([0, 2]), mode="loss")["loss"].backward()
    assert [name for name, p in adapted.named_parameters() if (p.grad is not None) != (name in trained)] == []
    assert all(adapted.get_parameter(name).grad.abs().max() > 0 for name in trained if ".k." not in name)


def test_updates_begin_as_nothing_and_add_what_the_paper_says():
    plain, adapted = model(lora=None).eval(), model().eval()
    left = adapted.load_state_dict(plain.state_dict(), strict=False)
    assert left.unexpected_keys == []
    assert all(map(is_of_lora, left.missing_keys))
    torch.testing.assert_close(adapted(image=IMAGE), plain(image=IMAGE))
    fc1 = moved(adapted).backbone.blocks[0].mlp
    x = torch.randn(5, 32)
    update = fc1.lora["fc1"]
    weight = fc1.fc1.weight + 8.0 / 4 * update.up @ update.down
    torch.testing.assert_close(fc1.fc1(x) + update(x), x @ weight.t() + fc1.fc1.bias)


@pytest.mark.parametrize(
    ("mine", "mend"),
    [
        ({"rank": 4, "alpha": 16.0}, "; set model.lora.alpha=8.0\n"),
        ({"rank": 2, "alpha": 8.0}, "; set model.lora.rank=4\n"),
        ({"rank": 4, "alpha": 8.0, "targets": ["q", "v"]}, "; set model.lora.targets=[fc1,fc2,k,proj,q,v]\n"),
    ],
)
def test_other_updates_than_were_trained_are_named(mine, mend):
    """For use as it is; a training begins with them merged, and has new ones."""
    weights = Weights(Path("run/best.pth"), moved(model()).state_dict(), None)
    config = OmegaConf.create({"task": {"name": "eval"}, "record": {"differs": []}, "init_partial": False})
    with pytest.raises(ConfigError) as raised:
        fit_weights(model(lora=mine), weights, config, as_it_is=True)
    assert mend in str(raised.value)
    for plain in ({"rank": 0}, None):
        fit_weights(model(lora=plain), weights, config, as_it_is=True)
    assert "made to fit" not in fit_weights(model(lora=mine), weights, config, as_it_is=False)


@pytest.mark.parametrize("size", ["vits16", "vits16plus"])
@pytest.mark.parametrize("targets", [["attention", "mlp"], ["q", "v"]])
def test_merged_weights_compute_the_same(size, targets):
    adapted = moved(model(size=size, lora={"rank": 4, "alpha": 8.0, "targets": targets}))
    expected = adapted(image=IMAGE)
    plain = model(seed=1, size=size, lora=None).eval()
    before = plain(image=IMAGE)
    plain.load_state_dict(plain.adapt_state_dict(adapted.state_dict(), Path("best.pth")))
    torch.testing.assert_close(plain(image=IMAGE), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-3)
    adapted.backbone.merge_updates()
    assert not any(map(is_of_lora, adapted.state_dict()))
    torch.testing.assert_close(adapted(image=IMAGE), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("other", [{"rank": 2, "alpha": 8.0}, {"rank": 4, "alpha": 1.0}, {"rank": 4, "targets": ["q"]}])
def test_updates_of_other_settings_are_merged_and_new_ones_begin(other):
    first = moved(model())
    again, second = model(seed=1).eval(), model(seed=1, lora=other).eval()
    again.load_state_dict(again.adapt_state_dict(first.state_dict(), Path("best.pth")))
    assert again.backbone.blocks[0].attn.lora["q"].up.abs().max() > 0
    left = second.load_state_dict(second.adapt_state_dict(first.state_dict(), Path("best.pth")), strict=False)
    assert left.missing_keys
    assert all(map(is_of_lora, left.missing_keys))
    for each in (again, second):
        torch.testing.assert_close(each(image=IMAGE), first(image=IMAGE), rtol=1e-4, atol=1e-5)


def test_frozen_blocks_have_none():
    adapted = model(freeze=2)
    assert {name.split(".")[2] for name, _ in adapted.named_parameters() if is_of_lora(name)} == {"2"}
    assert not any(p.requires_grad for name, p in adapted.backbone.named_parameters() if not is_of_lora(name))


def test_the_factor_of_a_file_is_its_own():
    first, second = moved(model()), model(lora={"rank": 4, "alpha": 1.0}).eval()
    second.load_state_dict(first.state_dict())  # as resuming does
    torch.testing.assert_close(second(image=IMAGE), first(image=IMAGE))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {"rank": -1}}, "rank=-1 must be 0 or more"),
        ({"lora": {"rank": 4, "alpha": 0.0}}, "alpha=0.0 above 0"),
        (
            {"lora": {"rank": 4, "targets": ["w1"]}},
            r"model.lora.targets=\['w1'\] must name some of attention, mlp, q, k",
        ),
        ({"lora": {"rank": 4, "targets": []}}, "must name some of"),
        ({"lora": {"rank": 4}, "freeze": "all"}, "model.freeze=all leaves no block for model.lora.rank=4"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        model(**settings)


# -- through the command line ------------------------------------------------------------------------------------------

SCENES = [
    "experiment=dinov3_eurosat", "model.embed_dim=16", "model.depth=2", "model.num_heads=2", "model.patch_size=16",
    "max_epochs=null", "max_steps=4", "val_every=4", "log_every=1", "schedule.warmup_steps=1", "plots=false",
    "checkpoint.every_steps=2", "checkpoint.keep_last=9", "data.split=[0.4,0.3,0.3]", "global_batch_size=8",
    "backend=cpu",
]  # fmt: skip
LORA = ["model.lora.rank=2", "model.lora.dropout=0.1", "optim.lr=1e-2"]


def trained(folder, name, *settings):
    done = run_exp(folder, *SCENES, f"output_dir={name}", *settings)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((folder / name / "result.json").read_text())


def losses(folder, name):
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def test_a_run_resumes_exactly_and_later_runs_begin_with_it_merged(tmp_path):
    result = trained(tmp_path, "run", *LORA)
    content = torch.load(tmp_path / "run" / "checkpoints" / "step_00000004.pth")
    state = content["state_dict"]
    updates = {key: value for key, value in state.items() if is_of_lora(key) and value.dim()}
    head = sum(value.numel() for key, value in state.items() if key.startswith("head."))
    assert result["trained_parameters"] == sum(value.numel() for value in updates.values()) + head
    assert result["parameters"] > 3 * result["trained_parameters"] - 2 * head
    start = torch.load(tmp_path / "run" / "checkpoints" / "step_00000002.pth")["state_dict"]
    changed = {key for key, value in state.items() if not torch.equal(value, start[key])}
    assert {key for key in changed if key.startswith("backbone.")} == set(updates)

    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "rest" / "checkpoints")
    (tmp_path / "rest" / "checkpoints" / "step_00000004.pth").unlink()
    trained(tmp_path, "rest", *LORA, "resume=auto")
    again = torch.load(tmp_path / "rest" / "checkpoints" / "step_00000004.pth")["state_dict"]
    assert [key for key, value in state.items() if not torch.equal(value, again[key])] == []

    plain = run_exp(
        tmp_path, "task=eval", "init_from=run", "model.lora.rank=0", "output_dir=plain", "plots=false", "backend=cpu"
    )
    assert plain.returncode == 0, plain.stderr
    metrics = json.loads((tmp_path / "plain" / "result.json").read_text())["metrics"]
    assert metrics == pytest.approx(result["metrics"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        ["nproc=2"],
        pytest.param(["nproc=2", "wrapper=fsdp"], marks=pytest.mark.skipif(not supports_full_sharding(), reason="old")),
    ],
)
def test_two_processes_compute_what_one_does(tmp_path, where):
    settings = [*LORA, "model.lora.dropout=0"]
    counted = [trained(tmp_path, "alone", *settings), trained(tmp_path, "both", *settings, *where)]
    assert losses(tmp_path, "both") == pytest.approx(losses(tmp_path, "alone"), rel=1e-5)
    assert counted[0]["trained_parameters"] == counted[1]["trained_parameters"]


def test_a_segmenter_takes_them_too():
    segmenter = model(kind=Segmenter, head="linear")
    label = torch.zeros(2, 32, 32, dtype=torch.uint8)
    segmenter.train()(image=IMAGE, label=label, mode="loss")["loss"].backward()
    assert [name for name, p in segmenter.named_parameters() if p.requires_grad and p.grad is None] == []
