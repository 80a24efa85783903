"""Which colour means what: a strip of swatches and names, for below a picture."""

from __future__ import annotations

from typing import NamedTuple, Sequence, Tuple

import numpy as np
from PIL import Image, ImageDraw

from exp.vision.draw.text import INK, fitted, font, text_width

__all__ = ["Color", "Entry", "legend"]

Color = Tuple[int, int, int]


class Entry(NamedTuple):
    """One line of a legend.

    Attributes:
        name: of the class.
        color: RGB.
        note: such as its share; may be empty.
    """

    name: str
    color: Color
    note: str = ""


def legend(entries: Sequence[Entry], width: int, size: int = 0) -> np.ndarray:
    """As many columns as fit, filled row by row.

    Args:
        entries: the classes.
        width: of the strip in pixels.
        size: of the letters in pixels; 0: by the width, so that they are readable where the picture is shown small.

    Returns:
        RGB on white, (h, width, 3), uint8.
    """
    size = size or min(max(width // 55, 13), 48)
    swatch, gap = round(1.1 * size), round(0.55 * size)
    texts = [f"{entry.name}  {entry.note}" if entry.note else entry.name for entry in entries]
    longest = max(text_width(text, size) for text in texts)
    columns = max(min((width - gap) // (swatch + 3 * gap + longest), len(entries)), 1)
    pitch = (width - gap) // columns
    rows = -(-len(entries) // columns)
    row_height = round(1.65 * size)
    picture = Image.new("RGB", (width, rows * row_height + 2 * gap), "white")
    draw = ImageDraw.Draw(picture)
    for number, (entry, text) in enumerate(zip(entries, texts)):
        x = gap + number % columns * pitch
        y = gap + number // columns * row_height + (row_height - swatch) // 2
        draw.rectangle((x, y, x + swatch, y + swatch), fill=tuple(entry.color), outline=(120, 120, 120))
        shown = fitted(text, pitch - swatch - 2 * gap, size)
        draw.text((x + swatch + gap, y + swatch / 2), shown, fill=INK, font=font(size, text=shown), anchor="lm")
    return np.asarray(picture)
