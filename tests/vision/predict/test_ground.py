"""How much ground pixels cover, by what is known of the Earth."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from exp.vision.data.reader import ImageReader
from exp.vision.predict.classmaps import Counts
from exp.vision.predict.ground import row_areas
from exp.vision.predict.raster import DecodedImage, metres_of, open_image
from exp.vision.predict.segmentation import SegmentationWriter

rasterio = pytest.importorskip("rasterio")
from rasterio.transform import from_bounds, from_origin  # noqa: E402

RADIUS = 6378137.0
EARTH = 510065621724089.0  # square metres of the WGS 84 ellipsoid


def dataset(crs, transform, height=64, width=48):
    return SimpleNamespace(crs=rasterio.crs.CRS.from_string(crs), transform=transform, height=height, width=width)


def mercator(latitude):
    return RADIUS * math.asinh(math.tan(math.radians(latitude)))


def test_mercators_pixels_shrink_with_the_latitude():
    """From 0 to 70 degrees, 10 degrees wide: the ground between these meridians and parallels."""
    wide, high = RADIUS * math.radians(10), mercator(70)
    areas = row_areas(dataset("EPSG:3857", from_bounds(0, 0, wide, high, 40, 500), 500, 40))
    e = math.sqrt(0.00669437999014)
    below = math.sin(math.radians(70))
    part = below / (1 - (e * below) ** 2) + math.log((1 + e * below) / (1 - e * below)) / (2 * e)
    true = RADIUS**2 * (1 - e * e) / 2 * math.radians(10) * part
    assert areas.sum() * 40 == pytest.approx(true, rel=1e-4)
    assert areas[0] / areas[-1] == pytest.approx(math.cos(math.radians(70)) ** 2, rel=0.02)


def test_degrees_are_measured_row_by_row():
    areas = row_areas(dataset("EPSG:4326", from_bounds(-180, -90, 180, 90, 720, 360), 360, 720))
    assert areas.sum() * 720 == pytest.approx(EARTH, rel=1e-3)
    assert areas[0] < 0.01 * areas[180]


@pytest.mark.parametrize(("crs", "side"), [("EPSG:32640", 1.0), ("EPSG:2263", 0.3048006096)])
def test_maps_for_surveying_keep_their_own_plane(crs, side):
    areas = row_areas(dataset(crs, from_origin(984000.0 if side < 1 else 300000.0, 200000.0, 2.0, 2.0)))
    assert areas == pytest.approx(np.full(64, 4.0 * side**2), rel=1e-6)


def test_what_does_not_tell_a_place_has_no_areas():
    nowhere = SimpleNamespace(crs=None, transform=from_origin(0, 0, 1, 1), height=4, width=4)
    assert row_areas(nowhere) is None
    beyond = row_areas(dataset("EPSG:3035", from_origin(1e9, 1e9, 10, 10)))
    assert beyond == pytest.approx(np.full(64, 100.0)), "outside of the projection: its own plane"


def test_a_class_has_the_ground_of_its_rows():
    areas = np.linspace(1.0, 2.0, 10)
    counts = Counts(areas)
    labels = np.zeros((10, 4), np.uint8)
    labels[7:] = 1
    for top in (0, 6):
        counts.add(labels[top : top + 6])
    assert counts.metres[:2] == pytest.approx([4 * areas[:7].sum(), 4 * areas[7:].sum()])
    assert Counts().metres is None


def scaled(given, of_data, image):
    writer = SegmentationWriter.__new__(SegmentationWriter)
    writer.session = SimpleNamespace(config=SimpleNamespace(task=SimpleNamespace(metres_per_pixel=given)))
    writer.data, writer.overruled = SimpleNamespace(metres_per_pixel=of_data), 0
    side, areas = writer._scale(image)
    return side, None if areas is None else areas.tolist(), writer.overruled


def test_a_given_scale_holds_for_every_file(tmp_path):
    profile = {"driver": "GTiff", "height": 4, "width": 3, "count": 3, "dtype": "uint8", "crs": "EPSG:32640"}
    with rasterio.open(tmp_path / "x.tif", "w", transform=from_origin(3e5, 2.8e6, 2, 2), **profile) as file:
        file.write(np.zeros((3, 4, 3), np.uint8))
    plain = DecodedImage(np.zeros((4, 3, 3), np.uint8))
    with open_image(tmp_path / "x.tif", ImageReader(), whole=0) as image:
        assert metres_of(image) == 2.0
        assert scaled(None, 7.0, image) == (2.0, [4.0] * 4, 0), "the file's before that of the data"
        assert scaled(0.5, 7.0, image) == (0.5, [0.25] * 4, 1)
        assert scaled(2.0, None, image) == (2.0, [4.0] * 4, 0), "the same is no other"
    assert scaled(None, 7.0, plain) == (7.0, [49.0] * 4, 0)
    assert scaled(None, None, plain) == (None, None, 0)
