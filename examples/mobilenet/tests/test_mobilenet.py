"""The installed example; weights of torchvision's form are made here, since a test downloads nothing."""

from __future__ import annotations

import importlib

import pytest
import torch

TINY = ["backend=cpu", "model/backbone=mobilenet_v2", "max_steps=2", "plots=false", "data.num_workers=0",
        "schedule.warmup_steps=1"]  # fmt: skip
SCENES = ["experiment=dinov3_eurosat", *TINY, "data.size=32", "global_batch_size=4"]
TILES = ["experiment=dinov3_dubai", *TINY, "model/head=segformer", "model.head.channels=8", "model.head.norm=group",
         "data.size=64", "model.window=64", "global_batch_size=2",
         "data.splits={train: ['tile2/*_00[1-3].*'], val: ['tile2/*_008.*']}"]  # fmt: skip


@pytest.fixture
def backbone(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    torch.manual_seed(0)
    return importlib.import_module("pretrained_mobilenet.backbone").MobileNetV2()


@pytest.fixture
def weights(backbone, exp):
    """A file with the names and shapes of torchvision's."""
    path = exp.folder / "mobilenet_v2.pth"
    torch.save({**backbone.state_dict(), "classifier.1.weight": torch.zeros(1000, 1280)}, path)
    return path.name


def test_levels_and_published_size(backbone):
    maps = backbone.eval()(torch.randn(1, 3, 70, 40), [0, 1, 2, 3]).maps
    assert [x.shape for x in maps] == [(1, 24, 24, 16), (1, 32, 12, 8), (1, 96, 6, 4), (1, 1280, 3, 2)]
    # The paper's 3.4 million, without the classifier of 1.28 million.
    assert sum(p.numel() for p in backbone.parameters()) == 2_223_872
    assert len(backbone.state_dict()) == 314 - 2  # of torchvision's file
    assert {backbone.layer_of(name) for name, _ in backbone.named_parameters()} == {1, 2, 3, 4}


def test_scenes_with_weights_frozen_and_evaluated(run, exp, weights):
    run(*SCENES, f"init_from={weights}", "model.freeze=all", "output_dir=scenes")
    (checkpoint,) = exp.path("scenes").glob("checkpoints/step_*.pth")
    before, after = (torch.load(str(path)) for path in (exp.folder / weights, checkpoint))
    state = after["state_dict"]
    assert all(torch.equal(state[f"backbone.{name}"], before[name]) for name in before if name.startswith("features."))
    run("task=eval", "init_from=scenes", "backend=cpu", "output_dir=tested")
    assert exp.result("tested")["metrics"] == exp.result("scenes")["metrics"]


def test_tiles_on_two_processes_with_windows_and_augmented_tests(run, exp, weights):
    run(*TILES, f"init_from={weights}", "nproc=2", "model.freeze=1", "optim.layer_decay=0.8", "model.tta_flip=true",
        "output_dir=tiles")  # fmt: skip
    assert exp.result("tiles")["metric_name"] == "mIoU"
    assert (
        "model.backbone.out_indexes"
        in run(*TILES, "+model.backbone.out_indexes=[3]", "output_dir=wrong", code=2).stderr
    )
