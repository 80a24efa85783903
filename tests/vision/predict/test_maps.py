from __future__ import annotations

import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from exp.vision.maps import (
    encode_shares,
    is_georeferenced,
    label_map,
    new_raster,
    shares_profile,
    write_class_tiff,
    write_png,
)
from exp.vision.raster import DecodedImage, RasterImage, open_image, pixel_area
from tests.conftest import clean_environment
from tests.vision.data.conftest import part, reads

CLASSES = ["roof", "road & rail", "water"]
PALETTE = [(250, 10, 10), (10, 200, 10), (10, 10, 250)]


def blocks(height=300, width=70):
    labels = np.random.default_rng(0).integers(0, 3, (height, width)).astype(np.uint8)
    labels[: height // 4] = 255
    return labels


def test_class_maps_hold_the_numbers_show_the_colours_and_lie_where_their_image_does(tmp_path, tiff):
    rasterio = pytest.importorskip("rasterio")
    labels, png = blocks(), tmp_path / "deep" / "x.png"
    path = tiff(tmp_path / "x.tif", np.zeros((3, 300, 70), np.uint8))
    with open_image(path, reads(), max_pixels=0) as image, label_map(png, image) as held:
        held[:] = labels
        write_png(png, held, PALETTE)
        write_class_tiff(tmp_path / "y.tif", held, image, CLASSES, PALETTE)
    assert [each.name for each in png.parent.iterdir()] == ["x.png"]
    with Image.open(png) as picture:
        np.testing.assert_array_equal(np.asarray(picture), labels)
    seen = cv2.imread(str(png))[..., ::-1]  # any other decoder sees the colours
    for number, color in [*enumerate(PALETTE), (255, (0, 0, 0))]:
        assert (seen[labels == number] == color).all()
    with rasterio.open(path) as image, rasterio.open(tmp_path / "y.tif") as file:
        np.testing.assert_array_equal(file.read(1), labels)
        assert (file.crs, file.transform, file.nodata) == (image.crs, image.transform, 255)
        assert file.colormap(1)[1] == (*PALETTE[1], 255)
        assert [file.tags(1)[f"class_{number}"] for number in range(3)] == CLASSES
        assert file.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
    names = ElementTree.parse(tmp_path / "y.tif.aux.xml").getroot().iter("Category")
    assert [each.text for each in names] == CLASSES


def test_memory_grows_with_the_width_and_not_with_the_height(tmp_path, tiff):
    """1000 x 8000 pixels, 8 classes: 24 MB of pixels, 256 MB of scores."""
    for height in (1000, 8000):
        tiff(tmp_path / f"{height}.tif", np.full((3, height, 1000), 7, np.uint8), compress="deflate")
    script = r"""
        import resource
        from pathlib import Path
        from exp.vision.data.bands import ImageReader
        from exp.vision.maps import label_map, write_class_tiff, write_png
        from exp.vision.raster import open_image
        from exp.vision.tiling import Tiling

        colours = [(number, 0, 0) for number in range(8)]

        def peak(height):
            scores = lambda windows: windows[:, :1].float().expand(-1, 8, -1, -1)
            with open_image(Path(f"{height}.tif"), ImageReader(), max_pixels=0) as image, \
                    label_map(Path("x.png"), image) as held:
                for top, left, block in Tiling("slide", 512, 0.25, blend="hann").blocks(scores, 8, image):
                    rows, columns = block.shape[1:]
                    assert image.missing_rows(top, rows) is None
                    held[top : top + rows, left : left + columns] = block.argmax(dim=0).numpy()
                write_png(Path("x.png"), held, colours)
                write_class_tiff(Path("y.tif"), held, image, "abcdefgh", colours)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        low, high = peak(1000), peak(8000)
        print(high - low)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, env=clean_environment(),
                          capture_output=True, text=True, timeout=280, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    # A TIFF keeps its index of strips, GDAL its cache; 7 MB of the map's file count, too, which the system can drop.
    assert float(done.stdout.splitlines()[-1]) < 80


@pytest.mark.parametrize(("dtype", "highest"), [(np.uint8, 256), (np.uint16, 3000)])
def test_a_large_png_by_rows_is_the_one_decoded_whole(tmp_path, dtype, highest):
    pytest.importorskip("rasterio")
    path, reader = tmp_path / "x.png", reads(value_range=(0, 3000))
    cv2.imwrite(str(path), np.random.default_rng(0).integers(0, highest, (150, 90, 3)).astype(dtype))
    with open_image(path, reader) as image:
        assert isinstance(image, DecodedImage)
        whole = part(image, 0, 0, 150, 90)
    with open_image(path, reader, max_pixels=0) as image:
        assert isinstance(image, RasterImage)
        for top, left in ((0, 0), (0, 30), (40, 10), (86, 26)):  # down the image, as windows go
            np.testing.assert_array_equal(part(image, top, left, 64, 64), whole[top : top + 64, left : left + 64])
        if dtype is np.uint8:  # each pixel of the picture is the mean of 10 x 10
            means = whole.reshape(15, 10, 9, 10, 3).mean(axis=(1, 3))
            np.testing.assert_array_less(np.abs(image.thumbnail(15) - means), 2)


@pytest.mark.parametrize(("crs", "area"), [
    ("EPSG:32640", 4.0), ("EPSG:2263", 4.0 * 0.3048006096**2), ("EPSG:4326", None), ("EPSG:3857", None),
])  # fmt: skip
def test_a_pixel_has_an_area_in_a_plane_of_meters_or_feet(crs, area):
    rasterio = pytest.importorskip("rasterio")
    place = rasterio.transform.from_origin(3e5, 2e5, 2.0, 2.0)
    found = pixel_area(SimpleNamespace(crs=rasterio.crs.CRS.from_string(crs), transform=place))
    assert found == (area and pytest.approx(area, rel=1e-6))


@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_probabilities_lie_where_the_image_does_whatever_its_place(tmp_path, tiff, dtype):
    """Ground control points, a rotated transform, one from south to north, one without a system, and none."""
    rasterio = pytest.importorskip("rasterio")
    corners = [(0, 0, 54.0, 25.2), (0, 600, 54.1, 25.2), (700, 0, 54.0, 25.0), (700, 600, 54.1, 25.0)]
    shift, turn, scale = rasterio.Affine.translation(3e5, 5.8e6), rasterio.Affine.rotation, rasterio.Affine.scale
    places = {
        "points": {"transform": None, "gcps": [rasterio.control.GroundControlPoint(*each) for each in corners]},
        "rotated": {"transform": shift * turn(30) * scale(2, -2)}, "south": {"transform": shift * scale(2, 2)},
        "alone": {"crs": None, "transform": shift}, "nowhere": {"crs": None, "transform": None},
    }  # fmt: skip
    missing = np.zeros((700, 600), bool)
    missing[:40, :50] = True
    shares = torch.from_numpy(np.random.default_rng(0).random((2, 700, 600), np.float32))
    for name, place in places.items():
        path = tiff(tmp_path / f"{name}.tif", np.zeros((3, 700, 600), np.uint8), **place)
        with open_image(path, reads()) as image:
            assert is_georeferenced(image.dataset) is (name != "nowhere")
            written = tmp_path / f"map_{name}.tif"
            with new_raster(written, image, ["roof", "road"], **shares_profile(dtype)) as raster:
                for top, left in ((0, 0), (0, 300), (333, 0), (333, 300)):
                    part = slice(top, top + 333 if top == 0 else 700), slice(left, left + 300)
                    values = encode_shares(shares[(slice(None), *part)], missing[part], dtype)
                    raster.write(values, window=((part[0].start, part[0].stop), (left, left + 300)))
        with rasterio.open(path) as image, rasterio.open(written) as file:
            points = [[(each.row, each.col, each.x, each.y) for each in dataset.gcps[0]] for dataset in (image, file)]
            assert points == ([corners] * 2 if name == "points" else [[], []])
            assert (file.crs, file.gcps[1]) == (image.crs, image.gcps[1])
            assert file.transform.almost_equals(image.transform, 1e-9)
            found = file.read(masked=True)
            assert (found.mask == missing).all()
            np.testing.assert_allclose(
                np.ma.getdata(found * file.scales[0])[:, ~missing], shares[:, ~missing], atol=1 / 500
            )
            assert (file.descriptions, file.overviews(1)) == (("roof", "road"), [2])
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        f"{a}{b}.tif" for b in places for a in ("", "map_")
    )
