from __future__ import annotations

import json

import numpy as np
import pytest

from exp.errors import UnavailableError
from exp.vision.maps import encode_shares, new_raster, shares_profile, write_class_tiff
from exp.vision.raster import open_image
from tests.vision.data.conftest import reads

CLASSES, PALETTE = ["land", "roof", "water"], [(0, 0, 0), (9, 9, 9), (0, 0, 255)]
MIDDLE = 700  # of two roofs in the rows where parts of the map are read


@pytest.fixture
def maps(tmp_path, tiff):
    """Class map and confidence of 1000 x 90 pixels of 0.5 m: land with two roofs, water with an island, and no data."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("pyogrio")
    labels = np.zeros((1000, 90), np.uint8)
    labels[MIDDLE : MIDDLE + 100, 10:30] = 1
    labels[3:5, 3:6] = 1
    labels[100:200, 50:90] = 2
    labels[120:140, 60:70] = 0
    labels[900:] = 255
    margin = torch.full((1, 1000, 90), 0.25)
    margin[0, MIDDLE : MIDDLE + 50, 10:30] = 1.0

    def make(**place):
        path = tiff(tmp_path / "x.tif", np.zeros((3, 1000, 90), np.uint8), **place)
        with open_image(path, reads()) as image:
            write_class_tiff(tmp_path / "classes.tif", labels, image, CLASSES, PALETTE)
            with new_raster(tmp_path / "margin.tif", image, ["margin"], **shares_profile("float16")) as raster:
                raster.write(encode_shares(margin, labels == 255, "float16"))
        return tmp_path / "classes.tif", tmp_path / "margin.tif", CLASSES

    return make


def test_areas_are_whole_and_have_class_size_and_confidence(maps, tmp_path):
    import pyogrio
    import rasterio
    import shapely

    from exp.vision.polygons import write_polygons

    turned = rasterio.Affine.translation(3e5, 5e6) * rasterio.Affine.rotation(30) * rasterio.Affine.scale(0.5, -0.5)
    arguments = maps(crs="EPSG:32633", transform=turned)
    found = {}
    for name, more in (("all", {}), ("large", {"min_area": 2.0}), ("simple", {"tolerance": 1.0})):
        path = tmp_path / f"{name}.gpkg"
        if name == "simple" and not hasattr(shapely, "coverage_simplify"):
            with pytest.raises(UnavailableError, match=r"shapely 2\.1"):
                write_polygons(path, *arguments, 0.25, **more)
            continue
        write_polygons(path, *arguments, 0.25, **more)
        about, _, shapes, columns = pyogrio.raw.read(path)
        assert about["crs"] == "EPSG:32633"
        shapes = shapely.from_wkb(shapes)
        assert shapely.is_valid(shapes).all()
        found[name] = sorted(zip(*(column.tolist() for column in columns), shapely.area(shapes).round(6)))
    land = 900 * 90 - 2000 - 6 - 4000
    expected = [
        ("land", 200, 50.0, 0.25, 50.0), ("land", land, land / 4, 0.25, land / 4), ("roof", 6, 1.5, 0.25, 1.5),
        ("roof", 2000, 500.0, 0.625, 500.0), ("water", 3800, 950.0, 0.25, 950.0),
    ]  # fmt: skip
    assert found["all"] == expected
    assert found["large"] == [row for row in expected if row[2] >= 2]
    simple = found.get("simple", expected)
    assert [row[:4] for row in simple] == [row[:4] for row in expected]
    assert sum(row[4] for row in simple) == pytest.approx(900 * 90 / 4)  # no gaps, and nothing twice
    shapes = shapely.from_wkb(pyogrio.raw.read(tmp_path / "all.gpkg")[2])
    roof = shapes[np.argmin(abs(shapely.area(shapes) - 500))]
    corners = [turned * point for point in ((10, MIDDLE), (30, MIDDLE), (30, MIDDLE + 100), (10, MIDDLE + 100))]
    assert roof.symmetric_difference(shapely.Polygon(corners)).area < 1e-6


def test_geojson_has_longitude_and_latitude_or_columns_and_rows(maps, tmp_path):
    import rasterio

    from exp.vision.polygons import write_polygons

    for place in ({"crs": "EPSG:32633", "transform": rasterio.Affine(0.5, 0, 5e5, 0, -0.5, 0)}, {"crs": None}):
        arguments = maps(**{"transform": None, **place})
        write_polygons(tmp_path / "x.geojson", *arguments, None, min_area=3000)
        features = json.loads((tmp_path / "x.geojson").read_text())["features"]
        assert [each["properties"]["class"] for each in features] == ["water", "land"]
        assert set(features[0]["properties"]) == {"class", "pixels", "confidence"}
        first = np.array(features[0]["geometry"]["coordinates"][0])
        if place["crs"] is None:
            assert (first.min(axis=0).tolist(), first.max(axis=0).tolist()) == ([50, 100], [90, 200])
        else:  # 25 to 45 m east of 15 degrees, 50 to 100 m south of the equator
            meters = (first - [15.0, 0.0]) * [111_320 * 0.9996, 110_574 * 0.9996]
            np.testing.assert_allclose([meters.min(axis=0), meters.max(axis=0)], [[25, -100], [45, -50]], atol=0.1)
