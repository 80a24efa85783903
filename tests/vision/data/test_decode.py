from __future__ import annotations

import cv2
import numpy as np
import pytest
from PIL import Image

from exp.vision.data.decode import RawImage, read_raw
from exp.vision.data.masks import ColorMasks, IndexMasks
from exp.vision.raster import open_image
from tests.vision.data.conftest import SAMPLES, by_rows, cut, part, reads, refused


def read_image(path, **keys):
    return reads(**keys)(path)


def test_sixteen_bits_keep_their_depth():
    path = next((SAMPLES / "eurosat_nir" / "Forest").iterdir())
    values = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    stretched = read_image(path, channels=3, value_range=(1000, 3000))
    assert (stretched.dtype, stretched.shape) == (np.float32, (64, 64, 3))
    np.testing.assert_allclose(stretched[..., 1], np.clip((values - 1000.0) / 2000.0, 0, 1) * 255, atol=1e-3)
    refused(rf"{path.name} .*uint16 values from {values.min()} to .*data.value_range=", read_image, path, channels=1)


def test_channels_by_one_rule():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 5), dtype=np.uint8)

    def convert(found, wanted):
        reader = reads(channels=wanted)
        return reader.to_model_range(*reader.select_channels(RawImage(pixels[..., :found]), "x.png")[:2], "x.png")

    np.testing.assert_array_equal(convert(5, 5), pixels)
    np.testing.assert_array_equal(convert(1, 3), pixels[..., [0, 0, 0]])
    gray = convert(3, 1)
    assert gray.flags.c_contiguous
    np.testing.assert_allclose(gray[..., 0], pixels[..., :3] @ np.array([0.299, 0.587, 0.114]), atol=0.51)
    for found, wanted in ((3, 4), (5, 3), (2, 1)):
        refused(f"x.png .*{found} .*data.channels={wanted}", convert, found, wanted)


# -- transparency, or a band? -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "opaque", "marked", "keys", "asked"), [
    ("png", True, True, {}, None),
    ("tif", True, True, {}, None),
    ("tif", False, False, {"channels": 4}, None),
    ("tif", True, True, {"bands": [1, 2, 3, 4]}, None),  # the key decides
    ("png", False, True, {}, None),  # GDAL marks bands such as near infrared, too
    ("png", True, True, {"channels": 4}, "has 3 channels.*data.bands"),
    ("tif", True, False, {}, "has 4 channels.*data.bands"),
])  # fmt: skip
def test_a_fourth_band_is_alpha_which_tells_where_there_is_no_data_or_a_band(
    tmp_path, tiff, suffix, opaque, marked, keys, asked
):
    """By what it holds, by what the file says of it, and by the key data.bands."""
    pixels = np.random.default_rng(0).integers(1, 255, (40, 50, 4), dtype=np.uint8)
    if opaque:
        pixels[..., 3] = 255
        pixels[:10, :, 3] = 0
    path, reader = tmp_path / f"ä x.{suffix}", reads(**keys)
    if suffix == "png":
        Image.fromarray(pixels, "RGBA").save(path)
    else:  # GDAL marks the fourth of four bands as alpha unless it is told otherwise
        more = {} if marked else {"photometric": "minisblack", "alpha": "unspecified"}
        tiff(path, np.moveaxis(pixels, -1, 0), **more)
    for read in (reader.read_with_missing, lambda path: by_rows(path, reader)):
        if asked is not None:
            refused(f"x.{suffix} .*{asked}", read, path)
            continue
        image, missing = read(path)
        assert image.dtype == np.uint8
        np.testing.assert_array_equal(image, pixels[..., : reader.channels])
        np.testing.assert_array_equal(missing, pixels[..., 3] == 0 if reader.channels == 3 and opaque else None)


# -- files that are whole, and others ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_file_that_is_cut_or_no_image_is_named(tmp_path, noise, suffix, capfd):
    path = tmp_path / f"x.{suffix}"
    noise(path)
    content = path.read_bytes()
    for share in (0.99, 0.5, 0.0):
        cut(path, int(share * len(content)))
        refused(rf"x\.{suffix} is (truncated|empty)", read_image, path)
    path.write_bytes(b"<html>404</html>" * 10)
    refused(rf"x\.{suffix} cannot be decoded", read_image, path)
    path.rename(tmp_path / "x.tif")
    refused(r"x\.tif cannot be read", read_image, tmp_path / "x.tif")
    refused(rf"x\.{suffix} cannot be read", read_image, path)
    assert capfd.readouterr().err == ""  # OpenCV has nothing to add


def smooth(height, width):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return cv2.GaussianBlur(pixels, (0, 0), 4)


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_whole_jpegs_are_read(tmp_path, mode):
    """Also in the colors of print, and with bytes after the end."""
    path, pixels = tmp_path / "x.JPG", smooth(64, 64)
    Image.fromarray(pixels).convert(mode).save(path, quality=95)
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert np.abs(read_image(path).astype(int) - pixels).mean() < 2


def test_the_end_of_a_preview_is_not_that_of_its_jpeg(tmp_path, noise):
    """A camera's file holds a small JPEG in front of the large one; here the large one is cut."""
    path = tmp_path / "x.jpg"
    noise(path, 8, 8)
    small = path.read_bytes()
    noise(path, 100, 100)
    large = path.read_bytes()
    segment = b"\xff\xe1" + (len(small) + 2).to_bytes(2, "big") + small
    path.write_bytes(large[:2] + segment + large[2:])
    assert read_image(path).shape == (100, 100, 3)
    path.write_bytes(large[:2] + segment + large[2:-200])
    refused("x.jpg is truncated", read_image, path)


def test_other_kinds_of_images_are_read_as_they_look(tmp_path):
    """A palette, one bit, gray with transparency; a camera's orientation is not applied."""
    picture = Image.fromarray(smooth(20, 30)).quantize(8)
    turned, white_is_0 = Image.Exif(), {"tiffinfo": {262: 0}}
    turned[0x112] = 6
    for suffix, mode, more in (
        ("png", "P", {}), ("png", "1", {}), ("png", "LA", {}), ("png", "RGB", {"exif": turned}),
        ("tif", "1", {}), ("tif", "1", {"compression": "group4"}), ("tif", "1", white_is_0),
    ):  # fmt: skip
        path = tmp_path / f"x.{suffix}"
        picture.convert(mode).save(path, **more)
        np.testing.assert_array_equal(read_image(path), picture.convert(mode).convert("RGB"))


def test_jpeg_2000_is_read_whole_and_by_rows(tmp_path, tiff, without_rasterio):
    """Sentinel-2's own form."""
    exact = {"driver": "JP2OpenJPEG", "REVERSIBLE": "YES", "QUALITY": 100}
    bands = np.random.default_rng(0).integers(0, 4000, (4, 30, 40)).astype(np.uint16)
    labels = np.random.default_rng(1).integers(0, 3, (1, 30, 40)).astype(np.uint8)
    path, mask = tiff(tmp_path / "x.jp2", bands, **exact), tiff(tmp_path / "mask.jp2", labels, **exact)
    reader = reads(channels=4, value_range=(0, 25500))
    for read in (reader(path), by_rows(path, reader)[0]):
        np.testing.assert_allclose(read, np.moveaxis(bands, 0, -1) / np.float32(100), rtol=1e-5)
    np.testing.assert_array_equal(IndexMasks(3).read(mask), labels[0])
    without_rasterio()
    refused("x.jp2 .*rasterio", reader, path)


def test_without_rasterio_tiffs_of_three_channels_are_read(tmp_path, noise, without_rasterio):
    pixels = noise(tmp_path / "x.tif")
    without_rasterio()
    with open_image(tmp_path / "x.tif", reads()) as image:
        np.testing.assert_array_equal(part(image, 0, 0, 40, 50), pixels)


# -- what decoders would pass over ------------------------------------------------------------------------------------


def open_raster(path):
    with open_image(path, reads(), max_pixels=0):
        pass


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("read", [reads(), open_raster, ColorMasks(["000000"]).read, IndexMasks(3).read])
def test_further_pages_are_refused(tmp_path, read, installed, without_rasterio):
    first, *others = (Image.fromarray(np.full((24, 30, 3), value, np.uint8)) for value in (0, 50, 100))
    first.save(tmp_path / "pages.tif", save_all=True, append_images=others)
    if not installed:
        without_rasterio()
    refused("pages.tif has 3 pages", read, tmp_path / "pages.tif")


@pytest.mark.parametrize(("big", "number"), [("NO", 42), ("YES", 43)])
def test_overviews_and_masks_are_no_pages(tmp_path, tiff, big, number):
    band = np.full((3, 64, 64), 7, np.uint8)
    path = tiff(tmp_path / "x.tif", band, mask=band[0], BIGTIFF=big)
    with pytest.importorskip("rasterio").open(path, "r+") as file:
        file.build_overviews([2, 4])
    assert path.read_bytes()[2] == number
    assert reads()(path).shape == (64, 64, 3)


@pytest.mark.parametrize("dtype", ["complex64", "complex_int16"])
@pytest.mark.parametrize("read", [read_raw, open_raster])
def test_complex_values_are_refused(tmp_path, tiff, dtype, read):
    path = tiff(tmp_path / "slc.tif", np.full((1, 24, 30), -3 + 4j, np.complex64), dtype=dtype)
    refused(f"slc.tif holds {dtype} values", read, path)
