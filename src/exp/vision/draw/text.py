"""Text in pictures: one typeface, which comes with matplotlib, so that every machine draws the same."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["INK", "fitted", "font", "line", "text_width"]

INK = (38, 38, 38)


@lru_cache(maxsize=None)
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """The typeface at ``size`` pixels."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(mpl.get_data_path()) / "fonts" / "ttf" / name), size)


def text_width(text: str, size: int, bold: bool = False) -> int:
    """Pixels that ``text`` takes on a line."""
    return int(np.ceil(font(size, bold).getlength(text)))


def fitted(text: str, width: int, size: int, bold: bool = False) -> str:
    """``text``, or as much of it as fits into ``width`` pixels, with an ellipsis in its middle.

    Names of image files differ at their ends more often than at their beginnings.
    """
    if text_width(text, size, bold) <= width:
        return text
    for kept in range(len(text) - 1, 0, -1):
        head = kept // 3
        shorter = text[:head] + "…" + text[len(text) - (kept - head) :]
        if text_width(shorter, size, bold) <= width:
            return shorter
    return ""


def line(text: str, width: int, size: int, bold: bool = False) -> np.ndarray:
    """One line of text on white, shortened where it must be: RGB (about 1.6 ``size``, width, 3), uint8."""
    picture = Image.new("RGB", (width, round(1.6 * size)), "white")
    margin = size // 3
    shown = fitted(text, width - 2 * margin, size, bold)
    ImageDraw.Draw(picture).text((margin, 0.8 * size), shown, fill=INK, font=font(size, bold), anchor="lm")
    return np.asarray(picture)
