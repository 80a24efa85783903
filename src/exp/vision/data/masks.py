"""Read masks, files with the class of each pixel as a number or as a color."""

from __future__ import annotations

import colorsys
import contextlib
import os
from typing import Any, Iterable, Mapping, Sequence

import cv2
import numpy as np
from PIL import Image

from exp.data.fingerprint import shortened
from exp.errors import DataError
from exp.vision.data.bands import color_order
from exp.vision.data.decode import (
    decode_opencv,
    name_errors,
    open_raster,
    read_band_info,
    read_bytes,
    read_dataset_mask,  # fmt: skip
    read_raw,
    uses_rasterio,
)

__all__ = ["IGNORED", "NO_DATA", "ColorMasks", "IndexMasks", "distinct_colors"]

IGNORED = 255  # the label of ignored pixels
NO_DATA = 254  # within a pipeline, the label of pixels without image data; after it, these are IGNORED
_AMONG_VALUES = (np.nan, -np.inf)  # their counterparts in targets of numbers
_UNKNOWN_LABEL = 254
_MOST_UNKNOWN = 0.1  # largest share of pixels of unknown colors in a mask
_NODATA_TAG = 42113  # of GDAL, in TIFFs
_PHOTOMETRIC, _MIN_IS_WHITE = 262, 0  # tag of TIFFs, and its value for inverted gray


def markers(labels: np.dtype[Any]) -> tuple[float, float]:
    """What marks ignored pixels, and within a pipeline pixels without image data, in labels of this dtype."""
    return _AMONG_VALUES if labels.kind == "f" else (IGNORED, NO_DATA)


class IndexMasks:
    """Masks whose values are class numbers, of any type; a palette in the file is not used.

    Ignored are also NaN, transparent pixels, and the value that a file declares as no data if it is not in ``values``.

    Attributes:
        ignored_note: a sentence for messages: which pixels are ignored, by which key.

    Args:
        num_classes: classes (K).
        values: file value -> class number; None: values are class numbers.
        ignored: file values of ignored pixels, unless they are in ``values``.

    Raises:
        DataError: ``values`` has a number that is no class.
    """

    dtype = np.uint8

    def __init__(self, num_classes: int, values: Mapping[int, int] | None = None, ignored: Sequence[int] = ()) -> None:
        not_classes = [value for value, label in (values or {}).items() if not 0 <= label < num_classes]
        if not_classes:
            raise DataError(
                f"data.label_map={dict(values or {})} must give class numbers below {num_classes}; values of pixels "
                f"that do not count belong into data.ignore_values, here {sorted({*ignored, *not_classes})}"
            )
        self.mapped_values, self.ignored = frozenset(values or ()), frozenset(ignored)
        labels = {
            **({} if values else {number: number for number in range(num_classes)}),
            **dict.fromkeys(ignored, IGNORED),
            **(values or {}),
        }
        self._values = np.array(sorted(labels), np.int64)
        self._labels = np.array([labels[value] for value in sorted(labels)], np.uint8)
        self._tables: dict[Any, np.ndarray] = {}
        self.ignored_note = f"pixels of data.ignore_values={[*ignored]} do not count"
        if list(ignored) == [IGNORED]:
            self.ignored_note += ": if 255 is a class, set such as 'data.label_map={0: 0, 255: 1}'"

    def read(self, path: str | os.PathLike[str]) -> np.ndarray:
        """Read a mask: class numbers, uint8 (H, W), 255 where ignored.

        Raises:
            DataError: the file cannot be read, is a JPEG, or has values that are neither classes nor ignored.
        """
        values, nodata, missing = read_values(path)
        if values.ndim != 2 or values.dtype.kind not in "iuf":
            raise DataError(
                f"{path} is no mask of class numbers: it holds {values.dtype} values of shape {values.shape}; masks of "
                "colors need data.palette (class: RRGGBB), class numbers one band"
            )
        if values.dtype.itemsize > 2:
            labels = self._lookup(values, nodata)
        else:  # one lookup for each possible value, of unsigned numbers
            bits, key = np.dtype(f"u{values.dtype.itemsize}"), (values.dtype.str, nodata)
            if key not in self._tables:
                possible = np.arange(256**bits.itemsize).astype(bits).view(values.dtype)
                self._tables[key] = self._lookup(possible, nodata)
            labels = np.take(self._tables[key], values.view(bits))
        if missing is not None:
            labels[missing] = IGNORED
        if (labels == _UNKNOWN_LABEL).any():
            unknown = np.unique(values[labels == _UNKNOWN_LABEL])
            raise DataError(
                f"{path} holds {shortened(unknown.tolist(), 8)}, which is no class; correct the mask, or set "
                "data.label_map (value in the file: class number) or data.ignore_values"
            )
        return labels

    def _lookup(self, values: np.ndarray, nodata: float | None) -> np.ndarray:
        """The label of each value, uint8; ``_UNKNOWN_LABEL`` for values without one."""
        position = np.searchsorted(self._values, values).clip(max=len(self._values) - 1)
        labels = np.where(self._values[position] == values, self._labels[position], np.uint8(_UNKNOWN_LABEL))
        if nodata is not None and nodata not in self.mapped_values:
            labels[values == nodata] = IGNORED
        if values.dtype.kind == "f":
            labels[np.isnan(values)] = IGNORED
        return labels

    def nodata_values(self, paths: Iterable[str]) -> dict[float, str]:
        """The values that files declare as no data, by their headers, each with a file; not those of ``ignored``."""
        files: dict[float, str] = {}
        for path in paths:
            if path.lower().endswith((".tif", ".tiff", ".jp2")):
                with contextlib.suppress(DataError), name_errors(path):  # reported when the mask is loaded
                    nodata = _read_nodata(path)
                    if nodata is not None and nodata == nodata and nodata not in self.ignored:
                        files.setdefault(nodata, path)
        return files


def _read_nodata(path: str | os.PathLike[str]) -> float | None:
    if uses_rasterio(path):
        with open_raster(path) as file:
            return None if file.nodata is None else float(file.nodata)
    picture: Any
    with Image.open(path) as picture:
        value = picture.tag_v2.get(_NODATA_TAG) if picture.format == "TIFF" else None
        return None if value is None else float(str(value).strip("\0 "))


def read_values(path: str | os.PathLike[str]) -> tuple[np.ndarray, float | None, np.ndarray | None]:
    """The values of a file without its transparency, the value that means no data, and where pixels are missing.

    Raises:
        DataError: the file cannot be read, or is a JPEG.
    """
    _refuse_jpeg(path)
    read_bytes(path)  # refuses truncated files, and several pages
    with name_errors(path):
        return _read_values(path)


def _read_values(path: str | os.PathLike[str]) -> tuple[np.ndarray, float | None, np.ndarray | None]:
    nodata = _read_nodata(path)
    if uses_rasterio(path):
        with open_raster(path) as file:
            values, missing = np.moveaxis(file.read(), 0, -1), read_dataset_mask(file)
            transparent = read_band_info(file)[0]
    else:
        picture: Any
        with Image.open(path) as picture:
            values, transparent, missing = np.asarray(picture), picture.mode in ("LA", "PA"), None
            if (
                picture.format == "TIFF"
                and picture.mode in ("1", "L")
                and picture.tag_v2.get(_PHOTOMETRIC) == _MIN_IS_WHITE
            ):
                values = ~values  # Pillow inverts them for the eye
    if transparent:
        values, missing = values[..., :-1], values[..., -1] == 0
    values = values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
    if values.dtype.kind == "b":
        values = np.where(values, np.uint8(1), np.uint8(0))
    return np.ascontiguousarray(values, values.dtype.newbyteorder("=")), nodata, missing


class ColorMasks:
    """Masks whose colors mean classes: RGB images, or images with a palette.

    Attributes:
        ignored_note: see :class:`IndexMasks`.
        unknown: number of ignored pixels of unknown colors in the masks that were read.

    Args:
        colors: ``RRGGBB`` of each class, or by class number.
        ignored: colors of ignored pixels.
    """

    dtype = np.uint8

    def __init__(self, colors: Sequence[str] | Mapping[int, str], ignored: Sequence[str] = ()) -> None:
        numbers = colors if isinstance(colors, Mapping) else dict(enumerate(colors))
        self.colors = list(numbers.values())
        self.unknown = 0
        # A table of all colors: one lookup for any number of classes.
        self.table = np.full(2**24, _UNKNOWN_LABEL, np.uint8)
        for number, color in numbers.items():
            self.table[int(color, 16)] = number
        for color in ignored:
            self.table[int(color, 16)] = IGNORED
        self.ignored_note = f"pixels of data.ignore_colors={[*ignored]}, and of no color of data.palette, do not count"

    def read(self, path: str | os.PathLike[str]) -> np.ndarray:
        """Read a mask: class numbers, uint8 (H, W), 255 where ignored.

        Raises:
            DataError: the file cannot be read, is a JPEG or not RGB of 8 bits, or has too many unknown pixels.
        """
        _refuse_jpeg(path)
        if uses_rasterio(path):
            raw = read_raw(path)
            order = color_order(raw.names) or range(raw.pixels.shape[2])
            pixels = raw.pixels[..., order[2::-1]]  # blue, green, red
        else:
            pixels = decode_opencv(path)
        if pixels.ndim != 3 or pixels.shape[2] < 3 or pixels.dtype != np.uint8:
            raise DataError(
                f"{path} is no mask of colors: it holds {pixels.dtype} values of shape {pixels.shape}; "
                "masks of class numbers need data.palette=null and data.classes, and where they are not 0, 1, ... "
                "data.label_map={value in the file: class number}"
            )
        if pixels.shape[2] == 3:
            pixels = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_BGR2BGRA)
        # Blue, green, red, alpha as one little-endian number: 0xAARRGGBB. Most neighbors have the same color: one
        # lookup for each run of equal pixels takes half as long as one for each pixel.
        packed = pixels.view("<u4").reshape(-1)
        starts = np.append(0, np.flatnonzero(packed[1:] != packed[:-1]) + 1)
        colors, lengths = packed[starts] & 0xFFFFFF, np.diff(starts, append=packed.size)
        labels = self.table[colors]
        is_unknown = labels == _UNKNOWN_LABEL
        unknown = int(lengths[is_unknown].sum())
        if unknown > _MOST_UNKNOWN * packed.size:
            color_values, counts = np.unique(np.repeat(colors[is_unknown], lengths[is_unknown]), return_counts=True)
            common = [f"{color_values[number]:06X}" for number in np.argsort(-counts)]
            raise DataError(
                f"{path}: {100 * unknown / packed.size:.1f} % of the pixels have no color of data.palette (at most "
                f"{100 * _MOST_UNKNOWN:g} % may): {shortened(common, 5)}; the classes are {shortened(self.colors, 8)}; "
                "name them in data.palette or data.ignore_colors"
            )
        self.unknown += unknown
        labels[is_unknown] = IGNORED
        return np.repeat(labels, lengths).reshape(pixels.shape[:2])


def _refuse_jpeg(path: str | os.PathLike[str]) -> None:
    with name_errors(path), open(path, "rb") as file:  # noqa: PTH123 - one of a million
        if file.read(2) == b"\xff\xd8":
            raise DataError(
                f"{path} is a JPEG, which changes values and colors, so that classes are not reliable; write the "
                "original masks as PNG"
            )


def distinct_colors(count: int) -> list[tuple[int, int, int]]:
    """RGB colors that the eye can tell apart; the same for each call."""
    colors = []
    for number in range(count):
        hue = (0.6 + number * 0.618033988749895) % 1.0  # steps of the golden ratio keep all hues far apart
        saturation, value = ((0.75, 0.9), (0.5, 1.0), (0.9, 0.6))[number // 7 % 3]
        colors.append(tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, saturation, value)))
    return colors  # type: ignore[return-value]
