"""From an image file to an array, whatever its format; :mod:`exp.vision.data.values` tells what its values mean.

Channels come in the order of the file, RGB for colors; rotation marks of cameras are not applied.
"""

from __future__ import annotations

import importlib.util
import io
import os
import struct
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import cv2
import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from exp.errors import DataError
from exp.vision.data.bands import color_names, colors_in, order_of_colors

__all__ = [
    "Raw",
    "by_rasterio",
    "check_tiff",
    "decoded",
    "has_mask",
    "has_rasterio",
    "image_size",
    "is_jpeg",
    "marks_alpha",
    "names_in",
    "naming",
    "order_in",
    "read_bytes",
    "read_raw",
    "refuse_complex",
    "reordered_bands",
]

_BY_RASTERIO = (".tif", ".tiff", ".jp2")
_COLORS = ("red", "green", "blue", "alpha")
_TIFF = (b"II*\0", b"MM\0*", b"II+\0")
_SUBFILE, _OLD_SUBFILE, _PHOTOMETRIC = 254, 255, 262  # tags
_LAB = (8, 9, 10)  # CIELab, ICCLab, ITULab
_COPY_OR_MASK = 1 | 4  # bits of the subfile type: a smaller copy, a mask of transparency
_END, _SCAN = b"\xff\xd9", b"\xff\xda"  # markers of JPEG
_FRAMES = tuple(marker for marker in range(0xC0, 0xD0) if marker not in (0xC4, 0xC8, 0xCC))
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
# Any bits that a decoder short of data would take for coefficients; no 0xFF, which would begin a marker.
_FOREIGN = bytes(np.random.default_rng(0).integers(0, 255, 1024, dtype=np.uint8))
_whole: set[int] = set()  # hashes of progressive JPEGs that are whole: a second look would decode them twice again

# One thread for each process that loads images: ranks and loader workers are the parallelism. And what OpenCV would
# print about a damaged file is in our errors, once and with the file's name.
cv2.setNumThreads(0)
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


class Raw(NamedTuple):
    """What a file holds.

    Attributes:
        pixels: (H, W, C), as they are in the file; colors are RGB.
        alpha: whether the file marks its last channel as transparency.
        nodata: the value that the file says stands for no data; None: it says none.
        names: of its channels, as far as the file tells; empty: it does not.
        masked: pixels that a mask in the file says hold no data, bool (H, W); None: there is no such mask.
        order: in which order its channels are red, green, blue, where the file says so; None: as they are.
    """

    pixels: np.ndarray
    alpha: bool = False
    nodata: float | None = None
    names: Sequence[str] = ()
    masked: np.ndarray | None = None
    order: list[int] | None = None


def read_raw(path: str | os.PathLike[str]) -> Raw:
    """Decode a file.

    Raises:
        DataError: it is missing, corrupt or truncated, has several pages, complex values, or colors of CIELAB.
    """
    with naming(path):
        if by_rasterio(path):
            return _read_raster(path)
        _, pixels = decoded(path)
        if pixels.ndim == 2:
            return Raw(pixels[..., None], names=color_names(1))
        count = pixels.shape[2]
        if count == 4 and _tiff_hint(path):
            raise DataError(f"{path} has 4 channels{_tiff_hint(path)}")
        order = cv2.COLOR_BGR2RGB if count == 3 else cv2.COLOR_BGRA2RGBA
        # The fourth channel of PNG and WebP is transparency by their definition.
        return Raw(cv2.cvtColor(pixels, order), alpha=count == 4, names=color_names(count))


def decoded(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """A file by OpenCV alone.

    Returns:
        Its bytes, uint8 (size,), and its pixels, (H, W) or (H, W, C), colors as BGR.

    Raises:
        DataError: it is missing, corrupt or truncated.
    """
    content = read_bytes(path)
    pixels = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise DataError(f"{path} cannot be decoded: it is corrupt, or no image; copy it anew{_tiff_hint(path)}")
    if is_jpeg(content) and _lacks_data(content, pixels):
        raise DataError(f"{path} is truncated: data are missing before the end of the JPEG; copy it anew")
    return content, pixels


def read_bytes(path: str | os.PathLike[str]) -> np.ndarray:
    """The content of a file that has an end: uint8 (size,).

    Raises:
        DataError: it cannot be read, is empty or truncated, or :func:`check_tiff` refuses it.
    """
    try:
        content = np.fromfile(path, np.uint8)  # any path, which cv2.imread cannot do everywhere
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check data.root and permissions") from error
    if content.size == 0:
        raise DataError(f"{path} is empty; copy it anew")
    if is_jpeg(content):
        data = content.tobytes() if content[-2:].tobytes() != _END else b""
        # Bytes may follow the end; but an embedded preview has an end of its own, too.
        if data and data.rfind(_END) <= data.rfind(_SCAN):
            raise DataError(f"{path} is truncated: the end of the JPEG is missing; copy it anew")
    elif content[:4].tobytes() == b"\x89PNG":
        if b"IEND" not in content[-12:].tobytes() and b"IEND" not in content.tobytes():
            raise DataError(f"{path} is truncated: the end of the PNG is missing; copy it anew")
    elif content[:4].tobytes() in _TIFF:
        check_tiff(path)
    return content


def is_jpeg(content: np.ndarray) -> bool:
    """Whether the bytes of a file, uint8 (size,), begin as a JPEG does."""
    return content[:2].tobytes() == b"\xff\xd8"


def _lacks_data(content: np.ndarray, pixels: np.ndarray) -> bool:
    """Whether a JPEG lacks data before its end marker, as a broken copy that a tool has closed again: decoders give no
    error, but decode what is missing of a sequential one to middle gray, down to its last block. Only where that one is
    gray a second decoder has to tell whether it would have gone on reading. A progressive one may lack detail anywhere.
    """
    gray = bool((np.abs(pixels[-8:, -8:].astype(np.int16) - 128) <= 8).all())
    progressive = _frame(content) in _PROGRESSIVE
    if not gray and not progressive:
        return False
    data = content.tobytes()
    if hash(data) in _whole:
        return False
    end = data.rfind(_END)
    # A decoder that has all it needs ignores what follows; one that lacks data takes it for image.
    first, second = (Image.open(io.BytesIO(each)) for each in (data, data[:end] + _FOREIGN + data[end:]))
    if not np.array_equal(np.asarray(first), np.asarray(second)):
        return True
    _whole.add(hash(data))
    return False


def _frame(content: np.ndarray) -> int:
    """The marker of the frame of a JPEG, which tells how it is coded; 0: there is none."""
    position = 2
    while position + 4 <= content.size and content[position] == 0xFF:
        marker = int(content[position + 1])
        if marker in _FRAMES:
            return marker
        position += 2 + int(content[position + 2]) * 256 + int(content[position + 3])
    return 0


def check_tiff(path: str | os.PathLike[str]) -> None:
    """Refuse a TIFF of several pages, of which a decoder would read the first alone, and one of CIELAB.

    Overviews, thumbnails and masks are no pages. A damaged file is left to the decoder.

    Raises:
        DataError: says which.
    """
    pages: list[dict[int, Any]] = []
    with open(path, "rb") as file, warnings.catch_warnings():  # noqa: PTH123 - any kind of path
        warnings.simplefilter("ignore")
        head = file.read(16)
        if head[:4] not in _TIFF:
            return
        try:
            directory = ImageFileDirectory_v2(head if head[2:3] == b"+" else head[:8])
            seen: set[int] = set()
            while directory.next and directory.next not in seen:
                seen.add(directory.next)
                file.seek(directory.next)
                directory.load(file)
                found = {tag: directory.get(tag, 0) for tag in (_SUBFILE, _OLD_SUBFILE, _PHOTOMETRIC)}
                if not found[_SUBFILE] & _COPY_OR_MASK and found[_OLD_SUBFILE] != 2:
                    pages.append(found)
        except (struct.error, OSError, ValueError, TypeError, SyntaxError):
            return
    if pages and pages[0][_PHOTOMETRIC] in _LAB:
        raise DataError(
            f"{path} has colors of CIELAB, which decoders turn into others of red, green and blue each: convert it to "
            "RGB, with a program that knows its white point"
        )
    if len(pages) > 1:
        raise DataError(
            f"{path} has {len(pages)} pages, and a sample is one: write each page to a file of its own, or all of them "
            "as the bands of one page"
        )


def refuse_complex(path: str | os.PathLike[str], dtype: Any) -> None:
    """Refuse complex numbers, of which a model would get the real part alone.

    Raises:
        DataError: they are complex.
    """
    if str(dtype).startswith("complex"):
        raise DataError(
            f"{path} holds {dtype} values, and a model takes real ones: write their amplitude, or real and imaginary "
            "part as two bands"
        )


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a decoder raises into a :class:`DataError` that names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} cannot be read: {error or type(error).__name__}; copy it anew") from error


# -- rasterio ----------------------------------------------------------------------------------------------------------


def has_rasterio() -> bool:
    """Whether the optional package rasterio is installed."""
    return importlib.util.find_spec("rasterio") is not None


def by_rasterio(path: str | os.PathLike[str]) -> bool:
    """Whether rasterio reads a file: a TIFF or JPEG 2000, where it is installed."""
    return str(path).lower().endswith(_BY_RASTERIO) and has_rasterio()


def _tiff_hint(path: str | os.PathLike[str]) -> str:
    if not str(path).lower().endswith(_BY_RASTERIO):
        return ""
    return "; TIFFs and JPEG 2000 files of more than three channels need rasterio (pip install 'exp-accelerators[geo]')"


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    import rasterio

    with warnings.catch_warnings(), naming(path):
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)  # plain TIFFs are welcome
        with rasterio.open(Path(path)) as file:
            yield file


def _read_raster(path: str | os.PathLike[str]) -> Raw:
    """As it is in the file; color numbers become colors."""
    with _opened(path) as file:
        check_tiff(path)
        refuse_complex(path, file.dtypes[0])
        bands = file.read()
        if file.colorinterp[0].name == "palette":
            colors = np.zeros((np.iinfo(bands.dtype).max + 1, 3), np.uint8)
            for number, color in file.colormap(1).items():
                colors[number] = color[:3]
            return Raw(colors[bands[0]], names=color_names(3))
        masked = file.dataset_mask() == 0 if has_mask(file) else None
        pixels = np.moveaxis(bands, 0, -1)
        return Raw(pixels, marks_alpha(file), file.nodata, names_in(file), masked, order_in(file))


def image_size(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """(height, width) by the header of a file, before anything is decoded; None: its decoder has to tell."""
    if by_rasterio(path):
        with _opened(path) as file:
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
    """What a file calls its bands where these are colors in another order than RGB; by its header.

    Returns:
        Their names, in the order of the file; empty where they are in order, or the file does not tell.
    """
    if not by_rasterio(path):
        return []
    try:
        with _opened(path) as file:
            return _color_names_in(file) if order_in(file) is not None else []
    except DataError:
        return []  # reported when it is read


def order_in(file: Any) -> list[int] | None:
    """In which order the bands of an open dataset of rasterio are red, green, blue; None: as they are, or not known."""
    return order_of_colors(_color_names_in(file))


def _color_names_in(file: Any) -> list[str]:
    """The descriptions of its bands, where these are colors; else what colors the file says they are."""
    descriptions = [description or "" for description in file.descriptions]
    return descriptions if None not in colors_in(descriptions) else [each.name for each in file.colorinterp]


def marks_alpha(file: Any) -> bool:
    """Whether an open dataset of rasterio marks its last band as transparency."""
    return bool(file.count > 1 and file.colorinterp[-1].name == "alpha")


def has_mask(file: Any) -> bool:
    """Whether an open dataset of rasterio has a mask of its own, which is neither transparency nor a no-data value."""
    flags = [{flag.name for flag in flags} for flags in file.mask_flag_enums]
    return any("per_dataset" in names and "alpha" not in names for names in flags)


def names_in(file: Any) -> tuple[str, ...]:
    """Names of the bands of an open dataset of rasterio: their descriptions, or what colors the file says they are."""
    if any(file.descriptions):
        return tuple(description or "" for description in file.descriptions)
    return tuple(each.name if each.name in _COLORS else "" for each in file.colorinterp)
