"""Series in an archive of numpy, as PEMS is published: an array ``data`` of (rows, series) or (rows, series, measures).

Of several measures the first is taken (the traffic flow, as in the loaders of SCINet, arXiv 2106.09305, and
iTransformer, arXiv 2310.06625). What the array is like is known from its header, without numpy.
"""

from __future__ import annotations

import ast
import struct
import zipfile
from typing import TYPE_CHECKING, Any

from exp.errors import DataError
from exp.forecasting.data.header import of_number

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

__all__ = ["LAYOUT_ARRAY", "check_array", "is_archive", "read_array"]

_MEMBER = "data.npy"
LAYOUT_ARRAY = "an archive of numpy with an array `data`: (rows, series) or (rows, series, measures), oldest row first"
_EXPECTED = f"expected: {LAYOUT_ARRAY}"


def is_archive(path: Path) -> bool:
    """Whether a file is such an archive, by its name."""
    return path.suffix == ".npz"


def check_array(path: Path, channels: int | None, new: bool = False) -> int:
    """Refuse an archive whose array does not fit, by its header.

    Args:
        path: of the archive.
        channels: number of series expected; None: any.
        new: see :func:`exp.forecasting.data.header.check_columns`.

    Returns:
        The number of series.

    Raises:
        DataError: it cannot be read, has no such array, or another number of series.
    """
    shape, kind = _header(path)
    if kind.lstrip("<>=|")[:1] not in ("f", "i", "u"):
        raise DataError(f"{path}: the array `data` holds {kind}, not numbers; {_EXPECTED}")
    if len(shape) not in (2, 3) or min(shape) == 0:
        raise DataError(f"{path}: the array `data` is {' x '.join(map(str, shape)) or 'a single value'}; {_EXPECTED}")
    if channels is not None and shape[1] != channels:
        raise DataError(
            f"{path}: has {shape[1]} series, but data.channels={channels}; "
            f"{of_number([str(number) for number in range(shape[1])], channels, new)}"
        )
    return shape[1]


def _header(path: Path) -> tuple[tuple[int, ...], str]:
    """Shape and type of the array (the format of numpy.lib.format)."""
    try:
        with zipfile.ZipFile(path) as archive:
            if _MEMBER not in archive.namelist():
                has = ", ".join(name[: -len(".npy")] for name in archive.namelist() if name.endswith(".npy")) or "none"
                raise DataError(f"{path} has no array `data` (its arrays: {has}); {_EXPECTED}")
            with archive.open(_MEMBER) as file:
                if file.read(6) != b"\x93NUMPY":
                    raise DataError(f"{path}: `{_MEMBER}` is no array of numpy; {_EXPECTED}")
                size = "<H" if file.read(2)[0] == 1 else "<I"
                (length,) = struct.unpack(size, file.read(struct.calcsize(size)))
                told: dict[str, Any] = ast.literal_eval(file.read(min(length, 10_000)).decode("latin1"))
                return tuple(told["shape"]), str(told["descr"])
    except (OSError, zipfile.BadZipFile, struct.error, IndexError, KeyError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; check its permissions, or copy it anew") from error


def read_array(path: Path) -> np.ndarray:
    """The series, float64 (T, C); nothing is said of their values.

    Raises:
        DataError: the archive cannot be read.
    """
    import zlib

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            values = archive["data"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; check its permissions, or copy it anew") from error
    first: np.ndarray = (values if values.ndim == 2 else values[..., 0]).astype(np.float64)
    return first
