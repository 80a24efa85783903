"""Class maps: what task=predict writes is what task=eval has measured."""

from __future__ import annotations

import csv
import signal
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.behaviour.conftest import result
from tests.conftest import Forked

COLORS = [0x3C1098, 0x8429F6, 0x6EC1E4, 0xFEDD3A, 0xE2A929]
DUBAI = Path(__file__).parents[2] / "data" / "dubai"
HALF = "data.eval_pipeline=[{type: Resize, scale_factor: 0.5}]"


def miou_of_map(predictions, masks):
    """The mean IoU of a written map against the mask of the file, over the classes that are in either."""
    ((name, mask),) = masks.items()
    colors = np.asarray(Image.open(mask).convert("RGB")).astype(np.int64) @ (0x10000, 0x100, 1)
    truth = np.select([colors == color for color in COLORS], range(len(COLORS)), default=255)
    found = np.asarray(Image.open(predictions / "classes" / f"{name}.png"))
    assert found.shape == truth.shape
    known = truth != 255
    counts = np.bincount(truth[known] * 5 + found[known], minlength=25).reshape(5, 5).astype(float)
    union = counts.sum(axis=0) + counts.sum(axis=1) - counts.diagonal()
    return float((counts.diagonal()[union > 0] / union[union > 0]).mean())


@pytest.mark.parametrize(
    "settings",
    [
        ["model.overlap=0.5", "model.blend=hann"],
        [HALF, "model.inference=whole", "model.tta_flip=true", "model.tta_scales=[1.0,0.75]"],
    ],
)
def test_a_written_map_has_the_miou_that_evaluation_reports(exp, trained, settings):
    run = trained("tiles")
    mask = next(DUBAI.glob("tile5/masks/*_008.png"))
    for task, more in (("eval", []), ("predict", ["task.gsd=3"])):
        done = exp(
            f"task={task}", *more, f"init_from={run}", "backend=cpu", "plots=false", *settings, f"output_dir={task}"
        )
        assert done.returncode == 0, done.stderr
    measured = exp.result("eval")["metrics"]["mIoU"]
    found = miou_of_map(exp.path("predict") / "predictions", {mask.stem: mask})
    assert found == pytest.approx(measured, abs=1e-9)
    assert measured != pytest.approx(result(run)["metrics"]["mIoU"], abs=1e-6)  # the settings do something
    with (exp.path("predict") / "predictions" / "areas.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["pixels"]) for row in rows) == 1126 * 1058
    assert all(float(row["square_meters"]) == 9 * int(row["pixels"]) for row in rows), "of 3 by 3 meters each"


def test_a_scene_of_four_tiles_is_seen_at_the_resolution_of_a_tile(exp, trained, tmp_path):
    """The pipeline halves a tile of 1126 x 1058 pixels, and would quarter the scene; the other halves anything."""
    with Image.open(next(DUBAI.glob("tile5/images/*_008.jpg"))) as tile:
        assert tile.size == (1126, 1058)
        Image.fromarray(np.tile(np.asarray(tile), (2, 2, 1))).save(tmp_path / "scene.png")
    maps = []
    for name, pipeline in (("sized", "data.eval_pipeline=[{type: Resize, scale: [563, 529]}]"), ("halved", HALF)):
        done = exp("task=predict", f"init_from={trained('tiles')}", "backend=cpu", "plots=false", pipeline,
                   "task.input=scene.png", f"output_dir={name}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        maps.append(np.asarray(Image.open(tmp_path / name / "predictions" / "classes" / "scene.png")))
    assert np.array_equal(*maps)
    assert len(np.unique(maps[0])) > 1
    files = exp.result("sized")["data"]["resized"]["files"]
    assert files == {str(tmp_path / "scene.png"): [1126, 1058]}


@pytest.fixture
def odd_files(tmp_path):
    """A folder with one good image, transparent in a corner, one that is none, and one of 900 million pixels."""
    folder = tmp_path / "odd"
    folder.mkdir()
    good = np.random.default_rng(0).integers(0, 256, (64, 64, 4), dtype=np.uint8)
    good[..., 3] = 255
    good[:20, 30:, 3] = 0
    Image.fromarray(good).save(folder / "good.png")
    (folder / "broken.png").write_bytes(b"<html>404</html>")
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)), (b"IDAT", b"\0"), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for kind, part in chunks:
        content += struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
    (folder / "huge.png").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "written"), [("scenes", "predictions.csv"), ("tiles", "predictions/classes/good.png")]
)
def test_a_bad_file_is_named_and_the_others_are_done(exp, trained, odd_files, name, written):
    settings = ["task=predict", f"init_from={trained(name)}", "backend=cpu", "plots=false", f"task.input={odd_files}"]
    done = exp(*settings, "output_dir=out")
    assert done.returncode == 1
    assert "broken.png" in done.stderr
    assert "huge.png" in done.stderr
    assert "good.png" not in done.stderr
    assert (exp.path("out") / written).is_file()
    if name == "tiles":
        missing = np.asarray(Image.open(exp.path("out") / written)) == 255
        assert missing[:20, 30:].all()
        assert missing.sum() == 20 * 34


def test_a_prediction_ends_between_windows_when_it_is_told_to(exp, trained, tmp_path):
    Image.fromarray(np.zeros((70_000, 1000, 3), np.uint8)).save(tmp_path / "large.png")  # too large to be held
    process = Forked(
        tmp_path, "task=predict", f"init_from={trained('tiles')}", "backend=cpu", "plots=false",
        f"task.input={tmp_path / 'large.png'}", "model.overlap=0.9", "output_dir=out",
    )  # fmt: skip
    maps = tmp_path / "out" / "predictions" / "classes"
    while not maps.is_dir():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(maps.iterdir())
    assert exp.result("out")["error"]["type"] == "Interrupted"
