from __future__ import annotations

import subprocess
import sys
import textwrap

import cv2
import numpy as np
import pytest
from PIL import Image

from exp.errors import DataError
from exp.vision.data.labels import ColourMasks, IndexMasks
from exp.vision.data.reader import ImageReader
from exp.vision.data.values import convert
from exp.vision.predict.raster import open_image
from tests.conftest import clean_environment
from tests.vision.data.conftest import SAMPLES, part


def read_image(path, channels=3, value_range=None, alpha=None):
    return ImageReader(channels, value_range, alpha)(path)


def test_colours_come_in_the_order_of_the_file(tmp_path, noise):
    written = noise(tmp_path / "ä x.png")
    read = read_image(tmp_path / "ä x.png")
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, written)


def test_sixteen_bits_keep_their_depth():
    path = next((SAMPLES / "eurosat_nir" / "Forest").iterdir())
    values = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    assert values.dtype == np.uint16
    with pytest.raises(DataError, match=rf"holds uint16 values from {values.min()} to .*data.value_range=auto"):
        read_image(path, channels=1)
    stretched = read_image(path, channels=3, value_range=(1000, 3000))
    assert stretched.dtype == np.float32
    assert stretched.shape == (64, 64, 3)
    np.testing.assert_allclose(stretched[..., 1], np.clip((values - 1000.0) / 2000.0, 0, 1) * 255, atol=1e-3)


def test_a_thermal_frame_is_grey():
    path = next((SAMPLES / "hituav" / "night").iterdir())
    grey = read_image(path, channels=1)
    assert grey.shape == (512, 640, 1)
    np.testing.assert_array_equal(read_image(path, channels=3), np.repeat(grey, 3, axis=2))


@pytest.mark.parametrize(("found", "wanted"), [(1, 3), (3, 1), (5, 5), (4, 4)])
def test_channels_by_one_rule(found, wanted):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, found), dtype=np.uint8)
    made = convert(pixels, "x.png", wanted)
    assert made.shape == (4, 5, wanted)
    assert made.flags.c_contiguous
    if wanted == 1:
        expected = pixels[..., :3] @ np.array([0.299, 0.587, 0.114])
        np.testing.assert_allclose(made[..., 0], expected, atol=0.51)
    elif found < wanted:
        np.testing.assert_array_equal(made, pixels[..., [0, 0, 0]])
    else:
        np.testing.assert_array_equal(made, pixels)


@pytest.mark.parametrize(("found", "wanted"), [(3, 4), (1, 2), (5, 3), (13, 12), (4, 3), (2, 1)])
def test_other_channels_are_refused(found, wanted):
    with pytest.raises(
        DataError, match=rf"x.png has {found} channels, but data.channels={wanted}; give images of {wanted}, or train"
    ):
        convert(np.zeros((4, 5, found), np.uint8), "x.png", wanted)


# -- transparency, or a band? -----------------------------------------------------------------------------------------

OPAQUE, BAND = "opaque", "band"


@pytest.fixture
def four_bands(tmp_path):
    """Writes an image of four bands as PNG (whose fourth is alpha) or TIFF, marked as alpha or not."""

    def write(suffix, fourth, marked=True):
        pixels = np.random.default_rng(0).integers(1, 255, (40, 50, 4), dtype=np.uint8)
        if fourth is OPAQUE:
            pixels[..., 3] = 255
            pixels[:10, :, 3] = 0
        path = tmp_path / f"x.{suffix}"
        if suffix == "png":
            Image.fromarray(pixels, "RGBA").save(path)
            return path, pixels
        rasterio = pytest.importorskip("rasterio")
        profile = {"driver": "GTiff", "height": 40, "width": 50, "count": 4, "dtype": "uint8", "crs": "EPSG:32640"}
        place = rasterio.transform.from_origin(3e5, 2.8e6, 0.5, 0.5)
        # GDAL marks the fourth of four bands as alpha unless it is told otherwise.
        more = {} if marked else {"photometric": "minisblack", "alpha": "unspecified"}
        with rasterio.open(path, "w", transform=place, **profile, **more) as file:
            file.write(np.moveaxis(pixels, -1, 0))
        return path, pixels

    return write


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_a_marked_alpha_channel_is_left_out_and_says_where_there_is_no_data(four_bands, suffix):
    path, pixels = four_bands(suffix, OPAQUE)
    np.testing.assert_array_equal(read_image(path), pixels[..., :3])
    with open_image(path, ImageReader(), whole=0) as image:
        np.testing.assert_array_equal(part(image, 5, 0, 20, 50), pixels[5:25, :, :3])
        np.testing.assert_array_equal(image.without_data(5, 20), pixels[5:25, :, 3] == 0)


@pytest.mark.parametrize(
    ("suffix", "fourth", "marked", "channels", "said"),
    [
        ("png", BAND, True, 3, "marks channel 4 as alpha, but most of its values are neither"),
        ("tif", BAND, True, 3, "marks channel 4 as alpha, but most of its values are neither"),
        ("png", OPAQUE, True, 4, "marks channel 4 as alpha, but data.channels=4; set data.alpha=false"),
        ("tif", BAND, True, 4, "marks channel 4 as alpha, but data.channels=4; set data.alpha=false"),
        ("tif", BAND, False, 3, "has 4 channels, and does not mark the last as alpha; set data.channels=4 to use it"),
        ("tif", OPAQUE, False, 1, "has 4 channels, and does not mark the last as alpha"),
    ],
)
def test_what_cannot_be_told_is_asked_for(four_bands, suffix, fourth, marked, channels, said):
    path, _ = four_bands(suffix, fourth, marked)
    with pytest.raises(DataError, match=said):
        read_image(path, channels)

    def predicted():
        with open_image(path, ImageReader(channels), whole=0) as image:
            part(image, 0, 0, 20, 20)

    with pytest.raises(DataError, match=said):
        predicted()


@pytest.mark.parametrize("marked", [True, False])
def test_the_key_decides(four_bands, marked):
    path, pixels = four_bands("tif", BAND, marked)
    np.testing.assert_array_equal(read_image(path, 4, alpha=False), pixels)
    np.testing.assert_array_equal(read_image(path, 3, alpha=True), pixels[..., :3])
    pixels[:5, :, 3] = 0
    rasterio = pytest.importorskip("rasterio")
    with rasterio.open(path, "r+") as file:
        file.write(pixels[..., 3], 4)
    with open_image(path, ImageReader(4, alpha=False), whole=0) as image:
        assert image.without_data(0, 40) is None, "near infrared is no mask"
    with open_image(path, ImageReader(3, alpha=True), whole=0) as image:
        np.testing.assert_array_equal(image.without_data(0, 40), pixels[..., 3] == 0)
    if not marked:
        np.testing.assert_array_equal(read_image(path, 4), pixels)


@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
def test_no_data_is_what_the_file_says(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    bands = np.random.default_rng(0).normal(size=(2, 30, 20)).astype(np.float32)
    bands[:, :5] = -9999.0
    bands[:, 5:8] = np.nan
    bands[0, 20] = np.nan  # of one band only
    profile = {"driver": "GTiff", "height": 30, "width": 20, "count": 2, "dtype": "float32", "nodata": -9999.0}
    with rasterio.open(tmp_path / "x.tif", "w", **profile) as file:
        file.write(bands)
    reader = ImageReader(2, "auto", examples=[str(tmp_path / "x.tif")])
    assert -4 < reader.value_range[0] < reader.value_range[1] < 4
    assert np.isfinite(reader(tmp_path / "x.tif")).all()
    with open_image(tmp_path / "x.tif", reader, whole=0) as image:
        part(image, 0, 0, 30, 20)
        assert image.without_data(0, 30).all(axis=1).tolist() == [row < 8 for row in range(30)]


def test_values_without_a_known_range_need_one():
    with pytest.raises(DataError, match=r"x.tif holds float32 values from 0 to 0; set data.value_range"):
        convert(np.zeros((2, 2, 1), np.float32), "x.tif", 1)
    made = convert(np.array([[-2.0, 0.0, 1.0, 9.0, np.nan]], np.float32)[..., None], "x.tif", 1, (0.0, 2.0))
    np.testing.assert_array_equal(made[..., 0], [[0.0, 0.0, 127.5, 255.0, 0.0]])


@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
def test_tiffs_of_many_channels(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    bands = np.random.default_rng(0).integers(0, 3000, (13, 6, 7), dtype=np.uint16)
    profile = {"driver": "GTiff", "height": 6, "width": 7, "count": 13, "dtype": "uint16", "compress": "lzw"}
    with rasterio.open(tmp_path / "all.tif", "w", **profile) as file:
        file.write(bands)
    read = read_image(tmp_path / "all.tif", channels=13, value_range=(0, 3000))
    np.testing.assert_allclose(read, np.moveaxis(bands, 0, -1) * (255 / 3000), rtol=1e-5)


@pytest.mark.parametrize(("channels", "said"), [(3, "(40, 50, 3)"), (4, "need rasterio (pip install 'exp[geo]')")])
def test_without_rasterio_tiffs_of_up_to_three_channels_are_read(tmp_path, noise, channels, said):
    noise(tmp_path / "x.tif", channels=channels)
    (tmp_path / "find.py").write_text(
        textwrap.dedent(
            """
            import importlib.util, sys

            class Hidden:
                # Finds everything but rasterio, as where it is not installed.
                def __init__(self, finder):
                    self.finder = finder

                def find_spec(self, name, path=None, target=None):
                    return None if name == "rasterio" else self.finder.find_spec(name, path, target)

            sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
            from exp.vision.data.reader import ImageReader
            from exp.errors import DataError

            try:
                print(ImageReader(int(sys.argv[1]))("x.tif").shape)
            except DataError as error:
                print(error)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "find.py", str(channels)],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in done.stdout, done.stderr


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path, noise, suffix, share, capfd):
    path = tmp_path / f"x.{suffix}"
    noise(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=rf"x\.{suffix} is (truncated|empty)"):
        read_image(path)
    assert capfd.readouterr().err == ""  # OpenCV has nothing to add


def test_bytes_after_the_end_of_a_jpeg_do_no_harm(tmp_path, noise):
    noise(tmp_path / "x.jpg")
    whole = read_image(tmp_path / "x.jpg")
    with (tmp_path / "x.jpg").open("ab") as file:
        file.write(b"\0" * 100)
    np.testing.assert_array_equal(read_image(tmp_path / "x.jpg"), whole)


@pytest.mark.parametrize("how", ["sequential", "progressive", "grey", "restarts"])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.98])
def test_a_truncated_jpeg_with_an_end_marker_is_named(tmp_path, how, share):
    """As a tool leaves it that closes broken files; every decoder fills the rest with grey, and calls it an image."""
    pixels = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8), (0, 0), 3)
    path = tmp_path / "x.jpg"
    if how == "restarts":
        assert cv2.imwrite(str(path), pixels, [cv2.IMWRITE_JPEG_RST_INTERVAL, 5])
    else:
        mode = "L" if how == "grey" else "RGB"
        Image.fromarray(pixels).convert(mode).save(path, quality=90, progressive=how == "progressive")
    whole = path.read_bytes()
    assert read_image(path).shape == (200, 300, 3)
    begin = whole.rfind(b"\xff\xda") + 16
    cut = begin + int(share * (len(whole) - 2 - begin))
    cut -= whole[cut - 1] == 0xFF
    path.write_bytes(whole[:cut] + b"\xff\xd9")
    with pytest.raises(DataError, match=r"x.jpg is truncated: data are missing before the end of the JPEG"):
        read_image(path)


@pytest.mark.parametrize("progressive", [False, True])
def test_an_image_may_be_grey_at_its_end(tmp_path, progressive):
    pixels = np.full((64, 64, 3), 128, np.uint8)
    pixels[:20] = 7
    Image.fromarray(pixels).save(tmp_path / "x.jpg", progressive=progressive)
    assert np.abs(read_image(tmp_path / "x.jpg").astype(int) - pixels).mean() < 2


def test_a_jpeg_for_print_is_read_in_colours(tmp_path):
    pixels = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), (0, 0), 5)
    Image.fromarray(pixels).convert("CMYK").save(tmp_path / "x.JPG", quality=95)
    assert np.abs(read_image(tmp_path / "x.JPG").astype(int) - pixels).mean() < 4


def test_the_end_of_a_preview_is_not_that_of_its_jpeg(tmp_path, noise):
    """A camera's file holds a small JPEG in front of the large one; here the large one is cut."""
    noise(tmp_path / "small.jpg", 8, 8)
    noise(tmp_path / "large.jpg", 100, 100)
    small, large = ((tmp_path / name).read_bytes() for name in ("small.jpg", "large.jpg"))
    segment = b"\xff\xe1" + (len(small) + 2).to_bytes(2, "big") + small
    (tmp_path / "x.jpg").write_bytes(large[:2] + segment + large[2:-200])
    with pytest.raises(DataError, match="truncated"):
        read_image(tmp_path / "x.jpg")
    (tmp_path / "x.jpg").write_bytes(large[:2] + segment + large[2:])
    assert read_image(tmp_path / "x.jpg").shape == (100, 100, 3)


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.tif"])
def test_what_is_no_image_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"<html>404</html>" * 10)
    with pytest.raises(DataError, match=rf"{name} cannot be (decoded|read)"):
        read_image(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"x.jpg cannot be read: No such file"):
        read_image(tmp_path / "x.jpg")


@pytest.mark.filterwarnings("ignore")
def test_jpeg_2000_is_read_whole_and_by_rows_but_no_lossy_mask(tmp_path, monkeypatch):
    """Sentinel-2's own form."""
    rasterio = pytest.importorskip("rasterio")
    bands = np.random.default_rng(0).integers(0, 4000, (4, 30, 40)).astype(np.uint16)
    labels = np.random.default_rng(1).integers(0, 3, (1, 30, 40)).astype(np.uint8)
    for name, values, exact in (("x", bands, "YES"), ("mask", labels, "YES"), ("lossy", labels, "NO")):
        profile = {"driver": "JP2OpenJPEG", "height": 30, "width": 40, "count": len(values), "dtype": values.dtype}
        quality = {"QUALITY": 100} if exact == "YES" else {}
        with rasterio.open(tmp_path / f"{name}.jp2", "w", REVERSIBLE=exact, **quality, **profile) as file:
            file.write(values)
    reader = ImageReader(4, (0, 25500))
    expected = np.moveaxis(bands, 0, -1) / np.float32(100)
    np.testing.assert_allclose(reader(tmp_path / "x.jp2"), expected, rtol=1e-5)
    with open_image(tmp_path / "x.jp2", reader, whole=0) as image:
        np.testing.assert_allclose(part(image, 10, 5, 8, 20), expected[10:18, 5:25], rtol=1e-5)
    np.testing.assert_array_equal(IndexMasks(3).read(tmp_path / "mask.jp2").values, labels[0])
    for masks in (IndexMasks(3), ColourMasks(["000000"])):
        with pytest.raises(DataError, match=r"lossy.jp2 is a lossy JPEG 2000 file, which changes values"):
            masks.read(tmp_path / "lossy.jp2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="JPEG 2000 files of more than three channels need rasterio"):
        reader(tmp_path / "x.jp2")
