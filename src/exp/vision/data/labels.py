"""From a mask file to the class of each pixel: masks hold class numbers, or colors."""

from __future__ import annotations

import colorsys
import os
from typing import Mapping, NamedTuple, Sequence

import cv2
import numpy as np
from PIL import Image

from exp.data.places import shortened
from exp.errors import DataError
from exp.vision.data.decode import decoded, is_jpeg, naming, read_bytes

__all__ = ["IGNORED", "NO_DATA", "ColorMasks", "IndexMasks", "Labels", "distinct_colors"]

IGNORED = 255
"""The label of pixels that do not count."""
NO_DATA = 254
"""In a pipeline: the label of pixels whose image holds no data; afterwards they do not count."""
_UNKNOWN = 254


class Labels(NamedTuple):
    """What a mask says.

    Attributes:
        values: class numbers, uint8 (H, W); 255: does not count.
        unknown: pixels that no rule knew, and that are 255 now.
    """

    values: np.ndarray
    unknown: int


class IndexMasks:
    """Masks whose values are class numbers; a palette that such a file may have is for the eye only.

    Attributes:
        left_out: which pixels do not count, by which key, for messages.

    Args:
        num_classes: K.
        values: file value -> class number; None: they are the class numbers.
        ignored: file values that do not count, unless they are among those.

    Raises:
        DataError: ``values`` gives a number of no class.
    """

    def __init__(self, num_classes: int, values: Mapping[int, int] | None = None, ignored: Sequence[int] = ()) -> None:
        if values and not 0 <= min(values.values()) <= max(values.values()) < num_classes:
            raise DataError(f"data.mask_values={dict(values)} must give class numbers below {num_classes}")
        # By value, from 0; at the end for larger values, for -2 and below, and for -1.
        self.table = np.full(2**16 + 3, _UNKNOWN, np.uint8)
        for value, label in {
            **({} if values else {number: number for number in range(num_classes)}),
            **dict.fromkeys(ignored, IGNORED),
            **(values or {}),
        }.items():
            self.table[value] = label
        self.left_out = f"pixels of data.ignore_values={[*ignored]} do not count"
        if list(ignored) == [IGNORED]:
            self.left_out += ": if 255 is a class, set such as 'data.mask_values={0: 0, 255: 1}'"

    def read(self, path: str | os.PathLike[str]) -> Labels:
        """Read a mask.

        Raises:
            DataError: it cannot be read, or what it holds cannot be meant.
        """
        content = read_bytes(path)
        if is_jpeg(content):
            raise DataError(
                f"{path} is a JPEG, which changes values: no class number in it is certain; write masks as PNG, from "
                "what this file was made of"
            )
        with naming(path), Image.open(path) as file:
            values = np.asarray(file)
        if values.ndim != 2 or values.dtype.kind not in "iub":
            raise DataError(
                f"{path} is no mask of class numbers: it holds {values.dtype} values of shape {values.shape}; masks of "
                "colors need data.palette (class: RRGGBB), numbers 8 or 16 bits"
            )
        if values.dtype.kind == "i":
            values = values.clip(-2, 2**16)
        labels = np.take(self.table, values)
        if (labels == _UNKNOWN).any():
            unknown = np.unique(values[labels == _UNKNOWN])
            raise DataError(
                f"{path} holds {shortened(unknown.tolist(), 8)}, which is no class; correct the mask, or set "
                "data.mask_values (value in the file: class number) or data.ignore_values"
            )
        return Labels(labels, 0)


class ColorMasks:
    """Masks whose colors stand for classes; an RGB image, or one with a palette. Other colors are counted.

    Args:
        colors: ``RRGGBB`` of each class.
        ignored: colors that do not count.
        max_unknown: the largest share of a mask's pixels that may be of no known color; a tenth of it in a JPEG.
    """

    def __init__(self, colors: Sequence[str], ignored: Sequence[str] = (), max_unknown: float = 0.1) -> None:
        self.colors = list(colors)
        self.max_unknown = max_unknown
        # A table over all colors is one lookup per pixel, whatever the number of classes.
        self.table = np.full(2**24, _UNKNOWN, np.uint8)
        for number, color in enumerate(colors):
            self.table[int(color, 16)] = number
        for color in ignored:
            self.table[int(color, 16)] = IGNORED
        self.left_out = f"pixels of data.ignore_colors={[*ignored]}, and of no color of data.palette, do not count"

    def read(self, path: str | os.PathLike[str]) -> Labels:
        """See :meth:`IndexMasks.read`."""
        content, pixels = decoded(path)
        if pixels.ndim != 3 or pixels.dtype != np.uint8:
            raise DataError(
                f"{path} is no mask of colors: it holds {pixels.dtype} values of shape {pixels.shape}; "
                "masks of class numbers need data.palette=null and data.classes, and where they are not 0, 1, ... "
                "data.mask_values={value in the file: class number}"
            )
        if pixels.shape[2] == 3:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2BGRA)
        # Blue, green, red, alpha, as one little-endian number: 0xAARRGGBB.
        packed = pixels.view("<u4")[..., 0] & 0xFFFFFF
        labels = np.take(self.table, packed)
        strange = labels == _UNKNOWN
        unknown = int(np.count_nonzero(strange))
        # Of a JPEG only black and white come back exactly: where it has others, whole classes are lost with them.
        limit = self.max_unknown / 10 if is_jpeg(content) and self.max_unknown < 1 else self.max_unknown
        if unknown > limit * labels.size:
            found, counts = np.unique(packed[strange], return_counts=True)
            common = [f"{found[number]:06X}" for number in np.argsort(-counts)]
            hint = (
                "it is a JPEG, which changes colors: write masks as PNG, from what this file was made of"
                if is_jpeg(content)
                else "name them in data.palette or data.ignore_colors, or allow more with data.max_unknown"
            )
            raise DataError(
                f"{path}: {100 * unknown / labels.size:.1f} % of the pixels have no color of data.palette (at most "
                f"{100 * limit:g} % may): {shortened(common, 5)}; the classes are {shortened(self.colors, 8)}; {hint}"
            )
        labels[strange] = IGNORED
        return Labels(labels, unknown)


def distinct_colors(count: int) -> list[tuple[int, int, int]]:
    """RGB colors that the eye can tell apart; always the same ones."""
    found = []
    for number in range(count):
        hue = (0.6 + number * 0.618033988749895) % 1.0  # steps of the golden ratio keep all hues far apart
        saturation, value = ((0.75, 0.9), (0.5, 1.0), (0.9, 0.6))[number // 7 % 3]
        found.append(tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, saturation, value)))
    return found  # type: ignore[return-value]
