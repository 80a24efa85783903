"""Contact sheets: many small pictures with captions on one page."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import cv2
import numpy as np

from exp.vision.draw.legend import Color
from exp.vision.draw.text import line

__all__ = ["Tile", "sheet", "spread"]

_GAP = 10
_FRAME = 4


class Tile(NamedTuple):
    """One picture of a sheet.

    Attributes:
        picture: RGB (H, W, 3), uint8, of any size.
        captions: lines below it; the first is bold.
        frame: RGB of a frame around it; None: no frame.
    """

    picture: np.ndarray
    captions: Sequence[str]
    frame: Color | None = None


def sheet(tiles: Sequence[Tile], side: int = 224, columns: int = 0, title: str = "") -> np.ndarray:
    """Pictures in rows.

    Args:
        tiles: at least one.
        side: pixels that the longer side of each picture is brought to.
        columns: 0: so many that the sheet is somewhat wider than high.
        title: a line above all; may be empty.

    Returns:
        RGB on white, uint8.
    """
    columns = columns or min(max(round((1.6 * len(tiles)) ** 0.5), min(len(tiles), 3)), len(tiles))
    # As wide and high as the largest of the scaled pictures, so that flat ones leave no white bands between them.
    scaled = [_scaled(tile.picture, side) for tile in tiles]
    height = max(picture.shape[0] for picture in scaled) + 2 * _FRAME
    width = max(max(picture.shape[1] for picture in scaled), round(0.7 * side)) + 2 * _FRAME
    cells = [_cell(tile, picture, height, width) for tile, picture in zip(tiles, scaled)]
    tallest = max(cell.shape[0] for cell in cells)
    rows = []
    for first in range(0, len(cells), columns):
        row = np.full((tallest + _GAP, columns * (width + _GAP) + _GAP, 3), 255, np.uint8)
        for number, cell in enumerate(cells[first : first + columns]):
            left = _GAP + number * (width + _GAP)
            row[_GAP : _GAP + cell.shape[0], left : left + width] = cell
        rows.append(row)
    if title:
        rows.insert(0, line(title, rows[0].shape[1], 18, bold=True))
    return np.concatenate(rows)


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the numbers below ``count``, from the first to the last, evenly."""
    if count <= most:
        return list(range(count))
    return [round(step * (count - 1) / max(most - 1, 1)) for step in range(most)]


def _scaled(picture: np.ndarray, side: int) -> np.ndarray:
    height, width = picture.shape[:2]
    factor = side / max(height, width)
    size = (max(round(width * factor), 1), max(round(height * factor), 1))
    return cv2.resize(picture, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_NEAREST)


def _cell(tile: Tile, picture: np.ndarray, height: int, width: int) -> np.ndarray:
    cell = np.full((height, width, 3), 255, np.uint8)
    top, left = height - _FRAME - picture.shape[0], (width - picture.shape[1]) // 2  # the captions are below
    bottom, right = top + picture.shape[0], left + picture.shape[1]
    if tile.frame is not None:
        cell[top - _FRAME : bottom + _FRAME, left - _FRAME : right + _FRAME] = tile.frame
    cell[top:bottom, left:right] = picture
    size = min(max(width // 18, 12), 18)
    captions = [line(text, width, size, bold=number == 0) for number, text in enumerate(tile.captions)]
    return np.concatenate([cell, *captions])
