"""From an image file to an array, whatever its format; what its values mean is told by :mod:`exp.vision.data.values`.

Channels come in the order of the file, RGB for colours; rotation marks of cameras are not applied.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import cv2
import numpy as np
from PIL import Image

from exp.errors import DataError
from exp.vision.data.bands import colour_names, colours_in, order_of_colours
from exp.vision.data.jpeg import is_jpeg, lacks_end, truncated
from exp.vision.data.tiff import check_tiff, refuse_complex
from exp.vision.data.values import Raw

__all__ = [
    "BY_RASTERIO",
    "by_rasterio",
    "decoded",
    "has_mask",
    "has_rasterio",
    "image_size",
    "marks_alpha",
    "names_in",
    "naming",
    "order_in",
    "read_bytes",
    "read_raw",
    "reordered_bands",
]

BY_RASTERIO = (".tif", ".tiff", ".jp2")
"""Suffixes of what rasterio reads, where it is installed."""
_COLOURS = ("red", "green", "blue", "alpha")

# One thread for each process that loads images: ranks and loader workers are the parallelism. And what OpenCV would
# print about a damaged file is said by our errors, once and with the file's name.
cv2.setNumThreads(0)
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


def decoded(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """A file by OpenCV alone.

    Returns:
        Its bytes, uint8 (size,), and its pixels, (H, W) or (H, W, C), colours as BGR.

    Raises:
        DataError: it is missing, corrupt or truncated.
    """
    content = read_bytes(path)
    pixels = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise DataError(f"{path} cannot be decoded: it is corrupt, or no image; copy it anew{_tiff_hint(path)}")
    if is_jpeg(content) and truncated(content, pixels):
        raise DataError(f"{path} is truncated: data are missing before the end of the JPEG; copy it anew")
    return content, pixels


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a decoder raises into a :class:`DataError` that names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} cannot be read: {error or type(error).__name__}; copy it anew") from error


def image_size(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """(height, width) by the header of a file, before anything is decoded; None: its decoder has to tell."""
    if by_rasterio(path):
        import rasterio

        with warnings.catch_warnings(), naming(path):
            warnings.simplefilter("ignore")
            with rasterio.open(Path(path)) as file:
                return file.height, file.width
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the header of a large image is small
    try:
        with Image.open(path) as picture:
            return picture.height, picture.width
    except (OSError, ValueError, SyntaxError):
        return None
    finally:
        Image.MAX_IMAGE_PIXELS = before


def reordered_bands(path: str | os.PathLike[str]) -> list[str]:
    """What a file calls its bands where these are colours in another order than RGB; by its header.

    Returns:
        Their names, in the order of the file; empty where they are in order, or the file does not tell.
    """
    if not by_rasterio(path):
        return []
    import rasterio

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with rasterio.open(Path(path)) as file:
                return _colour_names_in(file) if order_in(file) is not None else []
        except (OSError, rasterio.errors.RasterioError):
            return []  # reported when it is read


def by_rasterio(path: str | os.PathLike[str]) -> bool:
    """Whether rasterio reads a file: a TIFF or JPEG 2000, where it is installed."""
    return str(path).lower().endswith(BY_RASTERIO) and has_rasterio()


def has_rasterio() -> bool:
    """Whether the optional package rasterio is installed."""
    return importlib.util.find_spec("rasterio") is not None


def read_raw(path: str | os.PathLike[str]) -> Raw:
    """Decode a file.

    Raises:
        DataError: it is missing, corrupt or truncated, has several pages, complex values, or colours of CIELAB.
    """
    with naming(path):
        return _read_raw(path)


def _read_raw(path: str | os.PathLike[str]) -> Raw:
    if by_rasterio(path):
        return _read_raster(path)
    _, pixels = decoded(path)
    if pixels.ndim == 2:
        return Raw(pixels[..., None], names=colour_names(1))
    if pixels.shape[2] == 4 and _tiff_hint(path):
        raise DataError(f"{path} has 4 channels{_tiff_hint(path)}")
    order = cv2.COLOR_BGR2RGB if pixels.shape[2] == 3 else cv2.COLOR_BGRA2RGBA
    # The fourth channel of PNG and WebP is transparency by their definition.
    return Raw(cv2.cvtColor(pixels, order), alpha=pixels.shape[2] == 4, names=colour_names(pixels.shape[2]))


def read_bytes(path: str | os.PathLike[str]) -> np.ndarray:
    """The content of a file that is whole: uint8 (size,).

    Raises:
        DataError: it cannot be read, is empty, ends before the end of its JPEG or PNG, or is a TIFF that
            :func:`exp.vision.data.tiff.check_tiff` refuses.
    """
    try:
        content = np.fromfile(path, np.uint8)  # any path, which cv2.imread cannot do everywhere
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check data.root and permissions") from error
    if content.size == 0:
        raise DataError(f"{path} is empty; copy it anew")
    if is_jpeg(content) and lacks_end(content):
        raise DataError(f"{path} is truncated: the end of the JPEG is missing; copy it anew")
    if (
        content[:4].tobytes() == b"\x89PNG"
        and b"IEND" not in content[-12:].tobytes()
        and content.tobytes().rfind(b"IEND") < 0
    ):
        raise DataError(f"{path} is truncated: the end of the PNG is missing; copy it anew")
    check_tiff(path, content)
    return content


def _read_raster(path: str | os.PathLike[str]) -> Raw:
    """As it is in the file; colour numbers become colours."""
    import rasterio
    from rasterio.enums import ColorInterp
    from rasterio.errors import NotGeoreferencedWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)  # plain TIFFs are welcome
        with rasterio.open(Path(path)) as file:
            check_tiff(path)
            refuse_complex(path, file.dtypes[0])
            bands = file.read()
            if file.colorinterp[0] == ColorInterp.palette:
                colors = np.zeros((np.iinfo(bands.dtype).max + 1, 3), np.uint8)
                for number, color in file.colormap(1).items():
                    colors[number] = color[:3]
                return Raw(colors[bands[0]], names=colour_names(3))
            nodata, names, alpha = file.nodata, names_in(file), marks_alpha(file)
            masked = file.dataset_mask() == 0 if has_mask(file) else None
            order = order_in(file)
    return Raw(np.moveaxis(bands, 0, -1), alpha, nodata, names, masked, order)


def order_in(file: Any) -> list[int] | None:
    """In which order the bands of an open dataset of rasterio are red, green, blue; None: as they are, or not known."""
    return order_of_colours(_colour_names_in(file))


def _colour_names_in(file: Any) -> list[str]:
    """The descriptions of its bands, where these are colours; else what colours the file says they are."""
    descriptions = [description or "" for description in file.descriptions]
    return descriptions if None not in colours_in(descriptions) else [each.name for each in file.colorinterp]


def marks_alpha(file: Any) -> bool:
    """Whether an open dataset of rasterio marks its last band as transparency."""
    from rasterio.enums import ColorInterp

    return bool(file.count > 1 and file.colorinterp[-1] == ColorInterp.alpha)


def has_mask(file: Any) -> bool:
    """Whether an open dataset of rasterio has a mask of its own, which is neither transparency nor a no-data value."""
    flags = [{flag.name for flag in flags} for flags in file.mask_flag_enums]
    return any("per_dataset" in names and "alpha" not in names for names in flags)


def names_in(file: Any) -> tuple[str, ...]:
    """Names of the bands of an open dataset of rasterio: their descriptions, or what colours the file says they are."""
    if any(file.descriptions):
        return tuple(description or "" for description in file.descriptions)
    colours = tuple(each.name for each in file.colorinterp)
    return tuple(name if name in _COLOURS else "" for name in colours)


def _tiff_hint(path: str | os.PathLike[str]) -> str:
    if not str(path).lower().endswith(BY_RASTERIO):
        return ""
    return "; TIFFs and JPEG 2000 files of more than three channels need rasterio (pip install 'exp[geo]')"
