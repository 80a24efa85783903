"""Weights of other tools and of other channels, through the command line."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from exp.engine import checkpoint
from tests.conftest import run_exp
from tests.vision.data.conftest import SAMPLES

MODEL = ["model.embed_dim=32", "model.depth=2", "model.num_heads=2", "model.layer_scale=1.0"]
SHORT = ["max_steps=2", "log_every=1", "schedule.warmup_steps=1", "data.split=[0.4,0.3,0.3]", "global_batch_size=8"]
SCENES = ["experiment=dinov3_eurosat", "backend=cpu", "plots=false", *MODEL, *SHORT]
DATA = SAMPLES.parents[1] / "data"
IMAGE = SAMPLES / "mmrs1m" / "data" / "classification" / "DUBAI_split" / "test" / "road"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds ``scenes/``, a run, and its backbone with bfloat16 periods in ``mmseg.pth`` and ``dino.pth``."""
    from mmengine.logging import MessageHub

    place = tmp_path_factory.mktemp("weights")
    done = run_exp(place, *SCENES, "output_dir=scenes")
    assert done.returncode == 0, done.stderr
    state = checkpoint.read(place / "scenes" / "checkpoints" / "best.pth")["state_dict"]
    backbone = {key: value for key, value in state.items() if key.startswith("backbone.")}
    periods = backbone.pop("backbone.rope.periods")
    backbone["backbone.rope_embed.periods"] = periods.bfloat16()
    hub = MessageHub("weights")
    hub.update_scalar("train/loss", 1.0)
    head = {"decode_head.conv_seg.weight": torch.ones(3, 32, 1, 1)}
    torch.save({"meta": {"iter": 1}, "state_dict": {**backbone, **head}, "message_hub": hub.state_dict()},
               str(place / "mmseg.pth"))  # fmt: skip
    teacher = {**backbone, "dino_head.mlp.0.weight": torch.ones(2)}
    student = {key: torch.zeros_like(value) for key, value in teacher.items()}
    torch.save({"student": student, "teacher": teacher, "epoch": 3}, str(place / "dino.pth"))
    return place


@pytest.mark.slow
def test_features_of_a_backbone_in_other_tools_checkpoints(folder):
    made = {}
    for name in ("scenes", "mmseg.pth", "dino.pth"):
        out = f"features_{name.partition('.')[0]}"
        settings = ["task=features", f"task.input={IMAGE}", "task.max_images=1", "task.feature_dtype=float32"]
        done = run_exp(folder, *SCENES, *settings, f"init_from={name}", f"output_dir={out}")
        assert done.returncode == 0, done.stderr
        made[name] = load_file(str(sorted((folder / out / "features").glob("*.safetensors"))[0]))
    assert torch.equal(made["mmseg.pth"]["patches"], made["dino.pth"]["patches"])
    difference = (made["mmseg.pth"]["patches"] - made["scenes"]["patches"]).abs().max()
    assert 0 < difference < 1e-2, "rounded periods, otherwise the same"


def test_a_head_that_is_not_in_the_file_is_never_made_up(folder):
    done = run_exp(folder, *SCENES, "task=eval", "init_from=mmseg.pth", "output_dir=refused")
    assert done.returncode == 2
    assert "task=eval needs all weights" in done.stderr.splitlines()[0]


@pytest.mark.slow
def test_other_channels_start_from_ours_and_are_refused_elsewhere(folder):
    done = run_exp(folder, *SCENES, "data.channels=1", "init_from=scenes", "output_dir=grey")
    assert done.returncode == 0, done.stderr
    assert "made to fit the model: pixel_mean, pixel_std, backbone.patch_embed.proj.weight" in done.stdout
    for task in ("eval", "predict", "features"):
        done = run_exp(folder, f"task={task}", "init_from=scenes", "data.channels=1", "output_dir=refused")
        assert done.returncode == 2, done.stdout
        assert "set data.channels=3" in done.stderr.splitlines()[0]


@pytest.mark.slow
def test_classes_go_by_name(folder):
    """A training takes the head's rows by name; features have no classes, so other data may have others."""
    classes = sorted((place.name for place in (DATA / "eurosat_rgb").iterdir() if place.is_dir()), reverse=True)
    done = run_exp(folder, *SCENES, f"data.classes=[{','.join(classes)}]", "init_from=scenes", "output_dir=reversed")
    assert done.returncode == 0, done.stderr
    assert "same 10 classes in another order; the head's rows go by name" in done.stdout
    for name in ("roof", "road"):
        (folder / "mine" / name).mkdir(parents=True)
        for number, path in enumerate(sorted((DATA / "eurosat_rgb" / classes[0]).iterdir())[:10]):
            shutil.copy(path, folder / "mine" / name / f"{number}{path.suffix}")
    mine = ["backend=cpu", "init_from=scenes", f"data.root={folder / 'mine'}"]
    done = run_exp(folder, *mine, "task=features", "task.store=store", "output_dir=of_mine")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "store" / "about.json").read_text())["classes"] == ["road", "roof"]
    done = run_exp(folder, *mine, "task=predict", "output_dir=refused")
    assert done.returncode == 2
    assert "but the data have 2: road, roof" in done.stderr.splitlines()[0]


def test_another_family_is_refused_in_one_line(folder):
    torch.save({"stages.0.0.dwconv.weight": torch.ones(1)}, str(folder / "convnext.pth"))
    done = run_exp(folder, *SCENES, "init_from=convnext.pth", "output_dir=refused")
    assert done.returncode == 2
    assert (
        "convnext.pth holds a ConvNeXt, but the backbones here are vision transformers" in done.stderr.splitlines()[0]
    )
