"""Class maps: what task=predict writes is what task=eval has measured."""

from __future__ import annotations

import csv
import json
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


def test_files_beside_each_other_give_the_map_of_one_scene_with_probabilities_and_polygons(exp, trained, tmp_path):
    """At two thirds of the resolution of the scene, which the model was trained at; without data in a corner."""
    rasterio = pytest.importorskip("rasterio")
    pytest.importorskip("pyogrio")
    scene = np.array(Image.open(next(DUBAI.glob("tile5/images/*_008.jpg"))))[:240, :330].transpose(2, 0, 1)
    scene[:, :30, :40] = 0
    place = rasterio.transform.from_origin(3.3e5, 2.78e6, 0.5, 0.5)
    profile = {"driver": "GTiff", "count": 3, "dtype": "uint8", "crs": "EPSG:32640", "nodata": 0}
    for name, left, right in (("whole/scene", 0, 330), ("tiles/west", 0, 170), ("tiles/east", 150, 330)):
        path = tmp_path / f"{name}.tif"
        path.parent.mkdir(exist_ok=True)
        corner = rasterio.Affine(0.5, 0, place.c + left / 2, 0, -0.5, place.f)
        with rasterio.open(path, "w", **profile, height=240, width=right - left, transform=corner) as file:
            file.write(scene[:, :, left:right])
    found = {}
    for name, more in (("whole", []), ("tiles", ["task.mosaic=true", "task.polygons=geojson"])):
        done = exp("task=predict", f"init_from={trained('tiles')}", "backend=cpu", "plots=false", *more,
                   f"task.input={name}", "task.probabilities=true", "data.gsd=0.75", "model.blend=hann",
                   f"output_dir={name}_out")  # fmt: skip
        assert done.returncode == 0, done.stderr
        warning = exp.result(f"{name}_out")["warnings"]
        assert any("0.5 m per pixel" in line and "0.75 m" in line for line in warning), warning
        for kind in ("classes", "probabilities"):
            (path,) = (tmp_path / f"{name}_out" / "predictions" / kind).glob("*.tif")
            with rasterio.open(path) as file:
                assert (file.crs, file.transform) == ("EPSG:32640", place)
                found[name, kind] = file.read()
    for kind in ("classes", "probabilities"):
        np.testing.assert_array_equal(found["whole", kind], found["tiles", kind])
    classes, shares = found["whole", "classes"][0], found["whole", "probabilities"].astype(int)
    missing = np.zeros((240, 330), bool)
    missing[:30, :40] = True
    assert ((classes == 255) == missing).all()
    assert ((shares == 255) == missing).all()
    chosen = np.take_along_axis(shares, np.where(missing, 0, classes)[None].astype(int), axis=0)[0]
    assert (chosen == shares.max(axis=0)).all()
    assert abs(shares.sum(axis=0)[~missing] - 254).max() <= 3  # roundings of five
    predictions = tmp_path / "tiles_out" / "predictions"
    features = json.loads((predictions / "polygons" / "mosaic.geojson").read_text())["features"]
    with (predictions / "areas.csv").open() as file:
        for row in csv.DictReader(file):
            own = [each["properties"] for each in features if each["properties"]["class"] == row["class"]]
            assert sum(each["pixels"] for each in own) == int(row["pixels"])
            assert sum(each["square_meters"] for each in own) == pytest.approx(float(row["square_meters"]), abs=0.1)
    assert all(0 <= each["properties"]["confidence"] <= 1 for each in features)


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
