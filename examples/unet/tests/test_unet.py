"""The installed example, with all that exp does with an experiment."""

from __future__ import annotations

import csv
import importlib

import numpy as np
import pytest
import torch

# Small pictures and a small network: a run takes seconds.
TINY = [
    "experiment=unet_tiles", "backend=cpu", "data.size=32", "data.shrink=16", "data.crops=1", "model.width=4",
    "model.depth=2", "global_batch_size=4", "max_steps=4", "val_every=2", "log_every=1",
]  # fmt: skip


def test_trained_evaluated_and_used_on_any_number_of_processes(run, exp):
    run(*TINY, "nproc=2", "output_dir=two")
    trained = exp.result("two")
    assert trained["metric_name"] == "iou"
    assert (exp.path("two") / "plots" / "windows.png").read_bytes().startswith(b"\x89PNG")
    run("task=eval", "init_from=two", "backend=cpu", "output_dir=tested")
    assert exp.result("tested")["metrics"] == trained["metrics"]
    with (exp.path("tested") / "metrics_per_class.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["building", "land", "road", "vegetation", "water"]
    assert np.mean([float(row["iou"]) for row in rows]) == pytest.approx(trained["metrics"]["iou"], rel=1e-4)
    run("task=predict", "init_from=two", "backend=cpu", "output_dir=said")
    said = np.load(exp.path("said") / "predictions" / "rank0.npz")
    assert said["outputs"].shape == (exp.result("said")["metrics"]["samples"], 32, 32)


def test_resumed_swept_and_compared_with_a_reference(run, exp):
    small = [*TINY, "plots=false"]
    run("-m", *small, "sweep.plots=false", "model.width=2,4", "checkpoint.every_steps=2", "output_dir=sweep")
    run(*small, "output_dir=half", "resume=sweep/1/checkpoints/step_00000002.pth")
    assert exp.result("half")["metrics"] == exp.result("sweep/1")["metrics"]
    run(*small, "task=parity", "reference=cpu", "steps=2", "output_dir=parity")
    for word, named in (("model.widht=8", "model.width"), ("data.crop=2", "data.crops"), ("model.width=wide", "width")):
        assert named in run(*small, word, "output_dir=run", code=2).stderr.splitlines()[0]
    assert not exp.path("run").exists()


def test_with_the_data_and_the_metrics_of_exp(run, exp):
    small = ["data.size=64", "data.splits={train: ['tile2/*_00[1-3].*'], val: ['tile2/*_008.*']}"]
    run("experiment=unet_dubai", "backend=cpu", *small, "model.width=4", "global_batch_size=2", "max_steps=1",
        "plots=false", "output_dir=run")  # fmt: skip
    assert exp.result("run")["metric_name"] == "mIoU"


def test_the_loss_does_not_depend_on_which_rank_has_the_known_pixels(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    model = importlib.import_module("dubai_unet.model").UNet(num_classes=3, width=4, depth=2).eval()
    image, label = torch.randint(0, 256, (4, 3, 16, 16)), torch.randint(0, 3, (4, 16, 16))
    label[:2] = 255  # what a rank of two has
    whole = model(image, label, mode="loss")["loss"]
    ranks = [model(image[part], label[part], mode="loss")["loss"] for part in (slice(2), slice(2, 4))]
    torch.testing.assert_close(sum(ranks) / 2, whole)
