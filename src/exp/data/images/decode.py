"""From an image file to an array, by one rule for all formats, depths and numbers of channels.

8-bit values stay as they are, uint8. All others become float32, with ``value_range`` mapped to 0..255 and what lies
outside clipped. Channels come in the order of the file, RGB for colours; rotation marks of cameras are not applied.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any, Sequence

import cv2
import numpy as np

from exp.errors import DataError

__all__ = ["convert", "read_bytes", "read_image"]

# One thread for each process that loads images: ranks and loader workers are the parallelism. And what OpenCV would
# print about a damaged file is said by our errors, once and with the file's name.
cv2.setNumThreads(0)
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_GREY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601 luma
_JPEG_SCAN, _JPEG_END = b"\xff\xda", b"\xff\xd9"


def read_image(
    path: str | os.PathLike[str], channels: int = 3, value_range: Sequence[float] | None = None
) -> np.ndarray:
    """Read an image.

    Args:
        path: PNG, JPEG, TIFF or whatever else OpenCV decodes. TIFFs are read by rasterio where it is installed, and
            only so with more than three channels.
        channels: see :func:`convert`.
        value_range: see :func:`convert`.

    Returns:
        (H, W, ``channels``), uint8 or float32, 0..255, contiguous.

    Raises:
        DataError: the file is missing, corrupt or truncated, or of other channels; names it.
    """
    if str(path).lower().endswith((".tif", ".tiff")) and importlib.util.find_spec("rasterio") is not None:
        return convert(_read_tiff(path), path, channels, value_range)
    content = read_bytes(path)
    pixels = cv2.imdecode(content, cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise DataError(f"{path} cannot be decoded: it is corrupt, or no image; copy it anew{_tiff_hint(path)}")
    if pixels.ndim == 3:
        if pixels.shape[2] == 4 and _tiff_hint(path):
            raise DataError(f"{path} has 4 channels{_tiff_hint(path)}")
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB if pixels.shape[2] == 3 else cv2.COLOR_BGRA2RGBA)
    return convert(pixels, path, channels, value_range)


def convert(
    pixels: np.ndarray, path: str | os.PathLike[str], channels: int, value_range: Sequence[float] | None = None
) -> np.ndarray:
    """Values and channels as a model gets them.

    Args:
        pixels: (H, W) or (H, W, C), of any real dtype.
        path: for messages.
        channels: to have. A grey image is repeated for three, a coloured one becomes grey for one, an alpha channel (a
            second or fourth one) is dropped.
        value_range: (low, high), mapped to (0, 255) where values are not 8 bit; None: (0, 65535) for 16 bit.

    Returns:
        (H, W, ``channels``), uint8 or float32, contiguous.

    Raises:
        DataError: the channels are others, or values of this dtype need a ``value_range``.
    """
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    found = pixels.shape[2]
    if found != channels:
        if found in (2, 4) and channels == found - 1:
            pixels = pixels[..., :channels]
        elif found in (1, 2) and channels == 3:
            pixels = np.repeat(pixels[..., :1], 3, axis=2)
        elif found in (3, 4) and channels == 1:
            grey = pixels[..., :3].astype(np.float32) @ _GREY
            pixels = (np.rint(grey) if pixels.dtype.kind in "iu" else grey).astype(pixels.dtype)[..., None]
        else:
            raise DataError(
                f"{path} has {found} channels, but data.channels={channels}; give images of {channels}, or train "
                f"a model for {found} with data.channels={found}"
            )
    if pixels.dtype != np.uint8:
        pixels = _to_byte_range(pixels, path, value_range)
    return np.ascontiguousarray(pixels)


def read_bytes(path: str | os.PathLike[str]) -> np.ndarray:
    """The content of a file that is whole: uint8 (size,).

    Raises:
        DataError: it cannot be read, is empty, or ends before the end of its JPEG or PNG.
    """
    try:
        content = np.fromfile(path, np.uint8)  # any path, which cv2.imread cannot do everywhere
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check data.root and permissions") from error
    if content.size == 0:
        raise DataError(f"{path} is empty; copy it anew")
    head, tail = content[:4].tobytes(), content[-2:].tobytes()
    # OpenCV fills what is missing of a JPEG with grey, and says so on standard error only.
    if head.startswith(b"\xff\xd8") and tail != _JPEG_END:
        whole = content.tobytes()  # bytes may follow the end; but an embedded preview has an end of its own, too
        if whole.rfind(_JPEG_END) <= whole.rfind(_JPEG_SCAN):  # or there is neither
            raise DataError(f"{path} is truncated: the end of the JPEG is missing; copy it anew")
    if head == b"\x89PNG" and b"IEND" not in content[-12:].tobytes() and content.tobytes().rfind(b"IEND") < 0:
        raise DataError(f"{path} is truncated: the end of the PNG is missing; copy it anew")
    return content


def _to_byte_range(pixels: np.ndarray, path: Any, value_range: Sequence[float] | None) -> np.ndarray:
    if value_range is None:
        if pixels.dtype != np.uint16:
            raise DataError(
                f"{path} holds {pixels.dtype} values; set data.value_range to the [low, high] that become 0 and 255"
            )
        value_range = (0.0, 65535.0)
    low, high = value_range
    scaled = (pixels.astype(np.float32) - np.float32(low)) * np.float32(255.0 / (high - low))
    return np.clip(scaled, 0.0, 255.0, out=scaled)


def _read_tiff(path: str | os.PathLike[str]) -> np.ndarray:
    """(H, W, C), as it is in the file; colour numbers become colours."""
    import rasterio
    from rasterio.enums import ColorInterp
    from rasterio.errors import NotGeoreferencedWarning, RasterioError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)  # plain TIFFs are welcome
        try:
            with rasterio.open(Path(path)) as file:
                bands = file.read()
                if file.colorinterp[0] == ColorInterp.palette:
                    colors = np.zeros((256, 3), np.uint8)
                    for number, color in file.colormap(1).items():
                        colors[number] = color[:3]
                    return colors[bands[0]]
        except (RasterioError, OSError) as error:  # its own I/O error is no RasterioError before 1.4
            raise DataError(f"{path} cannot be read: {error}; copy it anew") from error
    return np.moveaxis(bands, 0, -1)


def _tiff_hint(path: str | os.PathLike[str]) -> str:
    if not str(path).lower().endswith((".tif", ".tiff")):
        return ""
    return "; TIFFs of more than three channels need rasterio (pip install 'exp[geo]')"
