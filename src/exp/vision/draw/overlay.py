"""Class maps as pictures, laid over the image."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from exp.vision.draw.figures import Color, panels
from exp.vision.draw.pictures import enlarged

__all__ = ["colored", "overlay", "overlay_with_legend", "palette_table"]

_LEAST = 640  # pixels of the longer side that a legend needs to be readable


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
        palette: their colors.
        gsd: meters of a pixel of the picture; None: not known.

    Returns:
        RGB, uint8.
    """
    mixed = overlay(enlarged(picture, _LEAST), enlarged(labels, _LEAST), palette)
    gsd = None if gsd is None else gsd * picture.shape[1] / mixed.shape[1]
    return panels([mixed], legend=list(zip(names, palette)), gsd=gsd)
