from __future__ import annotations

import subprocess
import sys
import textwrap

import cv2
import numpy as np
import pytest
from PIL import Image

from exp.errors import DataError
from exp.vision.data.reader import ImageReader
from exp.vision.draw.pictures import resized_labels
from exp.vision.predict.classmaps import Counts, SmallMap, class_png, class_tiff, probability_tiff
from exp.vision.predict.raster import DecodedImage, RasterImage, open_image
from tests.conftest import clean_environment
from tests.vision.data.conftest import part

PALETTE = [(250, 10, 10), (10, 200, 10), (10, 10, 250)]


def blocks(height=300, width=70):
    labels = np.random.default_rng(0).integers(0, 3, (height, width)).astype(np.uint8)
    labels[: height // 4] = 255
    return labels


def parts(labels):
    """Rows as windows give them: not a multiple of anything."""
    return [labels[top : top + 77] for top in range(0, len(labels), 77)]


def test_a_class_png_holds_the_numbers_and_shows_the_colours(tmp_path):
    labels = blocks()
    with class_png(tmp_path / "deep" / "x.png", labels.shape, PALETTE) as writer:
        for rows in parts(labels):
            writer.add(rows)
        assert not (tmp_path / "deep" / "x.png").exists(), "before it is complete"
    content = (tmp_path / "deep" / "x.png").read_bytes()
    assert content[24] == 8, "bits for each pixel"
    with Image.open(tmp_path / "deep" / "x.png") as picture:
        assert picture.mode == "P"
        picture.verify()
    assert (np.asarray(Image.open(tmp_path / "deep" / "x.png")) == labels).all()
    # Any other decoder sees the colours.
    seen = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    for number, color in [*enumerate(PALETTE), (255, (0, 0, 0))]:
        assert (seen[labels == number] == color).all()


def test_a_class_tiff_lies_where_its_image_does(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    labels = blocks()
    place = rasterio.transform.from_origin(300000.0, 2800000.0, 0.5, 0.5)
    profile = {"driver": "GTiff", "height": 300, "width": 70, "count": 3, "dtype": "uint8"}
    with rasterio.open(tmp_path / "x.tif", "w", crs="EPSG:32640", transform=place, **profile) as file:
        file.write(np.zeros((3, 300, 70), np.uint8))
    with open_image(tmp_path / "x.tif", ImageReader(), whole=0) as image, class_tiff(
        tmp_path / "y.tif", image, PALETTE
    ) as writer:
        for rows in parts(labels):
            writer.add(rows)
    with rasterio.open(tmp_path / "y.tif") as file:
        assert (file.read(1) == labels).all()
        assert (file.crs.to_epsg(), file.transform, file.nodata) == (32640, place, 255)
        assert file.colormap(1)[1] == (*PALETTE[1], 255)


def test_a_probability_tiff_has_a_band_for_each_class(tmp_path):
    """Of parts from left to right, whose rows meet no tile; where there are no data it is nan."""
    rasterio = pytest.importorskip("rasterio")
    shares = np.random.default_rng(0).dirichlet((1, 1, 1), (300, 70)).astype(np.float32).transpose(2, 0, 1)
    missing = np.zeros((300, 70), bool)
    missing[:9] = True
    image = DecodedImage(np.zeros((300, 70, 3), np.uint8), missing)
    with probability_tiff(tmp_path / "p.tif", image, ["a", "b", "道路"]) as take:
        for top in range(0, 300, 77):
            for left in (0, 40):
                take(top, left, shares[:, top : top + 77, left : left + 40 if left == 0 else 70])
    with rasterio.open(tmp_path / "p.tif") as file:
        found = file.read()
        assert file.descriptions == ("a", "b", "道路")
    assert (found[:, 9:] == shares[:, 9:]).all()
    assert np.isnan(found[:, :9]).all()


def test_an_error_leaves_no_file(tmp_path):
    def broken():
        with class_png(tmp_path / "x.png", (9, 9), PALETTE) as writer:
            writer.add(np.zeros((3, 9), np.uint8))
            raise DataError("truncated")

    with pytest.raises(DataError, match="truncated"):
        broken()
    assert not list(tmp_path.iterdir())


def test_counts_and_the_small_copy_are_those_of_the_whole_map():
    labels = blocks(1000, 70)
    counts, small = Counts(), SmallMap(labels.shape, (41, 33))
    for rows in parts(labels):
        counts.add(rows)
        small.add(rows)
    assert counts.counts.tolist() == np.bincount(labels.ravel(), minlength=256).tolist()
    np.testing.assert_array_equal(small.labels, resized_labels(labels, 41, 33))


def test_memory_grows_with_the_width_and_not_with_the_height(tmp_path):
    """2000 x 16000 pixels, 8 classes: 96 MB of pixels, 1 GB of scores."""
    pytest.importorskip("rasterio")
    script = """
        import resource, pathlib, sys
        import numpy as np, rasterio, torch
        from exp.vision.data.reader import ImageReader
        from exp.vision.predict.classmaps import class_png, class_tiff
        from exp.vision.predict.raster import open_image
        from exp.vision.tiling import Tiling

        colours = [(number, 0, 0) for number in range(8)]

        def scores(image):
            assert image.any()
            return image[:, :1].float().expand(-1, 8, -1, -1)

        def peak(height):
            profile = {"driver": "GTiff", "height": height, "width": 2000, "count": 3, "dtype": "uint8"}
            band = np.full((3, 1000, 2000), 7, np.uint8)
            with rasterio.open("x.tif", "w", crs="EPSG:32640", compress="deflate", **profile) as file:
                for top in range(0, height, 1000):
                    file.write(band, window=rasterio.windows.Window(0, top, 2000, 1000))
            with open_image(pathlib.Path("x.tif"), ImageReader(), whole=0) as image:
                with class_png(pathlib.Path("x.png"), (height, 2000), colours) as png, \
                        class_tiff(pathlib.Path("y.tif"), image, colours) as tiff:
                    for top, labels in Tiling("slide", 512, 0.25).rows(scores, 8, image):
                        rows = labels.numpy()
                        assert image.without_data(top, len(rows)) is None
                        png.add(rows)
                        tiff.add(rows)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        low, high = peak(2000), peak(16000)
        print(high - low)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, env=clean_environment(),
                          capture_output=True, text=True, timeout=280, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    # A TIFF keeps its index of strips, and GDAL its cache.
    assert float(done.stdout.split()[-1]) < 80


@pytest.mark.parametrize(("dtype", "channels"), [(np.uint8, 4), (np.uint8, 1), (np.uint16, 3)])
def test_a_large_png_by_rows_is_the_one_decoded_whole(tmp_path, dtype, channels):
    pytest.importorskip("rasterio")
    pixels = (
        np.random.default_rng(0).integers(0, 3000 if dtype is np.uint16 else 256, (150, 90, channels)).astype(dtype)
    )
    if channels == 4:
        pixels[..., 3] = 255
        pixels[20:40, :, 3] = 0
    cv2.imwrite(str(tmp_path / "x.png"), pixels)
    reader = ImageReader(min(channels, 3), (0, 3000))
    with open_image(tmp_path / "x.png", reader) as image:
        assert isinstance(image, DecodedImage)
        whole, missing = part(image, 0, 0, 150, 90), image.without_data(0, 150)
    with open_image(tmp_path / "x.png", reader, whole=0) as image:
        assert isinstance(image, RasterImage)
        for top, left in ((0, 0), (0, 30), (40, 10), (86, 26)):  # down the image, as windows go
            np.testing.assert_array_equal(part(image, top, left, 64, 64), whole[top : top + 64, left : left + 64])
            found = image.without_data(top, 30)
            expected = None if missing is None or not missing[top : top + 30].any() else missing[top : top + 30]
            np.testing.assert_array_equal(found, expected)
        if dtype is np.uint8 and channels == 1:  # each pixel of the picture is the mean of 10 x 10
            means = whole.reshape(15, 10, 9, 10).mean(axis=(1, 3))
            np.testing.assert_array_less(np.abs(image.thumbnail(15)[..., 0] - means), 2)
