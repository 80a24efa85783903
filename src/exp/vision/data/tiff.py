"""What of a TIFF decoders do not tell: further pages, which they leave out, complex numbers, and colours of CIELAB.

TIFF 6.0 (Adobe, 1992) and BigTIFF: directories in a chain, each of an image, with entries of a tag, a type, a count and
a value.
"""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any, BinaryIO

from exp.errors import DataError

if TYPE_CHECKING:
    import os

    import numpy as np

__all__ = ["check_tiff", "is_tiff", "page_count", "refuse_complex"]

_BIG = 43
_NEW_SUBFILE_TYPE, _SUBFILE_TYPE, _PHOTOMETRIC = 254, 255, 262
_LAB = (8, 9, 10)  # CIELab, ICCLab, ITULab
_REDUCED, _MASK = 1, 4  # bits of the new subfile type: a smaller copy, a mask of transparency
_OLD_REDUCED = 2
_MOST = 100_000  # directories; a damaged chain may be longer than its file


def is_tiff(content: bytes) -> bool:
    """Whether a file that begins so is a TIFF."""
    return content[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def page_count(file: BinaryIO) -> int:
    """How many images a TIFF holds that are neither smaller copies (overviews, thumbnails) nor masks; at least 1.

    Args:
        file: open for reading, at its beginning; what is damaged is left to the decoder.
    """
    try:
        return _pages(_directories(file))
    except (struct.error, OSError, OverflowError, ValueError):
        return 1


def check_tiff(path: str | os.PathLike[str], content: np.ndarray | None = None) -> None:
    """Refuse a TIFF of several pages, of which a decoder would read the first alone, and one of CIELAB.

    GDAL makes colours of CIELAB red, green and blue that are off by as much as 79 of 255, and OpenCV others.

    Args:
        path: of the file; what is no TIFF, or damaged, is left to the decoder.
        content: its bytes, uint8; None: they are read as needed.

    Raises:
        DataError: says which.
    """
    if content is not None and not is_tiff(content[:4].tobytes()):
        return
    try:
        # Any kind of path, which pathlib does not take.
        with open(path, "rb") if content is None else io.BytesIO(content.tobytes()) as file:  # noqa: PTH123
            directories = _directories(file)
            count = _pages(directories)
    except (struct.error, OSError, OverflowError, ValueError):
        return
    if any(each.get(_PHOTOMETRIC) in _LAB for each in directories[:1]):
        raise DataError(
            f"{path} has colours of CIELAB, which decoders turn into others of red, green and blue each: convert it to "
            "RGB, with a program that knows its white point"
        )
    if count > 1:
        raise DataError(
            f"{path} has {count} pages, and a sample is one: write each page to a file of its own, or all of them as "
            "the bands of one page"
        )


def refuse_complex(path: str | os.PathLike[str], dtype: Any) -> None:
    """Refuse complex numbers, of which a model would get the real part alone.

    Args:
        path: of the file.
        dtype: of its values, by numpy's or rasterio's name.

    Raises:
        DataError: they are complex.
    """
    if str(dtype).startswith("complex"):
        raise DataError(
            f"{path} holds {dtype} values, and a model takes real ones: write their amplitude, or real and imaginary "
            "part as two bands"
        )


def _pages(directories: list[dict[int, int]]) -> int:
    """How many of them are images of their own; at least 1."""
    return max(sum(1 for each in directories if not _kind(each) & (_REDUCED | _MASK)), 1)


def _kind(directory: dict[int, int]) -> int:
    """The new subfile type."""
    if _NEW_SUBFILE_TYPE in directory:
        return directory[_NEW_SUBFILE_TYPE]
    return _REDUCED if directory.get(_SUBFILE_TYPE) == _OLD_REDUCED else 0


def _directories(file: BinaryIO) -> list[dict[int, int]]:
    """The tags of each directory in the chain that are looked at here, with their values."""
    head = file.read(16)
    if not is_tiff(head):
        return []
    order = "<" if head[:2] == b"II" else ">"
    big = struct.unpack(f"{order}H", head[2:4])[0] == _BIG
    counts, places, entry = ("Q", "Q", 20) if big else ("H", "I", 12)
    size = struct.calcsize(f"{order}{places}")
    (place,) = struct.unpack(f"{order}{places}", head[8:16] if big else head[4:8])
    found: list[dict[int, int]] = []
    seen: set[int] = set()
    while place and place not in seen and len(found) < _MOST:
        seen.add(place)
        file.seek(place)
        width = struct.calcsize(f"{order}{counts}")
        (count,) = struct.unpack(f"{order}{counts}", file.read(width))
        entries = file.read(count * entry + size)
        found.append(_tags(entries[: count * entry], order, entry))
        (place,) = struct.unpack(f"{order}{places}", entries[count * entry :])
    return found


def _tags(entries: bytes, order: str, size: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for begin in range(0, len(entries), size):
        tag, kind = struct.unpack(f"{order}HH", entries[begin : begin + 4])
        if tag in (_NEW_SUBFILE_TYPE, _SUBFILE_TYPE, _PHOTOMETRIC):
            field = entries[begin + (12 if size == 20 else 8) :]
            (value,) = struct.unpack(f"{order}H", field[:2]) if kind == 3 else struct.unpack(f"{order}I", field[:4])
            found.setdefault(tag, int(value))
    return found
