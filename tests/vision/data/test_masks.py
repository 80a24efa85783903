from __future__ import annotations

import cv2
import numpy as np
import pytest
from PIL import Image

from exp.vision.data.masks import IGNORED, ColorMasks, IndexMasks
from tests.vision.data.conftest import refused

COLOURS = ["3C1098", "8429F6", "FEDD3A"]
RGB = np.array([[0x3C, 0x10, 0x98], [0x84, 0x29, 0xF6], [0xFE, 0xDD, 0x3A], [0x9B, 0x9B, 0x9B], [0, 0, 0]], np.uint8)


@pytest.fixture
def numbers():
    """Of class numbers 0 to 4; 4 is rare."""
    return np.random.default_rng(0).choice(5, (30, 40), p=[0.3, 0.25, 0.2, 0.2, 0.05]).astype(np.uint8)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_become_classes(tmp_path, numbers, mode):
    """3 is unlabelled, 4 a colour of no class; the palette of the file orders colours in its own way."""
    if mode == "P":
        order = [4, 2, 0, 3, 1]
        image = Image.fromarray(np.argsort(order).astype(np.uint8)[numbers], "P")
        image.putpalette(RGB[order].reshape(-1).tolist())
    else:
        image = Image.fromarray(RGB[numbers]).convert(mode)
    image.save(tmp_path / "x.png")
    masks = ColorMasks(COLOURS, ignored=["9B9B9B"])
    np.testing.assert_array_equal(masks.read(tmp_path / "x.png"), np.where(numbers < 3, numbers, IGNORED))
    assert masks.unknown == np.count_nonzero(numbers == 4)


def test_numbers_are_classes_whatever_the_palette_or_by_a_table(tmp_path, numbers):
    image = Image.fromarray(numbers, "P")
    image.putpalette(RGB[::-1].reshape(-1).tolist())
    image.save(tmp_path / "x.png")
    np.testing.assert_array_equal(IndexMasks(5).read(tmp_path / "x.png"), numbers)
    cv2.imwrite(str(tmp_path / "x.png"), numbers.astype(np.uint16) * 100)
    values = IndexMasks(4, {100: 0, 200: 1, 300: 2, 400: 3}, ignored=[0]).read(tmp_path / "x.png")
    np.testing.assert_array_equal(values, np.where(numbers == 0, IGNORED, numbers.astype(int) - 1))


@pytest.mark.parametrize(("dtype", "ignored"), [
    (np.uint8, 255), (np.int8, -100), (np.int16, -100), (np.uint16, 65535), (np.int32, -70000), (np.int32, -(2**31)),
    (np.uint32, 2**32 - 1), (np.float32, -100), (np.float64, -70000), (">i2", -100),
])  # fmt: skip
def test_any_number_can_be_ignored_or_be_a_class(tmp_path, tiff, dtype, ignored):
    """Values 0, 1 and another one, of any type; what is neither is refused by its value."""
    path = tiff(
        tmp_path / "x.tif", np.array([[[0, 1, ignored], [1, ignored, 0]]]).astype(np.dtype(dtype).newbyteorder("="))
    )
    assert IndexMasks(2, ignored=[ignored]).read(path).tolist() == [[0, 1, 255], [1, 255, 0]]
    assert IndexMasks(2, {0: 1, ignored: 0}, ignored=[1, ignored]).read(path).tolist() == [[1, 255, 0], [255, 0, 1]]
    refused(rf"x.tif holds {ignored}(\.0)?, which is no class", IndexMasks(2, ignored=[-1, 70]).read, path)


@pytest.mark.parametrize("bits", [1, 8])
def test_the_numbers_of_a_file_count_however_it_is_shown(tmp_path, tiff, without_rasterio, bits):
    """Inverted gray ("min is white"), which a viewer shows the other way round."""
    path = tiff(tmp_path / "x.tif", np.array([[[0, 1, 1]]], np.uint8), nbits=bits, photometric="MINISWHITE")
    assert IndexMasks(2).read(path).tolist() == [[0, 1, 1]]
    without_rasterio()
    assert IndexMasks(2).read(path).tolist() == [[0, 1, 1]]


def test_masks_of_32_bits_without_rasterio(tmp_path, without_rasterio):
    without_rasterio()
    Image.fromarray(np.array([[-1, 0, 1], [-70000, 1, 0]], np.int32)).save(tmp_path / "x.tif", tiffinfo={42113: "1"})
    assert IndexMasks(2, ignored=[-1, -70000]).read(tmp_path / "x.tif").tolist() == [[255, 0, 255], [255, 255, 0]]
    refused("data.label_map=.*2: 2.* class numbers below 2.*data.ignore_values", IndexMasks, 2, {1: 0, 2: 2})
    refused(r"data.ignore_values, here \[0, 255\]", IndexMasks, 2, {0: 255, 1: 0}, [255])


@pytest.mark.parametrize(("dtype", "nodata", "values", "labels"), [
    (np.uint8, 0, [0, 1, 2], [255, 1, 2]), (np.uint8, 255, [255, 1, 2], [255, 1, 2]),
    (np.uint8, 9, [0, 1, 2], [0, 1, 2]),
    (np.int8, -1, [-1, 1, 2], [255, 1, 2]),
    (np.int16, -9999, [-9999, 1, 2], [255, 1, 2]), (np.float32, float("nan"), [np.nan, 1, 2], [255, 1, 2]),
    (np.float32, None, [np.nan, 1, 2], [255, 1, 2]), (np.float64, -3.5, [-3.5, 1, 0], [255, 1, 0]),
])  # fmt: skip
def test_what_a_mask_declares_as_no_data_is_ignored(tmp_path, tiff, dtype, nodata, values, labels):
    path = str(tiff(tmp_path / "x.tif", np.array([[values]], dtype), nodata=nodata))
    masks = IndexMasks(3, ignored=[255])
    assert masks.read(path).tolist() == [labels]
    said = masks.nodata_values([path])
    assert said == ({} if nodata in (255, None) or nodata != nodata else {nodata: path})


def test_a_class_by_the_key_counts_though_a_mask_declares_it_as_no_data(tmp_path, tiff):
    path = tiff(tmp_path / "x.tif", np.array([[[0, 1, 2]]], np.uint8), nodata=0)
    assert IndexMasks(2, {0: 0, 1: 1}, [2]).read(path).tolist() == [[0, 1, 255]]
    assert IndexMasks(2, {1: 0, 2: 1}).read(path).tolist() == [[255, 0, 1]]


def test_pixels_without_data_have_no_class(tmp_path, tiff):
    """By an internal mask, or by transparency beside the numbers; a palette with transparency is not used."""
    numbers, kept = np.array([[0, 1, 1]], np.uint8), np.array([[255, 255, 0]], np.uint8)
    path = tiff(tmp_path / "x.tif", numbers[None], mask=kept)
    assert IndexMasks(2).read(path).tolist() == [[0, 1, 255]]
    Image.merge("LA", [Image.fromarray(numbers), Image.fromarray(kept)]).save(tmp_path / "x.png")
    assert IndexMasks(2).read(tmp_path / "x.png").tolist() == [[0, 1, 255]]
    image = Image.fromarray(numbers, "P")
    image.putpalette([9, 9, 9, 8, 8, 8])
    image.save(tmp_path / "y.png", transparency=0)
    assert IndexMasks(2).read(tmp_path / "y.png").tolist() == [[0, 1, 1]]
    for name in ("z.png", "z.tif"):
        Image.fromarray(numbers.astype(bool)).save(tmp_path / name)
        assert IndexMasks(2).read(tmp_path / name).tolist() == [[0, 1, 1]]


def test_masks_of_colors_follow_the_names_of_the_bands(tmp_path, tiff, numbers):
    colors = RGB[numbers % 3].transpose(2, 0, 1)
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        names = [("red", "green", "blue")[each] for each in order]
        path = tiff(tmp_path / "x.tif", colors[order], names)
        np.testing.assert_array_equal(ColorMasks(COLOURS).read(path), numbers % 3)


@pytest.mark.parametrize(("name", "masks", "said"), [
    ("numbers.png", IndexMasks(3, ignored=[3]), "holds 4, which is no class; .*data.label_map"),
    ("numbers.png", ColorMasks(COLOURS), "is no mask of colors.*data.classes"),
    ("colours.png", IndexMasks(5), "is no mask of class numbers.*data.palette"),
    ("numbers.jpg", IndexMasks(256), "is a JPEG, which changes values"),
    ("numbers.jpg", ColorMasks(COLOURS), "is a JPEG, which changes values"),
    ("cut.png", IndexMasks(3), "is truncated"),
    ("damaged.png", IndexMasks(3), "cannot be read"),
    ("damaged.png", ColorMasks(COLOURS), "cannot be decoded"),
])  # fmt: skip
def test_a_mask_that_cannot_be_meant_is_refused_by_name(tmp_path, numbers, name, masks, said):
    cv2.imwrite(str(tmp_path / "colours.png"), RGB[numbers])
    cv2.imwrite(str(tmp_path / "numbers.jpg"), numbers)
    cv2.imwrite(str(tmp_path / "numbers.png"), numbers)
    content = (tmp_path / "numbers.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[:-20])
    (tmp_path / "damaged.png").write_bytes(content[:60] + b"\0" * 20 + content[80:])
    refused(f"{name}:? {said}", masks.read, tmp_path / name)


def test_a_mask_of_other_colours_is_refused_above_a_share(tmp_path):
    """9 and 11 %."""
    colours = np.repeat(RGB[[0, 1]], 50, axis=0)[None].repeat(40, axis=0)
    colours[:, :9] = (1, 2, 3)
    Image.fromarray(colours).save(tmp_path / "known.png")
    assert np.count_nonzero(ColorMasks(COLOURS).read(tmp_path / "known.png") == IGNORED) == 40 * 9
    colours[:, :11] = (1, 2, 3)
    Image.fromarray(colours).save(tmp_path / "x.png")
    refused("x.png: .* data.palette.*010203; .*data.ignore_colors", ColorMasks(COLOURS).read, tmp_path / "x.png")
