"""Decode image files of any format to arrays; :mod:`exp.vision.data.bands` converts their values for the model.

Channels are in the order of the file, RGB for colors; EXIF orientation is not applied.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import cv2
import numpy as np
from PIL import Image, ImageSequence

from exp.errors import DataError

__all__ = ["RawImage", "gdal_settings", "has_rasterio", "image_size", "open_raster", "read_raw", "uses_rasterio"]

COLORS = ("red", "green", "blue", "alpha")
_CHANNEL_NAMES = {1: ("gray",), 2: ("gray", "alpha"), 3: COLORS[:3], 4: COLORS}  # of files that are no TIFF
_BY_RASTERIO = (".tif", ".tiff", ".jp2", ".vrt")
_TIFF = (b"II*\0", b"MM\0*", b"II+\0")
_SUBFILE, _COPY_OR_MASK = 254, 1 | 4  # TIFF tag NewSubfileType, and its bits for a smaller copy and a transparency mask
_ENDS = {b"\xff\xd8": (b"\xff\xda", b"\xff\xd9"), b"\x89P": (b"IHDR", b"IEND")}  # file -> marker before, marker at end
_CACHE_BYTES = 16 * 2**20  # of GDAL, whose default is a twentieth of the machine's memory

Image.MAX_IMAGE_PIXELS = None  # only headers are read here; images that are decoded whole have a limit of their own
# One OpenCV thread per process: ranks and loader workers are the parallelism. OpenCV prints nothing about damaged
# files, since our errors name them.
cv2.setNumThreads(0)
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


class RawImage(NamedTuple):
    """The decoded content of a file.

    Attributes:
        pixels: (H, W, C), values and dtype of the file; colors are RGB.
        alpha: whether the file marks its last channel as transparency.
        nodata: the file's no-data value; None: there is none.
        names: of its channels; empty: not known.
        masked: True where a mask in the file marks missing data, bool (H, W); None: there is no such mask.
    """

    pixels: np.ndarray
    alpha: bool = False
    nodata: float | None = None
    names: Sequence[str] = ()
    masked: np.ndarray | None = None


def read_raw(path: str | os.PathLike[str]) -> RawImage:
    """Decode a file.

    Raises:
        DataError: the file is missing, corrupt or truncated, has several pages, or complex values.
    """
    with name_errors(path):
        if uses_rasterio(path):
            return _read_raster(path)
        pixels = decode_opencv(path)
        count = 1 if pixels.ndim == 2 else pixels.shape[2]
        if count == 1:
            return RawImage(pixels.reshape(*pixels.shape[:2], 1), names=_CHANNEL_NAMES[1])
        order = cv2.COLOR_BGR2RGB if count == 3 else cv2.COLOR_BGRA2RGBA
        # The fourth channel of PNG and WebP is always transparency.
        return RawImage(cv2.cvtColor(pixels, order), alpha=count == 4, names=_CHANNEL_NAMES[count])


def decode_opencv(path: str | os.PathLike[str]) -> np.ndarray:
    """Decode a file with OpenCV: its pixels, (H, W) or (H, W, C), colors as BGR.

    Raises:
        DataError: the file is missing, corrupt or truncated.
    """
    pixels = cv2.imdecode(np.frombuffer(read_bytes(path), np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        hint = ""
        if str(path).lower().endswith(_BY_RASTERIO):
            hint = "; files of more than three channels need rasterio (pip install 'exp-accelerators[geo]')"
        raise DataError(f"{path} cannot be decoded: it is corrupt, or no image; copy it anew{hint}")
    return pixels


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a complete file.

    Raises:
        DataError: the file cannot be read, is empty or truncated, or is a TIFF of several pages.
    """
    try:
        # Any path: cv2.imread cannot read every path on every system. A Path takes longer than the reading.
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            content = file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check data.root and permissions") from error
    if not content:
        raise DataError(f"{path} is empty; copy it anew")
    head = content[:4]
    begin, end = _ENDS.get(head[:2], (b"", b""))
    # Bytes may follow the end marker; an embedded preview has an end marker of its own.
    if end not in content[-12:] and content.rfind(end) <= content.rfind(begin):
        raise DataError(f"{path} is truncated: its end is missing; copy it anew")
    if head in _TIFF:
        try:
            with Image.open(path) as file:
                frames: Any = ImageSequence.Iterator(file)
                pages = sum(not frame.tag_v2.get(_SUBFILE, 0) & _COPY_OR_MASK for frame in frames)
        except (OSError, ValueError, SyntaxError, TypeError):
            return content  # the decoder will report the error
        _refuse_pages(path, pages)
    return content


def _refuse_pages(path: str | os.PathLike[str], pages: int) -> None:
    """Refuse a TIFF of several pages: a decoder would read only the first one."""
    if pages > 1:
        raise DataError(
            f"{path} has {pages} pages, and a sample is one: write each page to a file of its own, or all of them as "
            "the bands of one page"
        )


@contextmanager
def name_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn any exception of a decoder into a :class:`DataError` that names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} cannot be read: {error or type(error).__name__}; copy it anew") from error


def image_size(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """(height, width) from the header of a file, without decoding it; None: the header is not readable."""
    if uses_rasterio(path):
        with open_raster(path) as file:
            return file.height, file.width
    try:
        with Image.open(path) as picture:
            return picture.height, picture.width
    except (OSError, ValueError, SyntaxError):
        return None


# -- rasterio ----------------------------------------------------------------------------------------------------------


def has_rasterio() -> bool:
    """Whether the optional package rasterio is installed."""
    return importlib.util.find_spec("rasterio") is not None


def uses_rasterio(path: str | os.PathLike[str]) -> bool:
    """Whether rasterio reads a file: it is installed, and the file is a TIFF, JPEG 2000 or VRT."""
    return str(path).lower().endswith(_BY_RASTERIO) and has_rasterio()


@contextmanager
def gdal_settings() -> Iterator[Any]:
    """The module rasterio, with a small cache; TIFFs without georeference are fine."""
    import rasterio
    import rasterio.shutil

    with rasterio.Env(GDAL_CACHEMAX=_CACHE_BYTES), warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        yield rasterio


@contextmanager
def open_raster(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A dataset of ``rasterio.open``.

    Raises:
        DataError: the file cannot be opened, has several pages, or complex values.
    """
    with gdal_settings() as rasterio:
        with name_errors(path):
            dataset = rasterio.open(Path(path))
        with dataset:
            _refuse_pages(path, len(dataset.subdatasets))
            if dataset.count and dataset.dtypes[0].startswith("complex"):
                raise DataError(
                    f"{path} holds {dataset.dtypes[0]} values, and a model takes real ones: write their amplitude, or "
                    "real and imaginary part as two bands"
                )
            yield dataset


def _read_raster(path: str | os.PathLike[str]) -> RawImage:
    """Read a file with rasterio; color numbers of a palette become colors."""
    with open_raster(path) as file:
        bands = file.read()
        if file.colorinterp[0].name == "palette":
            colors = np.zeros((np.iinfo(bands.dtype).max + 1, 3), np.uint8)
            for number, color in file.colormap(1).items():
                colors[number] = color[:3]
            return RawImage(colors[bands[0]], names=_CHANNEL_NAMES[3])
        alpha, names = read_band_info(file)
        return RawImage(np.moveaxis(bands, 0, -1), alpha, file.nodata, names, read_dataset_mask(file))


def read_band_info(file: Any) -> tuple[bool, tuple[str, ...]]:
    """Whether an open dataset marks its last band as transparency, and the names of its bands.

    Names are the bands' descriptions, else their color interpretations; empty: there are neither.
    """
    interpretations = [color.name for color in file.colorinterp]
    names = [description or "" for description in file.descriptions]
    names = names if any(names) else [name if name in COLORS else "" for name in interpretations]
    return file.count > 1 and interpretations[-1] == "alpha", tuple(names) if any(names) else ()


def read_dataset_mask(file: Any, **part: Any) -> np.ndarray | None:
    """True where a mask in an open dataset marks missing data, bool (H, W); None: there is no such mask.

    Transparency and a no-data value do not count as masks here.

    Args:
        file: the dataset.
        **part: keys of rasterio that choose a part and a resolution.
    """
    flags = [{flag.name for flag in flags} for flags in file.mask_flag_enums]
    if not any("per_dataset" in names and "alpha" not in names for names in flags):
        return None
    return np.asarray(file.dataset_mask(**part) == 0)
