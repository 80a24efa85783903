"""A bar that says how long something on the ground is."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from exp.vision.draw.text import font, text_width

__all__ = ["round_length", "with_scale_bar"]

_SHARE = 0.25  # of the width, at most


def round_length(longest: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten that is not above ``longest``."""
    power = 10.0 ** math.floor(math.log10(longest))
    return max(step * power for step in (1.0, 2.0, 5.0) if step * power <= longest * (1 + 1e-9))


def with_scale_bar(picture: np.ndarray, metres_per_pixel: float) -> np.ndarray:
    """A picture with a bar of a round length at its lower left; where it is too small for one, as it is.

    Args:
        picture: RGB (H, W, 3), uint8.
        metres_per_pixel: on the ground, of the picture.
    """
    height, width = picture.shape[:2]
    metres = round_length(_SHARE * width * metres_per_pixel)
    length = round(metres / metres_per_pixel)
    size = min(max(width // 45, 13), 48)
    text = _length_text(metres)
    across = max(length, text_width(text, size, bold=True)) + 2 * size
    if across > width or 4 * size > height:
        return picture
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    thick = max(size // 4, 3)
    # On a field of its own: it has to be read over snow and over water.
    draw.rectangle((size // 2, height - 3 * size, size // 2 + across, height - size // 2), fill=(255, 255, 255))
    left, top = round(1.5 * size), height - size - thick // 2
    draw.rectangle((left, top, left + length - 1, top + thick - 1), fill=(0, 0, 0))
    draw.text((left, top - thick), text, fill=(0, 0, 0), font=font(size, bold=True), anchor="ls")
    return np.asarray(image)


def _length_text(metres: float) -> str:
    for unit, size in (("km", 1000.0), ("m", 1.0), ("cm", 0.01)):
        if metres >= size * (1 - 1e-9):
            return f"{metres / size:g} {unit}"
    return f"{1000 * metres:g} mm"
