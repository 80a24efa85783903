"""Colours of classes."""

from __future__ import annotations

import colorsys

__all__ = ["distinct_colors", "rgb"]

_GOLDEN = 0.618033988749895  # steps of the golden ratio keep all hues so far apart, however many there are


def distinct_colors(count: int) -> list[tuple[int, int, int]]:
    """RGB colours that the eye can tell apart; always the same ones."""
    found = []
    for number in range(count):
        hue = (0.6 + number * _GOLDEN) % 1.0
        saturation, value = ((0.75, 0.9), (0.5, 1.0), (0.9, 0.6))[number // 7 % 3]
        found.append(tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, saturation, value)))
    return found  # type: ignore[return-value]


def rgb(colour: str) -> tuple[int, int, int]:
    """``"3C1098"`` -> (60, 16, 152)."""
    value = int(colour, 16)
    return value >> 16, value >> 8 & 255, value & 255
