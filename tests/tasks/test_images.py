"""What tasks make of trained scenes and segmentation: tables, pictures, maps and features."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.behaviour.conftest import BACKBONE, SHORT, result, table

MMRS = Path(__file__).parents[1] / "samples" / "mmrs1m" / "data"
ROAD = MMRS / "classification" / "DUBAI_split" / "test" / "road"


@pytest.fixture
def run(exp):
    """Runs exp on the CPU, with pictures; gives the run's folder."""

    def ended(*arguments):
        done = exp(*arguments, "backend=cpu", "plots=true", "output_dir=run")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return exp.path("run")

    return ended


def names(folder):
    return {path.name for path in folder.iterdir()}


def size(path):
    with Image.open(path) as picture:
        return picture.size


def test_segmentation_predicts_files_as_maps_overlays_and_areas(run, trained, tmp_path):
    """A large picture is cut into windows."""
    images = tmp_path / "new"
    images.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (150, 230, 3), dtype=np.uint8)
    cv2.imwrite(str(images / "large.png"), pixels)
    cv2.imwrite(str(images / "small.jpg"), pixels[:50, :40])
    folder = run("task=predict", f"init_from={trained('tiles')}", f"task.input={images}", "task.gsd=0.5")
    with Image.open(folder / "predictions" / "classes" / "large.png") as picture:
        labels = np.asarray(picture)
    assert labels.shape == (150, 230)
    assert size(folder / "predictions" / "overlays" / "large.png")[0] >= 230
    rows = [row for row in table(folder / "predictions" / "areas.csv") if row["file"].endswith("large.png")]
    assert [int(row["pixels"]) for row in rows] == np.bincount(labels.reshape(-1), minlength=5).tolist()
    assert sum(float(row["square_metres"]) for row in rows) == 150 * 230 * 0.25
    assert result(folder)["metrics"]["failed"] == 0


def test_scenes_are_predicted_with_a_table_and_a_sheet(run, trained):
    """Of the test split, where the truth is known: the same accuracy as in training."""
    folder = run("task=predict", f"init_from={trained('scenes')}", "nproc=2")
    rows = table(folder / "predictions.csv")
    assert len(rows) == 150
    right = sum(row["class"] == row["truth"] for row in rows) / len(rows)
    assert right == pytest.approx(result(trained("scenes"))["metrics"]["accuracy"])
    assert all(1 >= float(row["probability"]) >= float(row["probability_2"]) > 0 for row in rows)
    assert min(size(folder / "plots" / "predictions.png")) > 400


def test_features_are_listed_and_drawn(run, trained):
    folder = run("task=features", f"init_from={trained('tiles')}", f"task.input={ROAD}",
                 "task.max_images=2", "nproc=2")  # fmt: skip
    assert len(table(folder / "features.csv")) == len(names(folder / "features")) == 4
    assert len(names(folder / "plots" / "features")) == 2
    assert min(size(folder / "plots" / "features.png")) > 100


def test_a_recipe_trains_on_the_sets_that_are_there_and_draws_what_it_learns(run):
    settings = ["experiment=dinov3_mmrs1m", f"data.root={MMRS}", "data.size=32"]
    settings += ["model.size=vits16", "global_batch_size=4", "data.num_workers=0"]
    folder = run(*settings, *BACKBONE, *SHORT)
    assert result(folder)["data"]["datasets"] == ["DUBAI_split"]
    assert names(folder / "plots") == {"curves.png", "confusion.png", "val.png"}
