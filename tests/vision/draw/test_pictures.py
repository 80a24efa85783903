from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from exp.draw.curves import training_curves
from exp.draw.figure import figure_png
from exp.draw.files import pixels_png
from exp.vision.draw.confusion import confusion_figure
from exp.vision.draw.legend import Entry, legend
from exp.vision.draw.overlay import overlay, overlay_with_legend, told_apart
from exp.vision.draw.pictures import enlarged, resized_labels, shrunk, to_rgb
from exp.vision.draw.scale import round_length, with_scale_bar
from exp.vision.draw.sheet import Tile, sheet, spread
from exp.vision.draw.text import fitted, text_width

PALETTE = [(60, 16, 152), (132, 41, 246), (110, 193, 228)]
CLASSES = ["building", "land", "road"]


def blocks(height=40, width=60):
    labels = np.zeros((height, width), np.uint8)
    labels[:, width // 3 :] = 1
    labels[:, 2 * width // 3 :] = 2
    labels[: height // 4] = 255
    return labels


def decoded(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def drawn(figure):
    return decoded(figure_png(figure))


def test_an_overlay_tints_classes_and_leaves_the_rest(tmp_path):
    labels = blocks()
    picture = np.full((*labels.shape, 3), 200, np.uint8)
    mixed = overlay(picture, labels, PALETTE)
    assert (mixed[5] == 200).all()  # no class
    assert mixed[20, 5].tolist() == [100 + part // 2 for part in PALETTE[0]]
    assert (mixed[20, 20] < mixed[20, 25]).all(), "a line where classes meet"


def test_a_tiny_image_is_enlarged_until_its_legend_can_be_read():
    labels = blocks(8, 12)
    picture = overlay_with_legend(np.zeros((8, 12, 3), np.uint8), labels, CLASSES, PALETTE, ["1 %"] * 3)
    assert picture.shape[1] >= 640
    for color in told_apart(PALETTE):
        assert (picture[-60:] == color).all(axis=-1).any()


def test_classes_whose_colours_are_alike_get_others():
    """Building and land of Dubai are both violet; the colours that differ stay."""
    shown = told_apart(PALETTE)
    assert [shown[0], shown[2]] == [PALETTE[0], PALETTE[2]]
    lab = cv2.cvtColor(np.float32([shown]) / 255, cv2.COLOR_RGB2LAB)[0]
    assert min(np.linalg.norm(lab[one] - lab[other]) for one in range(3) for other in range(one)) >= 60
    many = told_apart([(100, 100, 100)] * 30)
    assert len(set(many)) == 30


@pytest.mark.parametrize(
    ("metres_per_pixel", "length", "pixels"), [(0.3, 100.0, 333), (10.0, 2000.0, 200), (0.00007, 0.02, 286)]
)
def test_a_scale_bar_has_the_length_that_it_says(metres_per_pixel, length, pixels):
    assert round_length(0.25 * 1400 * metres_per_pixel) == pytest.approx(length)
    picture = np.full((300, 1400, 3), 200, np.uint8)
    black = (with_scale_bar(picture, metres_per_pixel) == 0).all(axis=-1)
    assert black.sum(axis=1).max() == pixels
    tiny = np.zeros((20, 30, 3), np.uint8)
    assert with_scale_bar(tiny, metres_per_pixel) is tiny


@pytest.mark.parametrize("count", [1, 5, 45])
@pytest.mark.parametrize("width", [300, 1000, 4096])
def test_every_entry_of_a_legend_is_there(count, width):
    colors = [(5 * number, 250 - 5 * number, number) for number in range(count)]
    picture = legend([Entry(f"class number {number}", color, "9 %") for number, color in enumerate(colors)], width)
    assert picture.shape[1] == width
    for color in colors:
        assert (picture == color).all(axis=-1).sum() > 100


@pytest.mark.parametrize("width", [20, 80, 300])
def test_text_is_shortened_to_the_room_it_has(width):
    text = "a rather long name of an image_001.tif"
    shown = fitted(text, width, 12)
    assert text_width(shown, 12) <= width
    assert shown == text or "…" in shown
    if width > 50:
        assert shown[-2:] == text[-2:], "names of files differ at their ends"


def test_values_of_16_bit_are_stretched_and_bytes_are_not():
    dark = np.linspace(3, 12, 300, dtype=np.float32).reshape(10, 10, 3)
    assert to_rgb(dark).min() == 0
    assert to_rgb(dark).max() == 255
    assert (to_rgb(dark.astype(np.uint8)) == dark.astype(np.uint8)).all()
    assert to_rgb(dark[..., :1]).shape == (10, 10, 3)
    assert to_rgb(np.zeros((4, 4, 13), np.uint8)).shape == (4, 4, 3)


def test_sizes():
    assert shrunk(np.zeros((400, 100, 1), np.uint8), 40).shape == (40, 10, 1)
    small = np.zeros((4, 4, 3), np.uint8)
    assert shrunk(small, 40) is small
    assert enlarged(small, 10).shape == (12, 12, 3)
    labels = np.kron(np.array([[1, 2], [3, 4]], np.uint8), np.ones((30, 30), np.uint8))
    assert resized_labels(labels, 2, 2).tolist() == [[1, 2], [3, 4]]
    assert spread(10, 4) == [0, 3, 6, 9]
    assert spread(3, 4) == [0, 1, 2]
    assert spread(3, 1) == [0]


@pytest.mark.parametrize("count", [1, 7, 24])
def test_a_sheet_shows_every_tile(count):
    colors = [(10 * number, 255 - 10 * number, 77) for number in range(count)]
    tiles = [Tile(np.full((20 + number, 30, 3), color, np.uint8), ["name", "is a class with a rather long name"])
             for number, color in enumerate(colors)]  # fmt: skip
    picture = decoded(pixels_png(sheet(tiles, side=64, title="all of them")))
    for color in colors:
        assert (picture == color).all(axis=-1).sum() > 1500


RECORDS = [{"split": "train", "step": step, "loss": 3.0 / step, "lr": 1e-3} for step in range(1, 100)]
SCORES = [{"split": "val", "step": step, "mIoU": step / 100} for step in (33, 66, 99)]


@pytest.mark.parametrize(
    "records",
    [RECORDS + SCORES, RECORDS[:3], SCORES, [], [*RECORDS[:5], {"split": "val", "step": 5, "mIoU": float("nan")}]],
)
def test_curves_of_any_training(records):
    empty = drawn(training_curves([], "mIoU", True, "run"))
    picture = drawn(training_curves(records, "mIoU", True, "run"))
    assert picture.shape == empty.shape
    assert (picture != empty).any() == bool(records)


def test_the_best_is_the_largest_or_the_smallest():
    largest, smallest = (training_curves(RECORDS + SCORES, "mIoU", best, "run") for best in (True, False))
    assert (drawn(largest) != drawn(smallest)).any()


@pytest.mark.parametrize("classes", [2, 10, 60])
def test_the_diagonal_of_a_confusion_matrix_is_dark(classes):
    counts = np.eye(classes, dtype=np.int64) * 12345
    good = drawn(confusion_figure(counts, [f"class {number}" for number in range(classes)], "good"))
    bad = drawn(confusion_figure(np.ones_like(counts), [f"class {number}" for number in range(classes)], "bad"))
    dark = (good == (8, 48, 107)).all(axis=-1).sum()
    assert dark > 50 * classes
    assert (bad == (8, 48, 107)).all(axis=-1).sum() == 0
