"""How much ground pixels cover, by what is known of the Earth, and tables of it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from exp.vision.predict.raster import row_areas
from exp.vision.predict.segmentation import Area, areas_csv, counted, total_csv

rasterio = pytest.importorskip("rasterio")
from rasterio.transform import from_bounds, from_origin  # noqa: E402

RADIUS = 6378137.0
EARTH = 510065621724089.0  # square metres of the WGS 84 ellipsoid


def dataset(crs, transform, height=64, width=48):
    return SimpleNamespace(crs=rasterio.crs.CRS.from_string(crs), transform=transform, height=height, width=width)


def test_mercators_pixels_shrink_with_the_latitude():
    """From 0 to 70 degrees, 10 degrees wide: the ground between these meridians and parallels."""
    wide, high = RADIUS * math.radians(10), RADIUS * math.asinh(math.tan(math.radians(70)))
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


@pytest.mark.parametrize(("crs", "origin", "area"), [
    ("EPSG:32640", (300000.0, 200000.0), 4.0),
    ("EPSG:2263", (984000.0, 200000.0), 4.0 * 0.3048006096**2),  # in feet
])  # fmt: skip
def test_maps_for_surveying_keep_their_own_plane(crs, origin, area):
    assert row_areas(dataset(crs, from_origin(*origin, 2.0, 2.0))) == pytest.approx(np.full(64, area), rel=1e-6)


def test_a_class_has_the_pixels_and_the_ground_of_its_rows_unless_the_file_does_not_tell_its_place():
    assert row_areas(SimpleNamespace(crs=None, transform=from_origin(0, 0, 1, 1), height=4, width=4)) is None
    areas, labels = np.linspace(1.0, 2.0, 300), np.zeros((300, 4), np.uint8)
    labels[270:] = 1
    counts, meters = counted(labels, areas)
    assert counts[:3].tolist() == [1080, 120, 0]
    assert meters[:2] == pytest.approx([4 * areas[:270].sum(), 4 * areas[270:].sum()])
    assert counted(labels, None)[1] is None


def test_shares_are_of_the_known_pixels_and_the_total_knows_metres_only_where_all_images_do():
    areas = [Area("a.tif", [1, 3], [4.0, 12.0]), Area("b, c.tif", [0, 0], [0.0, 0.0]), Area("d", [2, 2], None)]
    assert areas_csv(areas[:2], ["road", "water"]).decode().splitlines()[1:] == [
        "a.tif,road,1,0.250000,4.00", "a.tif,water,3,0.750000,12.00",
        '"b, c.tif",road,0,0.000000,0.00', '"b, c.tif",water,0,0.000000,0.00',
    ]  # fmt: skip
    total = ["road,1,0.250000,4.00", "water,3,0.750000,12.00"]
    assert total_csv(areas[:2], ["road", "water"]).decode().splitlines()[1:] == total
    assert total_csv(areas, ["road", "water"]).decode().splitlines()[1:] == ["road,3,0.375000,", "water,5,0.625000,"]
