"""Sentinel-2 scenes of 16 bits through the command line: bands by name, statistics, training, prediction."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import run_exp
from tests.vision.data.conftest import write_tiff

rasterio = pytest.importorskip("rasterio")

NAMES = ["B01", "B02", "B03", "B04", "B08"]


def write(path, seed, side=64, order=NAMES):
    """A scene whose near infrared tells the class of a pixel; the left eighth holds no data. Returns the classes."""
    draw = np.random.default_rng(seed)
    truth = np.repeat(np.repeat(draw.integers(0, 2, (side // 16, side // 16)), 16, axis=0), 16, axis=1)
    bands = {name: draw.normal(900.0, 60.0, (side, side)) for name in NAMES}
    bands["B08"] += 1500.0 * truth
    values = np.stack([bands[name] for name in order]).clip(1).astype(np.uint16)
    values[:, :, : side // 8] = 0
    write_tiff(path, values, order, nodata=0)
    return truth.astype(np.uint8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training on four bands; ``<folder>/run``."""
    folder = tmp_path_factory.mktemp("bands")
    for number in range(12):
        order = NAMES if number % 2 else NAMES[::-1]  # names hold, whatever the order in a file
        truth = write(folder / "data" / "images" / f"{number}.tif", number, order=order)
        (folder / "data" / "masks").mkdir(exist_ok=True)
        Image.fromarray(truth).save(folder / "data" / "masks" / f"{number}.png")
    done = train(folder, "run")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder


def train(folder, name):
    settings = [
        "experiment=dinov3_dubai", "data=segmentation", "data.name=fields", f"data.root={folder / 'data'}",
        "data.classes=[low,high]", "data.palette=null", "data.bands=[B04,B03,B02,B08]",
        "data.value_range=[700,2600]", "data.mean=train", "data.size=64", "data.num_workers=0",
        *(f"model.backbone.{key}" for key in ("embed_dim=32", "depth=1", "num_heads=2", "patch_size=8")),
        "model/head=linear", "model.window=64",
        "global_batch_size=8", "max_steps=40", "val_every=40", "optim.lr=3e-3", "schedule.warmup_steps=2",
        "checkpoint.every_steps=20", "plots=false",
    ]  # fmt: skip
    return run_exp(folder, *settings, "backend=cpu", f"output_dir={name}")


def of(folder, name, file="result.json"):
    return json.loads((folder / name / file).read_text())


def test_the_bands_are_learnt_from_and_statistics_are_kept(trained):
    result, table = of(trained, "run"), of(trained, "run", "statistics.json")
    assert result["metrics"]["pixel_accuracy"] > 0.9, "near infrared tells it"
    assert result["data"]["bands"] == table["bands"] == ["B04", "B03", "B02", "B08"]
    assert table["mean"][:3] == pytest.approx([900.0] * 3, abs=3)
    assert table["without_data"] == [table["images"] * 64 * 8] * 4
    state = torch.load(trained / "run" / "checkpoints" / "step_00000040.pth")
    assert state["data"]["mean"] == table["mean"]
    low, high = map(np.array, state["data"]["value_range"])
    expected = (np.array(table["mean"]) - low) * 255 / (high - low)
    assert state["state_dict"]["pixel_mean"].reshape(-1).tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_large_scene_is_predicted_from_the_same_bands(trained, tmp_path):
    truth = write(tmp_path / "new.tif", 99, side=160, order=sorted(NAMES, reverse=True))
    done = run_exp(trained, "task=predict", "init_from=run", f"task.input={tmp_path / 'new.tif'}", "backend=cpu",
                   "output_dir=map", "plots=false")  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with rasterio.open(trained / "map" / "predictions" / "classes" / "new.tif") as file:
        labels = file.read(1)
    assert (labels[:, :20] == 255).all()
    assert (labels[:, 20:] == truth[:, 20:]).mean() > 0.9
