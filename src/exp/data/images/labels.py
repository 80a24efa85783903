"""From a mask file to the class of each pixel: masks hold class numbers, or colours."""

from __future__ import annotations

import os
from typing import Mapping, NamedTuple, Sequence

import cv2
import numpy as np
from PIL import Image

from exp.data.images.decode import read_bytes
from exp.errors import DataError

__all__ = ["IGNORED", "ColourMasks", "IndexMasks", "Labels"]

IGNORED = 255
"""The label of pixels that do not count."""
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

    Args:
        num_classes: K.
        values: file value -> class number; None: they are the class numbers.
        ignored: file values that do not count.
    """

    def __init__(self, num_classes: int, values: Mapping[int, int] | None = None, ignored: Sequence[int] = ()) -> None:
        self.table = np.full(65536, _UNKNOWN, np.uint8)
        for value, label in (values or {number: number for number in range(num_classes)}).items():
            self.table[value] = label
        self.table[list(ignored)] = IGNORED

    def read(self, path: str | os.PathLike[str]) -> Labels:
        """Read a mask.

        Raises:
            DataError: it cannot be read, has several channels, or a value that is neither a class nor ignored.
        """
        read_bytes(path)
        try:
            with Image.open(path) as file:
                values = np.asarray(file)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} cannot be decoded: {error}; copy it anew") from error
        if values.ndim != 2 or values.dtype.kind not in "iub":
            raise DataError(
                f"{path} is no mask of class numbers: it holds {values.dtype} values of shape {values.shape}; "
                "masks of colours need data.palette (class: RRGGBB)"
            )
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise DataError(f"{path} holds class numbers from {values.min()} to {values.max()}; at most 65535 can be")
        labels = np.take(self.table, values)
        if (labels == _UNKNOWN).any():
            unknown = np.unique(values[labels == _UNKNOWN])
            raise DataError(
                f"{path} holds {_shortened(unknown.tolist())}, which is no class; correct the mask, or set "
                "data.mask_values (value in the file: class number) or data.ignore_values"
            )
        return Labels(labels, 0)


class ColourMasks:
    """Masks whose colours stand for classes; an RGB image, or one with a palette.

    Args:
        colours: ``RRGGBB`` of each class.
        ignored: colours that do not count.
    """

    def __init__(self, colours: Sequence[str], ignored: Sequence[str] = ()) -> None:
        self.colours = list(colours)
        # A table over all colours is one lookup per pixel, whatever the number of classes.
        self.table = np.full(2**24, _UNKNOWN, np.uint8)
        for number, colour in enumerate(colours):
            self.table[int(colour, 16)] = number
        for colour in ignored:
            self.table[int(colour, 16)] = IGNORED

    def read(self, path: str | os.PathLike[str]) -> Labels:
        """Read a mask; pixels of another colour do not count, but are counted.

        Raises:
            DataError: it cannot be read, has no colours, or none that is known.
        """
        pixels = cv2.imdecode(read_bytes(path), cv2.IMREAD_UNCHANGED)
        if pixels is None:
            raise DataError(f"{path} cannot be decoded: it is corrupt, or no image; copy it anew")
        if pixels.ndim != 3 or pixels.dtype != np.uint8:
            raise DataError(
                f"{path} is no mask of colours: it holds {pixels.dtype} values of shape {pixels.shape}; "
                "masks of class numbers need data.classes instead of data.palette"
            )
        if pixels.shape[2] == 3:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2BGRA)
        # Blue, green, red, alpha, as one little-endian number: 0xAARRGGBB.
        packed = pixels.view("<u4")[..., 0] & 0xFFFFFF
        labels = np.take(self.table, packed)
        unknown = int(np.count_nonzero(labels == _UNKNOWN))
        if unknown == labels.size and unknown:
            found, counts = np.unique(packed, return_counts=True)
            common = [f"{colour:06X}" for colour in found[np.argsort(-counts)]]
            raise DataError(
                f"{path} has no colour of data.palette: it holds {_shortened(common)}; the classes are "
                f"{_shortened(self.colours)}"
            )
        labels[labels == _UNKNOWN] = IGNORED
        return Labels(labels, unknown)


def _shortened(values: Sequence[object], most: int = 8) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(str(value) for value in values[:most]) + more
