"""What tasks make of trained scenes and segmentation: tables, pictures, maps and features."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.behaviour.conftest import result, table


@pytest.fixture
def run(exp):
    """Runs exp on the CPU, with pictures; gives the run's folder."""

    def ended(*arguments):
        done = exp(*arguments, "backend=cpu", "plots=true", "output_dir=run")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return exp.path("run")

    return ended


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
    assert sum(float(row["square_meters"]) for row in rows) == 150 * 230 * 0.25
    assert result(folder)["metrics"]["failed"] == 0
