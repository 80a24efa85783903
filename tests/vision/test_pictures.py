from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from exp.draw.curves import training_curves
from exp.draw.figure import figure_file
from exp.vision.figures import Tile, confusion_figure, panels, sheet, spread
from exp.vision.pictures import enlarged, overlay, resized_labels, shrunk, to_rgb

PALETTE = [(60, 16, 152), (132, 41, 246), (110, 193, 228)]


def drawn(figure):
    return np.asarray(Image.open(io.BytesIO(figure_file(figure, "png"))).convert("RGB"))


def count(picture, color):
    return (picture == color).all(axis=-1).sum()


def test_an_overlay_tints_classes_and_leaves_the_rest():
    labels = np.arange(60, dtype=np.uint8).repeat(40).reshape(60, 40).T // 20
    labels[:10] = 255
    mixed = overlay(np.full((40, 60, 3), 200, np.uint8), labels, PALETTE)
    assert (mixed[5] == 200).all()  # no class
    assert mixed[20, 5].tolist() == [100 + part // 2 for part in PALETTE[0]]
    assert (mixed[20, 20] < mixed[20, 25]).all(), "a line where classes meet"


@pytest.mark.parametrize(("number", "width"), [(1, 300), (45, 1000), (5, 4096)])
def test_every_entry_of_a_legend_and_every_tile_of_a_sheet_is_there(number, width):
    colors = [(5 * each, 250 - 5 * each, 77) for each in range(number)]
    names, left = [f"class number {each}  9 %" for each in range(number)], np.full((50, width, 3), 200, np.uint8)
    picture = panels([left], legend=list(zip(names, colors)))
    assert (picture[:50] == left).all(), "each pixel as it is"
    assert min(count(picture, color) for color in colors) > 30
    tiles = [Tile(np.full((20 + each, 30, 3), color, np.uint8), ["name", "is a class with a rather long name"])
             for each, color in enumerate(colors)]  # fmt: skip
    picture = sheet(tiles, side=64, title="all of them")
    assert min(count(picture, color) for color in colors) > 1000


def test_panels_of_one_size_stand_side_by_side_under_their_titles():
    red, blue = (np.broadcast_to(np.array(color, np.uint8), (40, 300, 3)) for color in ((250, 0, 0), (0, 0, 250)))
    picture = panels([red, blue], ["one", "道路 $x$"])
    assert (picture[-40:, :300] == red).all()
    assert (picture[-40:, -300:] == blue).all()
    assert (picture[:-40] < 100).any(axis=2).sum() > 50


def test_values_of_16_bit_are_stretched_and_bytes_are_not():
    dark = np.linspace(3, 12, 300, dtype=np.float32).reshape(10, 10, 3)
    assert (to_rgb(dark).min(), to_rgb(dark).max()) == (0, 255)
    assert (to_rgb(dark.astype(np.uint8)) == dark.astype(np.uint8)).all()
    assert [to_rgb(dark[..., :1]).shape, to_rgb(np.zeros((4, 4, 13), np.uint8)).shape] == [(10, 10, 3), (4, 4, 3)]


def test_sizes():
    assert [shrunk(np.zeros((side, 100, 1)), 40).shape for side in (400, 40)] == [(40, 10, 1), (16, 40, 1)]
    assert enlarged(np.zeros((4, 4, 3), np.uint8), 10).shape == (12, 12, 3)
    labels = np.kron(np.array([[1, 2], [3, 4]], np.uint8), np.ones((30, 30), np.uint8))
    assert resized_labels(labels, 2, 2).tolist() == [[1, 2], [3, 4]]
    assert [spread(10, 4), spread(3, 4), spread(3, 1)] == [[0, 3, 6, 9], [0, 1, 2], [0]]


RECORDS = [{"split": "train", "step": step, "loss": 3.0 / step, "lr": 1e-3} for step in range(1, 100)]
SCORES = [{"split": "val", "step": step, "mIoU": step / 100} for step in (33, 66, 99)]


def test_curves_of_any_training():
    empty = drawn(training_curves([], "mIoU", True, "run"))
    unknown = {"split": "val", "step": 5, "mIoU": float("nan")}
    for records in (RECORDS + SCORES, SCORES, [*RECORDS[:5], unknown]):
        assert (drawn(training_curves(records, "mIoU", True, "run")) != empty).any()
    largest, smallest = (training_curves(RECORDS + SCORES, "mIoU", best, "run") for best in (True, False))
    assert (drawn(largest) != drawn(smallest)).any()


def test_the_diagonal_of_a_confusion_matrix_is_dark():
    counts, names = np.eye(10, dtype=np.int64) * 12345, [f"class {number}" for number in range(10)]
    good, bad = (drawn(confusion_figure(table, names, "title")) for table in (counts, np.ones_like(counts)))
    assert count(good, (8, 48, 107)) > 500
    assert count(bad, (8, 48, 107)) == 0
