"""What the values of an image file become: the channels of the model, 0..255, filled where there is no data.

8-bit values stay as they are, uint8. All others become float32, with ``value_range`` mapped to 0..255 and what lies
outside clipped.
"""

from __future__ import annotations

import os
from typing import Any, Mapping, Sequence, Union

import numpy as np

from exp.errors import DataError
from exp.vision.data.bands import BandChoice, Plan, is_measured_band
from exp.vision.data.decode import Raw, read_raw
from exp.vision.data.mmrs1m import modality_in

__all__ = ["ImageReader", "Modalities", "Raw", "ValueRange", "convert", "no_data", "split_alpha"]

ValueRange = Sequence[Any]
"""(low, high): a number each, or one for each channel."""
Path = Union[str, "os.PathLike[str]"]

_GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601 luma


class Modalities:
    """Mean and standard deviation of each modality, where they are others than the model's; picklable.

    The model subtracts its own mean from all images: those of another modality are mapped beforehand, so that it comes
    out as if that modality's had been subtracted.

    Args:
        only: the modality of all images (``data.modality``); None: the names of their data sets tell.
        statistics: ``{modality: {"mean": [...], "std": [...]}}``, 0..255.
    """

    def __init__(self, only: str | None = None, statistics: Mapping[str, Any] | None = None) -> None:
        self.only = only
        self.load(statistics or {})
        self._model: tuple[np.ndarray, np.ndarray] | None = None

    def load(self, statistics: Mapping[str, Any]) -> None:
        """Use these statistics."""
        self._values: dict[str, tuple[np.ndarray, np.ndarray]] = {
            name: (np.asarray(each["mean"], np.float32), np.asarray(each["std"], np.float32))
            for name, each in statistics.items()
        }

    def state(self) -> dict[str, Any]:
        """The statistics as plain values."""
        return {name: {"mean": mean.tolist(), "std": std.tolist()} for name, (mean, std) in self._values.items()}

    def on_model(self, mean: np.ndarray, std: np.ndarray) -> None:
        """Know the model's mean and standard deviation, float (C,)."""
        self._model = mean.astype(np.float32), std.astype(np.float32)

    def of(self, path: Path) -> str:
        """The modality of an image."""
        return self.only or modality_in(path)

    def fill_for(self, path: Path, fill: np.ndarray | None) -> np.ndarray | None:
        """What values without data become before :meth:`mapped`: the mean of the image's modality."""
        values = self._values.get(self.of(path)) if self._values else None
        return fill if values is None or fill is None else np.broadcast_to(values[0], fill.shape)

    def mapped(self, image: np.ndarray, path: Path) -> np.ndarray:
        """An image (H, W, C), 0..255, of which the model's normalization makes what its modality's would: float32.

        Images of modalities without statistics of their own come back as they are.
        """
        values = self._values.get(self.of(path)) if self._values else None
        if values is None or self._model is None:
            return image
        factor = self._model[1] / values[1]
        return image.astype(np.float32) * factor + (self._model[0] - values[0] * factor)


class ImageReader:
    """Reads image files in one way; picklable.

    Attributes:
        fill: what values without data become, 0..255, float (C,); None: not known yet.
        modalities: statistics of other sensors.

    Args:
        channels: that the model gets (:func:`to_channels`).
        value_range: what becomes 0 and 255 (:func:`convert`). ``auto``: to be measured, see
            :class:`exp.vision.data.statistics.Normalization`.
        alpha: see :func:`split_alpha`.
        bands: which bands of a file, in which order; None: all of them, as they come.
        stretch: percentiles of each band that become 0 and 255, of 8-bit values, too; None: there are none.
        by_image: whether these are measured on each image by itself.
    """

    def __init__(
        self,
        channels: int = 3,
        value_range: ValueRange | str | None = None,
        alpha: bool | None = None,
        bands: BandChoice | None = None,
        stretch: Sequence[float] | None = None,
        by_image: bool = False,
    ) -> None:
        self.channels = channels
        self.value_range: Any = value_range
        self.alpha = alpha
        self.bands = bands
        self.fill: np.ndarray | None = None
        self.modalities = Modalities()
        self.stretch = None if stretch is None else (float(stretch[0]), float(stretch[1]))
        self.by_image = by_image and stretch is not None

    @property
    def is_measured(self) -> bool:
        """Whether the range was not given, but is to be measured."""
        if self.stretch is not None:
            return self.value_range is None and not self.by_image
        return isinstance(self.value_range, str)

    @property
    def takes_colors(self) -> bool:
        """Whether the model gets red, green, blue, or the gray of these, in whichever order a file has them."""
        return self.bands is None and self.channels in (1, 3)

    def __call__(self, path: Path) -> np.ndarray:
        """An image file as a model gets it: (H, W, C), uint8 or float32, 0..255."""
        return self.with_missing(path)[0]

    def with_missing(self, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        """An image file as a model gets it, and which of its pixels hold no data, bool (H, W); None: all do.

        Raises:
            DataError: it cannot be read, or has no such bands.
        """
        pixels, invalid, missing = self.measured(read_raw(path), path)
        limits = self.stretched_by_itself(pixels, invalid) if self.by_image else self.range_for(pixels)
        return self.finished(pixels, invalid, limits, path), missing

    def plan(self, raw: Raw, path: Path) -> Plan | None:
        """The bands of a file; None: all, as they come."""
        return None if self.bands is None else self.bands.plan(raw.pixels.shape[2], raw.names, raw.alpha, path)

    def select(self, raw: Raw, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        """The measured bands (H, W, C) that are wanted, and transparency (H, W), if there is one.

        Raises:
            DataError: there are others, or it cannot be told which.
        """
        plan = self.plan(raw, path)
        if plan is None:
            if raw.order is not None and self.takes_colors:
                raw = raw._replace(pixels=raw.pixels[..., raw.order])
            return split_alpha(raw, path, self.channels, self.alpha)
        transparency = None if plan.alpha is None else raw.pixels[..., plan.alpha]
        if transparency is not None and self.alpha is None and is_measured_band(transparency):
            transparency = None
        return raw.pixels[..., plan.indexes], transparency

    def measured(self, raw: Raw, path: Path) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """The channels of the model, with the values of the file.

        Returns:
            Values (H, W, C); which of them hold no data, bool (H, W, C); which pixels hold none at all, bool (H, W).

        Raises:
            DataError: there are others, or it cannot be told which.
        """
        return self.measured_of(*self.select(raw, path), raw.nodata, path, raw.masked)

    def measured_of(
        self,
        pixels: np.ndarray,
        transparency: np.ndarray | None,
        nodata: float | None,
        path: Path,
        masked: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Like :meth:`measured`, of what :meth:`select` gives; for the other arguments see :func:`no_data`."""
        invalid = _invalid_values(pixels, nodata)
        missing = _no_data(pixels, transparency, invalid, masked)
        if missing is not None:
            shown = missing[..., None]
            invalid = shown.repeat(pixels.shape[2], axis=2) if invalid is None else invalid | shown
        made = to_channels(pixels, path, self.channels)
        if invalid is not None and invalid.shape[2] != self.channels:
            invalid = invalid.any(axis=2, keepdims=True).repeat(self.channels, axis=2)
        return made, invalid, missing

    def range_for(self, pixels: np.ndarray) -> ValueRange | None:
        """What becomes 0 and 255 of these values; None: they stay as they are, or may not come."""
        limits: ValueRange | None = self.value_range
        return None if pixels.dtype == np.uint8 and self.stretch is None else limits

    def stretched_by_itself(self, pixels: np.ndarray, invalid: np.ndarray | None) -> ValueRange:
        """The percentiles of ``stretch`` of each channel of one image.

        Args:
            pixels: (H, W, C).
            invalid: which hold no data, bool (H, W, C); None: all do.
        """
        assert self.stretch is not None
        lows, highs = [], []
        for channel in range(pixels.shape[2]):
            values = pixels[..., channel]
            values = values[~invalid[..., channel]] if invalid is not None else values.reshape(-1)
            low, high = np.percentile(values, self.stretch).tolist() if values.size else (0.0, 1.0)
            lows.append(low)
            highs.append(high if high > low else low + 1.0)  # all the same: black
        return lows, highs

    def finished(
        self, pixels: np.ndarray, invalid: np.ndarray | None, limits: ValueRange | None, path: Path
    ) -> np.ndarray:
        """Measured values, mapped to 0..255 by ``limits`` and filled where there are none."""
        fill = self.modalities.fill_for(path, self.fill)
        return convert(pixels, path, self.channels, limits, self.stretch is not None, fill, invalid)


def split_alpha(raw: Raw, path: Path, channels: int, alpha: bool | None) -> tuple[np.ndarray, np.ndarray | None]:
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
    return _no_data(pixels, transparency, _invalid_values(pixels, nodata), masked)


def _no_data(
    pixels: np.ndarray, transparency: np.ndarray | None, invalid: np.ndarray | None, masked: np.ndarray | None
) -> np.ndarray | None:
    if transparency is None and masked is None and invalid is None:
        return None
    missing = np.zeros(pixels.shape[:2], bool) if transparency is None else transparency == 0
    if masked is not None:
        missing |= masked
    if invalid is not None:
        missing |= invalid.all(axis=2)
    return missing if missing.any() else None


def _invalid_values(pixels: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Which values hold no data, bool (H, W, C): those that are not finite, and those that stand for no data; None: all
    hold data. In images of 8 bits such a value is a common color: there it counts only where all channels have it.
    """
    invalid: np.ndarray | None = ~np.isfinite(pixels) if pixels.dtype.kind == "f" else None
    if nodata is not None and not np.isnan(nodata):
        # In the dtype of the values: a float32 file holds its no-data value rounded.
        limits = np.iinfo(pixels.dtype) if pixels.dtype.kind in "iu" else None
        if limits is None or (nodata == int(nodata) and limits.min <= nodata <= limits.max):
            same: np.ndarray = np.equal(pixels, pixels.dtype.type(nodata))
            if pixels.dtype == np.uint8:
                same = np.broadcast_to(same.all(axis=2, keepdims=True), pixels.shape)
            invalid = same if invalid is None else np.logical_or(invalid, same)
    return invalid if invalid is not None and invalid.any() else None


def to_channels(pixels: np.ndarray, path: Path, channels: int) -> np.ndarray:
    """A gray image repeated for three channels, a colored one made gray for one; others as they are.

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
        gray = pixels.astype(np.float32) @ _GRAY
        return (np.rint(gray) if pixels.dtype.kind in "iu" else gray).astype(pixels.dtype)[..., None]
    raise DataError(
        f"{path} has {found} channels, but data.channels={channels}; give images of {channels}, or train a "
        f"model for {found} with data.channels={found}"
    )


def convert(
    pixels: np.ndarray,
    path: Path,
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


def _to_byte_range(pixels: np.ndarray, path: Path, value_range: ValueRange | None) -> np.ndarray:
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
