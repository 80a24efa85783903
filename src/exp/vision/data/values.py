"""What the values of an image file mean: transparency or a band, no data, and which of them become 0 and 255.

8-bit values stay as they are, uint8. All others become float32, with ``value_range`` mapped to 0..255 and what lies
outside clipped.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Sequence

import numpy as np

from exp.errors import DataError
from exp.vision.data.bands import is_measured_band

__all__ = ["Raw", "ValueRange", "convert", "invalid_values", "no_data", "split_alpha", "to_channels"]

ValueRange = Sequence[Any]
"""(low, high): a number each, or one for each channel."""

_GREY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601 luma


class Raw(NamedTuple):
    """What a file holds.

    Attributes:
        pixels: (H, W, C), as they are in the file; colours are RGB.
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


def split_alpha(
    raw: Raw, path: str | os.PathLike[str], channels: int, alpha: bool | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Tell transparency from a measured band: a fourth channel may be either, and files may mark it wrongly.

    Args:
        raw: of the file, or a part of it.
        path: for messages.
        channels: that the model gets.
        alpha: None: as the file says, where that can be; True: a last channel beyond ``channels`` is transparency,
            whatever the file says; False: none is.

    Returns:
        The measured channels (H, W, C), and transparency (H, W), if there is one: 0 where there is no data.

    Raises:
        DataError: it cannot be told; asks for ``data.alpha``.
    """
    pixels, found = raw.pixels, raw.pixels.shape[2]
    if alpha is None and raw.alpha and found == channels:
        raise DataError(
            f"{path} marks channel {found} as alpha, but data.channels={channels}; set data.alpha=false if it is a "
            f"band such as near infrared, or data.channels={found - 1} if it is transparency"
        )
    if alpha is None and not raw.alpha and found in (2, 4) and channels < found:
        raise DataError(
            f"{path} has {found} channels, and does not mark the last as alpha; set data.channels={found} to use it, "
            "or data.alpha=true if it is transparency, which is left out"
        )
    is_alpha = raw.alpha if alpha is None else alpha and found > 1 and (raw.alpha or found in (channels + 1, 2, 4))
    if not is_alpha or (alpha and found == channels):
        return pixels, None
    last = pixels[..., -1]
    if alpha is None and is_measured_band(last):
        raise DataError(
            f"{path} marks channel {found} as alpha, but most of its values are neither transparent nor opaque; set "
            f"data.alpha=false and data.channels={found} if it is a band such as near infrared, or data.alpha=true"
        )
    return pixels[..., :-1], last


def invalid_values(pixels: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Which values hold no data: those that are not finite, and those that stand for no data.

    In images of 8 bits such a value is a common colour: there it counts only where all channels of a pixel have it.

    Args:
        pixels: (H, W, C), without transparency.
        nodata: the value that stands for no data; None: there is none.

    Returns:
        bool (H, W, C); None: all hold data.
    """
    invalid: np.ndarray | None = None
    if pixels.dtype.kind == "f":
        invalid = ~np.isfinite(pixels)
    if nodata is not None and not np.isnan(nodata):
        # In the dtype of the values: a float32 file holds its no-data value rounded.
        limits = np.iinfo(pixels.dtype) if pixels.dtype.kind in "iu" else None
        if limits is None or (nodata == int(nodata) and limits.min <= nodata <= limits.max):
            same: np.ndarray = np.equal(pixels, pixels.dtype.type(nodata))
            if pixels.dtype == np.uint8:
                same = np.broadcast_to(same.all(axis=2, keepdims=True), pixels.shape)
            invalid = same if invalid is None else np.logical_or(invalid, same)
    return invalid if invalid is not None and invalid.any() else None


def no_data(
    pixels: np.ndarray, transparency: np.ndarray | None, nodata: float | None, masked: np.ndarray | None = None
) -> np.ndarray | None:
    """Which pixels hold no data: fully transparent ones, and those of which no channel has a value.

    Args:
        pixels: (H, W, C), without transparency.
        transparency: (H, W), 0: no data; None: there is none.
        nodata: the value that stands for no data; None: there is none.
        masked: bool (H, W), what a mask in the file says; None: there is none.

    Returns:
        bool (H, W); None: all hold data.
    """
    missing = np.zeros(pixels.shape[:2], bool)
    if transparency is not None:
        missing |= transparency == 0
    if masked is not None:
        missing |= masked
    invalid = invalid_values(pixels, nodata)
    if invalid is not None:
        missing |= invalid.all(axis=2)
    return missing if missing.any() else None


def to_channels(pixels: np.ndarray, path: str | os.PathLike[str], channels: int) -> np.ndarray:
    """A grey image repeated for three channels, a coloured one made grey for one; others as they are.

    Args:
        pixels: (H, W, C), without transparency.
        path: for messages.
        channels: to have.

    Returns:
        (H, W, ``channels``), of the same dtype.

    Raises:
        DataError: the channels are others.
    """
    found = pixels.shape[2]
    if found == channels:
        return pixels
    if found == 1 and channels == 3:
        return np.repeat(pixels, 3, axis=2)
    if found == 3 and channels == 1:
        grey = pixels.astype(np.float32) @ _GREY
        return (np.rint(grey) if pixels.dtype.kind in "iu" else grey).astype(pixels.dtype)[..., None]
    raise DataError(
        f"{path} has {found} channels, but data.channels={channels}; give images of {channels}, or train a "
        f"model for {found} with data.channels={found}"
    )


def convert(
    pixels: np.ndarray,
    path: str | os.PathLike[str],
    channels: int,
    value_range: ValueRange | None = None,
    scale_bytes: bool = False,
    fill: np.ndarray | None = None,
    invalid: np.ndarray | None = None,
) -> np.ndarray:
    """Values and channels as a model gets them.

    Args:
        pixels: (H, W, C), of any real dtype, without transparency.
        path: for messages.
        channels: see :func:`to_channels`.
        value_range: (low, high), mapped to (0, 255) where values are not 8 bit; None: such values are an error.
        scale_bytes: whether 8-bit values are mapped, too.
        fill: of each channel, 0..255, for values without data; None: those that are not a number become 0, and others
            stay as they are.
        invalid: which hold no data, bool (H, W, C) or (H, W, 1); None: those that are not a number.

    Returns:
        (H, W, ``channels``), uint8 or float32, contiguous.

    Raises:
        DataError: the channels are others, or values of this dtype need a ``value_range``.
    """
    made = to_channels(pixels, path, channels)
    if made.dtype != np.uint8 or scale_bytes:
        made = _to_byte_range(made, path, value_range)
    if fill is not None and invalid is not None:
        if invalid.shape[2] != channels:
            invalid = np.asarray(invalid.any(axis=2, keepdims=True))
        values = np.rint(fill).astype(np.uint8) if made.dtype == np.uint8 else fill.astype(np.float32)
        made = np.where(invalid, values, made)
    return np.ascontiguousarray(made)


def _to_byte_range(pixels: np.ndarray, path: Any, value_range: ValueRange | None) -> np.ndarray:
    if value_range is None:
        known = pixels[np.isfinite(pixels)] if pixels.dtype.kind == "f" else pixels
        limits = f" from {known.min():g} to {known.max():g}" if known.size else ""
        raise DataError(
            f"{path} holds {pixels.dtype} values{limits}; set data.value_range=[low,high] to what is to become 0 and "
            "255, or data.value_range=auto to measure it on the training images"
        )
    low, high = (np.asarray(limit, np.float64) for limit in value_range)
    scaled = (pixels.astype(np.float32) - low.astype(np.float32)) * (255.0 / (high - low)).astype(np.float32)
    return np.nan_to_num(np.clip(scaled, 0.0, 255.0, out=scaled), copy=False, nan=0.0)
