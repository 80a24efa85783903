"""Files that lie beside each other as one image, and images at the ground resolution of others."""

from __future__ import annotations

import numpy as np
import pytest

from exp.errors import DataError
from exp.vision.mosaic import mosaic_xml
from exp.vision.raster import ground_resolution, open_image
from tests.vision.data.conftest import part, reads


@pytest.fixture
def tiles(tmp_path, tiff):
    """Cuts an image into files, each (rows, columns), with their place on a rotated grid."""
    rasterio = pytest.importorskip("rasterio")
    grid = np.reshape(rasterio.transform.from_origin(3e5, 5.8e6, 0.3, 0.3), (3, 3))
    turn = np.array([[0.8, 0.6, 0], [-0.6, 0.8, 0], [0, 0, 1]])

    def make(pixels, places, **more):
        paths = []
        for number, (rows, columns) in enumerate(places):
            shift = np.array([[1, 0, columns.start], [0, 1, rows.start], [0, 0, 1]])
            transform = rasterio.Affine(*(grid @ turn @ shift).ravel()[:6])
            path = tmp_path / f"{number}.tif"
            paths.append(tiff(path, pixels[:, rows, columns], **{"transform": transform, **more}))
        return paths

    return make


@pytest.mark.parametrize(("dtype", "bands"), [(np.uint8, 3), (np.uint16, 4)])
def test_touching_and_overlapping_files_are_one_image_whose_hole_has_no_data(tmp_path, tiles, dtype, bands):
    import rasterio

    pixels = np.random.default_rng(0).integers(1, 200, (bands, 120, 100)).astype(dtype)
    pixels[:, 40:50, 20:30] = 0  # no data in the first file; the second has some of it
    pixels[0, 80:90, 60:70] = 0  # dark in one band: it has data
    other = pixels.copy()
    other[:, 40:45, 20:30] = 7
    places = [(slice(20, 60), slice(0, 50)), (slice(20, 45), slice(10, 50)), (slice(20, 60), slice(50, 100)),
              (slice(60, 120), slice(30, 100))]  # fmt: skip
    paths = tiles(pixels, places, nodata=0)
    paths[1] = tiles(other, places[:2], nodata=0)[1]
    paths[0] = tiles(pixels, places[:1], nodata=0)[0]
    path = tmp_path / "m.vrt"
    path.write_text(mosaic_xml(paths))
    expected, missing = other[:, 20:], np.zeros((100, 100), bool)
    missing[25:30, 20:30] = missing[40:, :30] = True
    reader = reads(channels=bands, value_range=(0, 255))
    for max_pixels in (0, 10**6):
        with open_image(path, reader, max_pixels=max_pixels) as image:
            np.testing.assert_array_equal(image.missing_rows(0, 100), missing)
            seen = part(image, 0, 0, 100, 100)
            np.testing.assert_allclose(seen[~missing], np.moveaxis(expected, 0, -1)[~missing], atol=1e-4)
            with rasterio.open(paths[2]) as file:
                corner = image.dataset.xy(0, 50), file.xy(0, 0)
            np.testing.assert_allclose(*corner)


@pytest.mark.parametrize(("more", "said"), [
    ({"crs": "EPSG:32634"}, "coordinate system"), ({"dtype": "uint8"}, "type"),
    ({"shift": 0.5}, "a part of a pixel"), ({"size": 1.01}, "size of pixels"),
])  # fmt: skip
def test_files_on_another_grid_are_refused(tiles, tiff, more, said):
    import rasterio

    pixels = np.ones((3, 40, 80), np.uint16)
    first, second = tiles(pixels, [(slice(0, 40), slice(0, 40)), (slice(0, 40), slice(40, 80))])
    with rasterio.open(second) as file:
        a, b, c, d, e, f = file.transform[:6]
    shift, size = more.get("shift", 0), more.get("size", 1)
    place = rasterio.Affine(a * size, b * size, c + a * shift, d * size, e * size, f + d * shift)
    tiff(second, np.ones((3, 40, 40), more.get("dtype", np.uint16)), transform=place, crs=more.get("crs", "EPSG:32633"))
    with pytest.raises(DataError, match=f"1.tif does not fit .*0.tif: .*{said}"):
        mosaic_xml([first, second])


@pytest.mark.parametrize(("crs", "pixel", "expected"), [
    ("EPSG:32640", 2.0, 2.0), ("EPSG:2263", 2.0, 2.0 * 0.3048006096), ("EPSG:4326", 1e-5, 1.1119 * 0.5**0.5),
    ("EPSG:3857", 2.0, 1.0), (None, 2.0, None),
])  # fmt: skip
def test_meters_per_pixel_are_those_on_the_ground(tmp_path, tiff, crs, pixel, expected):
    """In degrees and in Web Mercator at 60 degrees north, where a pixel is half as wide."""
    rasterio = pytest.importorskip("rasterio")
    north = {"EPSG:4326": 60.0, "EPSG:3857": 8399737.89}.get(crs, 2e5)
    place = rasterio.transform.from_origin(10.0, north, pixel, pixel)
    with rasterio.open(tiff(tmp_path / "x.tif", np.zeros((1, 4, 4), np.uint8), crs=crs, transform=place)) as file:
        assert ground_resolution(file) == (expected and pytest.approx(expected, rel=3e-3))
    assert ground_resolution(None) is None


@pytest.mark.parametrize("factor", [0.5, 2 / 3, 1.7])
def test_an_image_by_rows_at_another_resolution_is_the_one_read_whole(tmp_path, tiff, factor):
    """In any bands of rows, without seams; no data stay without, and do not mix with others."""
    pixels = np.random.default_rng(0).integers(50, 200, (3, 90, 60)).astype(np.uint8)
    pixels[:, 30:40, 30:40] = 0
    path = tiff(tmp_path / "x.tif", pixels, nodata=0)
    with open_image(path, reads(), max_pixels=0, factor=lambda _: factor) as image:
        height, width = image.seen.height, image.seen.width
        assert (image.height, image.width, height, width) == (90, 60, round(90 * factor), round(60 * factor))
        whole = part(image, 0, 0, height, width)
        missing = image.missing_rows(0, 90)
        assert (missing == (pixels[0] == 0)).all()
        assert whole[whole.any(axis=2)].min() >= 50
        if factor == 0.5:
            means = pixels.reshape(3, 45, 2, 30, 2).astype(float).mean(axis=(2, 4)).transpose(1, 2, 0)
            assert abs(whole - means).max() <= 0.5
    with open_image(path, reads(), max_pixels=0, factor=lambda _: factor) as image:
        for top in (0, 7, 20):
            rows = part(image, top, 3, 20, 30)
            assert abs(rows.astype(int) - whole[top : top + 20, 3:33]).max() <= 1, top


def test_the_training_images_say_at_what_resolution_others_are_seen(segmentation, tiff, tmp_path):
    labels = np.zeros((3, 20, 20), np.uint8)
    for number in range(6):
        tiff(tmp_path / "images" / f"{number}.tif", labels)  # of 10 meters
        tiff(tmp_path / "masks" / f"{number}.tif", labels[:1])
    keys = {"root": str(tmp_path), "classes": ["land"]}
    for gsd, expected in ((None, 10.0), (5.0, 5.0)):
        data = segmentation(**keys, gsd=gsd)
        assert data.training_gsd == expected
        assert data.scale_to_training(data.train.samples[0][0], 2.0) == 1.0
        assert data.scale_to_training("x.tif", 2.0) == 2.0 / expected
        assert data.scale_to_training("x.tif", expected * 1.02) == data.scale_to_training("x.tif", None) == 1.0
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    assert data.prepare_for_map(pixels, "x.tif", pixels[..., 0] > 250, 0.5).shape == (15, 20, 3)
