from __future__ import annotations

import cv2
import numpy as np
import pytest
from PIL import Image

from exp.errors import DataError
from exp.vision.data.labels import IGNORED, ColourMasks, IndexMasks

COLOURS = ["3C1098", "8429F6", "FEDD3A"]
RGB = np.array([[0x3C, 0x10, 0x98], [0x84, 0x29, 0xF6], [0xFE, 0xDD, 0x3A], [0x9B, 0x9B, 0x9B], [0, 0, 0]], np.uint8)


@pytest.fixture
def numbers():
    return np.random.default_rng(0).integers(0, 5, (30, 40)).astype(np.uint8)


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
    values, unknown = ColourMasks(COLOURS, ignored=["9B9B9B"], max_unknown=0.5).read(tmp_path / "x.png")
    np.testing.assert_array_equal(values, np.where(numbers < 3, numbers, IGNORED))
    assert unknown == np.count_nonzero(numbers == 4)


@pytest.mark.parametrize("mode", ["L", "P"])
def test_numbers_are_classes_whatever_the_palette(tmp_path, numbers, mode):
    image = Image.fromarray(numbers, "L")
    if mode == "P":
        image = Image.fromarray(numbers, "P")
        image.putpalette(RGB[::-1].reshape(-1).tolist())
    image.save(tmp_path / "x.png")
    values, unknown = IndexMasks(5).read(tmp_path / "x.png")
    np.testing.assert_array_equal(values, numbers)
    assert unknown == 0


def test_values_of_files_are_mapped(tmp_path, numbers):
    cv2.imwrite(str(tmp_path / "x.png"), numbers.astype(np.uint16) * 100)
    values, _ = IndexMasks(4, {100: 0, 200: 1, 300: 2, 400: 3}, ignored=[0]).read(tmp_path / "x.png")
    np.testing.assert_array_equal(values, np.where(numbers == 0, IGNORED, numbers.astype(int) - 1))


def test_an_unknown_number_is_an_error(tmp_path, numbers):
    cv2.imwrite(str(tmp_path / "x.png"), numbers)
    with pytest.raises(DataError, match=r"x.png holds 3, 4, which is no class; .*data.mask_values"):
        IndexMasks(3).read(tmp_path / "x.png")
    with pytest.raises(DataError, match="holds 4, which"):
        IndexMasks(3, ignored=[3]).read(tmp_path / "x.png")


def test_the_wrong_kind_of_mask_is_told(tmp_path, numbers):
    cv2.imwrite(str(tmp_path / "numbers.png"), numbers)
    cv2.imwrite(str(tmp_path / "colours.png"), RGB[numbers])
    with pytest.raises(DataError, match=r"numbers.png is no mask of colours.*data.classes"):
        ColourMasks(COLOURS).read(tmp_path / "numbers.png")
    with pytest.raises(DataError, match=r"colours.png is no mask of class numbers.*data.palette"):
        IndexMasks(5).read(tmp_path / "colours.png")


def test_a_table_of_other_colours_is_told(tmp_path):
    cv2.imwrite(str(tmp_path / "x.png"), np.full((4, 4, 3), (1, 2, 3), np.uint8))
    with pytest.raises(
        DataError, match=r"x.png: 100.0 % of the pixels have no colour .*: 030201 \(100.0 %\); the classes are 3C1098"
    ):
        ColourMasks(COLOURS).read(tmp_path / "x.png")


@pytest.mark.parametrize("masks", [IndexMasks(3), ColourMasks(COLOURS)])
def test_a_truncated_mask_is_named(tmp_path, numbers, masks):
    cv2.imwrite(str(tmp_path / "x.png"), numbers)
    content = (tmp_path / "x.png").read_bytes()
    (tmp_path / "x.png").write_bytes(content[:-20])
    with pytest.raises(DataError, match=r"x.png is truncated"):
        masks.read(tmp_path / "x.png")
    (tmp_path / "x.png").write_bytes(content[:60] + b"\0" * 20 + content[80:])
    with pytest.raises(DataError, match=r"x.png cannot be decoded"):
        masks.read(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("suffix", "share", "hint"), [("png", 9, None), ("png", 11, "data.max_unknown"), ("jpg", 0, "PNG")]
)
def test_a_mask_of_other_colours_is_refused_above_a_share(tmp_path, suffix, share, hint):
    """9 and 11 % of a PNG; a JPEG of nothing but known colours, which it changes."""
    colours = np.repeat(RGB[[0, 1]], 50, axis=0)[None].repeat(40, axis=0)
    colours[:, :share] = (1, 2, 3)
    Image.fromarray(colours).save(tmp_path / f"x.{suffix}")
    masks = ColourMasks(COLOURS)
    if hint is None:
        assert masks.read(tmp_path / f"x.{suffix}").unknown == 40 * share
        return
    with pytest.raises(DataError, match=rf"x.{suffix}: [0-9.]+ % of the pixels have no colour of data.palette.*{hint}"):
        masks.read(tmp_path / f"x.{suffix}")
    assert ColourMasks(COLOURS, max_unknown=1.0).read(tmp_path / f"x.{suffix}").unknown > 0


def test_class_numbers_in_a_jpeg_are_refused(tmp_path, numbers):
    cv2.imwrite(str(tmp_path / "x.jpg"), numbers)
    with pytest.raises(DataError, match=r"x.jpg is a JPEG, which changes values"):
        IndexMasks(256).read(tmp_path / "x.jpg")


def test_masks_of_one_bit(tmp_path, numbers):
    Image.fromarray(numbers > 2).save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as written:
        assert written.mode == "1"
    np.testing.assert_array_equal(IndexMasks(2).read(tmp_path / "x.png").values, numbers > 2)


def test_masks_of_32_bits_may_hold_minus_one(tmp_path):
    values = np.array([[-1, 0, 1], [70000, 1, 0]], np.int32)
    Image.fromarray(values).save(tmp_path / "x.tif")
    read = IndexMasks(2, ignored=[-1, 70000]).read(tmp_path / "x.tif")
    assert read.values.tolist() == [[IGNORED, 0, 1], [IGNORED, 1, 0]]
    mapped = IndexMasks(2, {-1: 1, 0: 0, 1: 0}, ignored=[70000]).read(tmp_path / "x.tif")
    assert mapped.values.tolist() == [[1, 0, 0], [IGNORED, 0, 0]]
    with pytest.raises(DataError, match=r"x.tif holds -1, 70000, which is no class"):
        IndexMasks(2).read(tmp_path / "x.tif")
