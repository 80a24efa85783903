from __future__ import annotations

import cv2
import numpy as np
import pytest
from PIL import Image

from exp.vision.data.labels import IGNORED, ColorMasks, IndexMasks
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


def test_masks_of_32_bits_may_hold_minus_one(tmp_path):
    Image.fromarray(np.array([[-1, 0, 1], [9, 1, 0]], np.int32)).save(tmp_path / "x.tif")
    plain, by_table = IndexMasks(2, ignored=[-1, 9]), IndexMasks(2, {-1: 1, 0: 0, 1: 0}, ignored=[-1, 9])
    assert plain.read(tmp_path / "x.tif").tolist() == [[IGNORED, 0, 1], [IGNORED, 1, 0]]
    assert by_table.read(tmp_path / "x.tif").tolist() == [[1, 0, 0], [IGNORED, 0, 0]]
    for far in (-5, 70000):
        Image.fromarray(np.array([[far]], np.int32)).save(tmp_path / "x.tif")
        refused("x.tif holds .*, which is no class", plain.read, tmp_path / "x.tif")
    refused("data.mask_values=.*2: 2.* class numbers below 2", IndexMasks, 2, {1: 0, 2: 2})


@pytest.mark.parametrize(("name", "masks", "said"), [
    ("numbers.png", IndexMasks(3, ignored=[3]), "holds 4, which is no class; .*data.mask_values"),
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
