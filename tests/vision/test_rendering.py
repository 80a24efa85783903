from __future__ import annotations

import numpy as np
import pytest

from exp.vision.plots import Tile, contact_sheet, panels
from exp.vision.rendering import colorize, overlay_labels, resize_labels

PALETTE = [(60, 16, 152), (132, 41, 246), (110, 193, 228)]


def count(picture, color):
    return (picture == color).all(axis=-1).sum()


def test_an_overlay_tints_classes_and_leaves_the_rest():
    labels = np.arange(60, dtype=np.uint8).repeat(40).reshape(60, 40).T // 20
    labels[:10] = 255
    mixed = overlay_labels(np.full((40, 60, 3), 200, np.uint8), labels, PALETTE)
    assert (mixed[5] == 200).all()  # no class
    assert mixed[20, 5].tolist() == [100 + part // 2 for part in PALETTE[0]]
    assert (mixed[20, 20] < mixed[20, 25]).all(), "a line where classes meet"


@pytest.mark.parametrize(("number", "width"), [(1, 300), (20, 1000)])
def test_every_entry_of_a_legend_and_every_tile_of_a_sheet_is_there(number, width):
    colors = [(5 * each, 250 - 5 * each, 77) for each in range(number)]
    names, left = [f"class number {each}  9 %" for each in range(number)], np.full((50, width, 3), 200, np.uint8)
    picture = panels([left], legend=list(zip(names, colors)))
    assert (picture[:50] == left).all(), "each pixel as it is"
    assert min(count(picture, color) for color in colors) > 30
    tiles = [Tile(np.full((20 + each, 30, 3), color, np.uint8), ["name", "is a class with a rather long name"])
             for each, color in enumerate(colors)]  # fmt: skip
    picture = contact_sheet(tiles, side=64, title="all of them")
    assert min(count(picture, color) for color in colors) > 1000


def test_panels_of_one_size_stand_side_by_side_under_their_titles():
    red, blue = (np.broadcast_to(np.array(color, np.uint8), (40, 300, 3)) for color in ((250, 0, 0), (0, 0, 250)))
    picture = panels([red, blue], ["one", "道路 $x$"])
    assert (picture[-40:, :300] == red).all()
    assert (picture[-40:, -300:] == blue).all()
    assert (picture[:-40] < 100).any(axis=2).sum() > 50


@pytest.mark.parametrize(("count", "wanted", "expected"), [
    (4, 8, [0, 0, 1, 1, 2, 2, 3, 3]), (8, 4, [1, 3, 5, 7]), (6, 4, [0, 2, 3, 5]), (3, 5, [0, 0, 1, 2, 2]), (5, 1, [2]),
])  # fmt: skip
def test_resized_labels_are_those_at_the_centers_of_the_pixels(count, wanted, expected):
    """Worked out by hand: of 6 labels the centers of 4 pixels are at .75, 2.25, 3.75 and 5.25."""
    labels = np.arange(count, dtype=np.uint8)
    assert resize_labels(labels[None], 1, wanted).tolist() == [expected]
    assert resize_labels(labels[:, None], wanted, 1)[:, 0].tolist() == expected


def test_classes_are_shown_in_the_colors_of_the_palette():
    assert colorize(np.array([[0, 2, 255]], np.uint8), PALETTE).tolist() == [
        [[60, 16, 152], [110, 193, 228], [0, 0, 0]]
    ]
