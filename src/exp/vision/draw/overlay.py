"""Class maps as pictures, laid over the image."""

from __future__ import annotations

from typing import Sequence

import cv2
import numpy as np

from exp.vision.draw.figures import Color, panels
from exp.vision.draw.pictures import enlarged

__all__ = ["colored", "overlay", "overlay_with_legend", "palette_table", "told_apart"]

_APART = 60.0  # in CIELAB: what is left of it where colors are mixed half and half with an image is still seen
_LEAST = 640  # pixels of the longer side that a legend needs to be readable
_CANDIDATES: list[Color] = [
    (red, green, blue) for red in range(0, 256, 32) for green in range(0, 256, 32) for blue in range(0, 256, 32)
    if max(red, green, blue) >= 160 and max(red, green, blue) - min(red, green, blue) >= 64
]  # fmt: skip
"""Bright and colored: what is dark or gray is lost over an image."""


def told_apart(palette: Sequence[Color]) -> list[Color]:
    """Colors for the eye: where two classes are so alike that an overlay would not show which is which, the later one
    gets another color.

    Args:
        palette: RGB of each class.
    """
    chosen: list[Color] = []
    for place, color in enumerate(palette):
        others = _lab([*chosen, *palette[place + 1 :]])
        if place and np.linalg.norm(others[:place] - _lab([color]), axis=1).min() < _APART:
            candidates = _lab(_CANDIDATES)
            apart = np.linalg.norm(candidates[:, None] - others[None], axis=2).min(axis=1)
            change = np.linalg.norm(candidates - _lab([color]), axis=1)
            change[apart < min(_APART, apart.max())] = np.inf  # the least change that is enough
            color = _CANDIDATES[int(change.argmin())]
        chosen.append(color)
    return chosen


def _lab(colors: Sequence[Color]) -> np.ndarray:
    """CIELAB of RGB colors: float32 (n, 3); distances are differences as the eye sees them."""
    pixels = np.asarray(colors, np.float32).reshape(1, -1, 3) / 255.0
    return cv2.cvtColor(pixels, cv2.COLOR_RGB2LAB)[0]


def palette_table(palette: Sequence[Color]) -> np.ndarray:
    """(256, 3), uint8: the classes' colors; black for other numbers."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(palette)] = palette
    return table


def colored(labels: np.ndarray, palette: Sequence[Color]) -> np.ndarray:
    """Labels (H, W), uint8, as RGB (H, W, 3), uint8; pixels without a class are black."""
    return palette_table(palette)[labels]


def overlay(picture: np.ndarray, labels: np.ndarray, palette: Sequence[Color]) -> np.ndarray:
    """The classes' colors over an image, and lines where classes meet.

    Args:
        picture: RGB (H, W, 3), uint8.
        labels: (H, W), uint8; pixels without a class keep the image.
        palette: RGB of each class.

    Returns:
        RGB (H, W, 3), uint8.
    """
    # Half of each, in bytes: floats would take a gigabyte for a large picture.
    mixed = picture // 2 + (palette_table(palette) // 2)[labels]
    unknown = labels >= len(palette)
    mixed[unknown] = picture[unknown]
    border = np.zeros(labels.shape, bool)
    border[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    border[1:] |= labels[1:] != labels[:-1]
    mixed[border] //= 2
    return mixed


def overlay_with_legend(
    picture: np.ndarray, labels: np.ndarray, names: Sequence[str], palette: Sequence[Color], gsd: float | None = None
) -> np.ndarray:
    """:func:`overlay` with a legend below, and a scale bar where the resolution is known; small images are enlarged.

    Args:
        picture: RGB (H, W, 3), uint8.
        labels: (H, W), uint8.
        names: of the classes, as the legend shows them.
        palette: their colors; see :func:`told_apart`.
        gsd: meters of a pixel of the picture; None: not known.

    Returns:
        RGB, uint8.
    """
    palette = told_apart(palette)
    mixed = overlay(enlarged(picture, _LEAST), enlarged(labels, _LEAST), palette)
    gsd = None if gsd is None else gsd * picture.shape[1] / mixed.shape[1]
    return panels([mixed], legend=list(zip(names, palette)), gsd=gsd)
