"""The installed example, with all that exp does with an experiment."""

from __future__ import annotations

import csv
import importlib

import numpy as np
import pytest
import torch

# Small pictures and a small network: a run takes seconds.
TINY = [
    "experiment=unet_dubai", "backend=cpu", "data.size=64", "data.num_workers=0", "model.window=64",
    "data.splits={train: ['tile2/*_00[1-3].*'], val: ['tile2/*_008.*']}", "model.backbone.width=4",
    "model.backbone.depth=2", "global_batch_size=2", "max_steps=4", "val_every=2", "log_every=1",
]  # fmt: skip


def test_trained_and_evaluated_on_any_number_of_processes(run, exp):
    run(*TINY, "nproc=2", "model.tta_flip=true", "output_dir=two")
    trained = exp.result("two")
    assert trained["metric_name"] == "mIoU"
    assert list(exp.path("two").glob("plots/*.png"))
    run("task=eval", "init_from=two", "backend=cpu", "output_dir=tested")
    assert exp.result("tested")["metrics"] == trained["metrics"]
    with (exp.path("tested") / "metrics_per_class.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["building", "land", "road", "vegetation", "water"]
    iou = np.array([float(row["iou"] or "nan") for row in rows])
    assert np.nanmean(iou) == pytest.approx(trained["metrics"]["mIoU"], rel=1e-4)


def test_resumed_swept_and_compared_with_a_reference(run, exp):
    small = [*TINY, "plots=false"]
    run("-m", *small, "sweep.plots=false", "model.backbone.width=2,4", "checkpoint.every_steps=2", "output_dir=sweep")
    run(*small, "output_dir=half", "resume=sweep/1/checkpoints/step_00000003.pth")
    assert exp.result("half")["metrics"] == exp.result("sweep/1")["metrics"]
    run(*small, "task=parity", "reference=cpu", "steps=2", "output_dir=parity")
    for word, named in (("model.backbone.widht=8", "model.backbone.width"), ("model.backbone.width=wide", "width")):
        assert named in run(*small, word, "output_dir=run", code=2).stderr.splitlines()[0]
    assert not exp.path("run").exists()


def test_the_two_halves_fit_and_the_head_fits_other_backbones(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    network = importlib.import_module("dubai_unet.network")
    backbones = importlib.import_module("exp.vision.backbones.convnext")
    encoder, image = network.Encoder(width=4, depth=2), torch.randn(2, 3, 30, 17)
    maps = encoder(image).maps
    assert [tuple(x.shape[1:]) for x in maps] == [(4, 32, 20), (8, 16, 10), (16, 8, 5)]
    assert network.Decoder(encoder.info(encoder.out_indices), 5)(maps).shape == (2, 5, 32, 20)
    other = backbones.ConvNext(size="atto", out_indices=[0, 1, 2])
    assert network.Decoder(other.info(other.out_indices), 5)(other(image).maps).shape == (2, 5, 8, 8)
