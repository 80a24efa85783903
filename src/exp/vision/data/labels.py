"""From a mask file to the class of each pixel: masks hold class numbers, or colours."""

from __future__ import annotations

import os
from typing import Any, Mapping, NamedTuple, Sequence

import cv2
import numpy as np
from PIL import Image

from exp.data.places import shortened
from exp.errors import DataError
from exp.vision.data.decode import decoded, read_bytes
from exp.vision.data.jpeg import is_jpeg

__all__ = ["IGNORED", "NO_DATA", "ColourMasks", "IndexMasks", "Labels"]

IGNORED = 255
"""The label of pixels that do not count."""
NO_DATA = 254
"""In a pipeline: the label of pixels whose image holds no data; afterwards they do not count."""
_UNKNOWN = 254
_SHOWN = 5  # colours in a message
_BITS, _PHOTOMETRIC = 258, 262  # tags of TIFF


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
        content = read_bytes(path)
        if is_jpeg(content):
            raise DataError(
                f"{path} is a JPEG, which changes values: no class number in it is certain; write masks as PNG, from "
                "what this file was made of"
            )
        try:
            with Image.open(path) as file:
                values = _as_stored(file, content)
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
                f"{path} holds {shortened(unknown.tolist(), 8)}, which is no class; correct the mask, or set "
                "data.mask_values (value in the file: class number) or data.ignore_values"
            )
        return Labels(labels, 0)


def _as_stored(file: Image.Image, content: np.ndarray) -> np.ndarray:
    """The values of a mask as they are in the file.

    Grey values of 2 and 4 bits are decoded as brightness, spread over 0..255, and those of a TIFF whose 0 is white are
    turned round: class 3 of 2 bits would be 255.

    Args:
        file: open.
        content: its bytes, uint8.
    """
    values = np.asarray(file)
    if file.mode not in ("L", "1"):
        return values
    bits, white = 8, False
    if file.format == "PNG":
        bits = int(content[24])  # of the header, which is always first
    elif file.format == "TIFF":
        tags: Any = file.tag_v2  # type: ignore[attr-defined]
        bits, white = int(tags.get(_BITS, (1,))[0]), tags.get(_PHOTOMETRIC) == 0
    if white:
        values = ~values
    return values // (255 // (2**bits - 1)) if bits in (2, 4) else values


class ColourMasks:
    """Masks whose colours stand for classes; an RGB image, or one with a palette.

    Args:
        colours: ``RRGGBB`` of each class.
        ignored: colours that do not count.
        max_unknown: the largest share of a mask's pixels that may be of no known colour; a tenth of it in a JPEG.
    """

    def __init__(self, colours: Sequence[str], ignored: Sequence[str] = (), max_unknown: float = 0.1) -> None:
        self.colours = list(colours)
        self.max_unknown = max_unknown
        # A table over all colours is one lookup per pixel, whatever the number of classes.
        self.table = np.full(2**24, _UNKNOWN, np.uint8)
        for number, colour in enumerate(colours):
            self.table[int(colour, 16)] = number
        for colour in ignored:
            self.table[int(colour, 16)] = IGNORED

    def read(self, path: str | os.PathLike[str]) -> Labels:
        """Read a mask; pixels of another colour do not count, but are counted.

        Raises:
            DataError: it cannot be read, has no colours, or more pixels of no known one than ``max_unknown``.
        """
        content, pixels = decoded(path)
        if pixels.ndim != 3 or pixels.dtype != np.uint8:
            raise DataError(
                f"{path} is no mask of colours: it holds {pixels.dtype} values of shape {pixels.shape}; "
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
        jpeg = is_jpeg(content)
        limit = self.max_unknown / 10 if jpeg and self.max_unknown < 1 else self.max_unknown
        if unknown > limit * labels.size:
            self._refuse(path, packed[strange], labels.size, limit, jpeg)
        labels[strange] = IGNORED
        return Labels(labels, unknown)

    def _refuse(self, path: str | os.PathLike[str], strange: np.ndarray, size: int, limit: float, jpeg: bool) -> None:
        found, counts = np.unique(strange, return_counts=True)
        order = np.argsort(-counts)[:_SHOWN]
        common = [f"{found[number]:06X} ({100 * counts[number] / size:.1f} %)" for number in order]
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        share = 100 * strange.size / size
        hint = (
            "; it is a JPEG, which changes colours: write masks as PNG, from what this file was made of"
            if jpeg
            else "; name them in data.palette or data.ignore_colours, or allow more with data.max_unknown"
        )
        raise DataError(
            f"{path}: {share:.1f} % of the pixels have no colour of data.palette (at most {100 * limit:g} % may): "
            f"{', '.join(common)}{more}; the classes are {shortened(self.colours, 8)}{hint}"
        )
