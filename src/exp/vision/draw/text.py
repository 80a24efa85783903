"""Text in pictures: the typeface that comes with matplotlib, and others for letters that it has not."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from exp.draw.fonts import default_face, faces_for

__all__ = ["INK", "fitted", "font", "line", "text_width"]

INK = (38, 38, 38)


def font(size: int, bold: bool = False, text: str = "") -> ImageFont.FreeTypeFont:
    """A typeface at ``size`` pixels: the default one, or what has most of the letters of ``text`` that it has not."""
    faces = faces_for(text)
    return _font(faces[0].path if faces else default_face(bold).path, size)


@lru_cache(maxsize=64)
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


def text_width(text: str, size: int, bold: bool = False) -> int:
    """Pixels that ``text`` takes on a line."""
    return int(np.ceil(font(size, bold, text).getlength(text)))


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
    ImageDraw.Draw(picture).text((margin, 0.8 * size), shown, fill=INK, font=font(size, bold, shown), anchor="lm")
    return np.asarray(picture)
