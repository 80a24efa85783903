"""Reads the image files of a data set in one way, with the bands and the values that its model has been trained on."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple, Sequence

import numpy as np

from exp.errors import DataError
from exp.vision.data.bands import BandChoice, is_measured_band
from exp.vision.data.decode import read_raw
from exp.vision.data.modality import Modalities
from exp.vision.data.values import Raw, ValueRange, convert, invalid_values, no_data, split_alpha, to_channels

__all__ = ["Example", "ImageReader", "measured_range", "spread_over"]

_EXAMPLES, _VALUES = 64, 2**16  # of images, and of values of each, that a range is measured on

logger = logging.getLogger(__name__)


class Example(NamedTuple):
    """What the first training image tells.

    Attributes:
        names: of the bands that the model gets, in its order; empty: not known.
        bytes: whether its values are of 8 bits.
    """

    names: list[str]
    bytes: bool


class ImageReader:
    """Reads image files in one way; picklable.

    Attributes:
        channels: see :func:`exp.vision.data.values.convert`.
        alpha: see :func:`exp.vision.data.values.split_alpha`.
        bands: which bands of a file, in which order; None: all of them, as they come.
        fill: what values without data become, 0..255, float (C,); None: not known yet.
        modalities: what images of other sensors have of their own.

    Args:
        channels: see there.
        value_range: see :func:`exp.vision.data.values.convert`; or ``auto``: measured on ``examples`` when it is first
            needed.
        alpha: see there.
        examples: image files of the training split.
        bands: see above.
        stretch: percentiles of each band that become 0 and 255, of 8-bit values, too; None: there are none.
        by_image: whether these are measured on each image by itself.
    """

    def __init__(
        self,
        channels: int = 3,
        value_range: ValueRange | str | None = None,
        alpha: bool | None = None,
        examples: Sequence[str] = (),
        bands: BandChoice | None = None,
        stretch: Sequence[float] | None = None,
        by_image: bool = False,
    ) -> None:
        self.channels = channels
        self.alpha = alpha
        self.bands = bands
        self.fill: np.ndarray | None = None
        self.modalities = Modalities()
        self.stretch = None if stretch is None else (float(stretch[0]), float(stretch[1]))
        self.by_image = by_image and stretch is not None
        self._value_range = value_range
        self.examples = examples

    @property
    def value_range(self) -> ValueRange | None:
        """(low, high), or None: only 8-bit values can be read, or each image is stretched by itself."""
        if self.is_measured:
            if self.stretch is None:
                self._value_range = measured_range(self)
            else:
                from exp.vision.data.statistics import measure

                self.value_range = measure(self, self.examples, self.stretch).stretched()
        assert not isinstance(self._value_range, str)
        return self._value_range

    @value_range.setter
    def value_range(self, value_range: ValueRange | None) -> None:
        self._value_range = value_range

    @property
    def is_measured(self) -> bool:
        """Whether the range was not given, but is to be measured."""
        if self.stretch is not None:
            return self._value_range is None and not self.by_image
        return isinstance(self._value_range, str)

    def example(self) -> Example:
        """What the first training image tells; numbers of bands are from now on meant for files like it.

        Raises:
            DataError: it cannot be read, or has no such bands.
        """
        path = self.examples[0]
        raw = read_raw(path)
        names: list[str] = []
        if self.bands is not None:
            count = raw.pixels.shape[2]
            plan = self.bands.plan(count, raw.names, raw.alpha, path)
            self.bands.expected = self.bands.measured(count, raw.alpha)
            names = self.bands.chosen_names(plan, self.bands.names(count, raw.names, raw.alpha, path))
        return Example(names, raw.pixels.dtype == np.uint8)

    def __call__(self, path: str | os.PathLike[str]) -> np.ndarray:
        """An image file as a model gets it: (H, W, C), uint8 or float32, 0..255."""
        return self.with_missing(path)[0]

    def with_missing(self, path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray | None]:
        """An image file as a model gets it, and which of its pixels hold no data, bool (H, W); None: all do.

        Raises:
            DataError: it cannot be read, or has no such bands.
        """
        return self.converted(read_raw(path), path)

    def converted(self, raw: Raw, path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray | None]:
        """The same of what a file holds."""
        pixels, invalid, missing = self.measured(raw, path)
        limits = self.stretched_by_itself(pixels, invalid) if self.by_image else self.range_for(pixels)
        return self.finished(pixels, invalid, limits, path), missing

    def finished(
        self, pixels: np.ndarray, invalid: np.ndarray | None, limits: ValueRange | None, path: str | os.PathLike[str]
    ) -> np.ndarray:
        """Measured values, mapped to 0..255 by ``limits`` and filled where there are none."""
        return convert(
            pixels,
            path,
            self.channels,
            limits,
            self.stretch is not None,
            self.modalities.fill_for(path, self.fill),
            invalid,
        )

    def measured(
        self, raw: Raw, path: str | os.PathLike[str]
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """The channels of the model, with the values of the file.

        Returns:
            Values (H, W, C); which of them hold no data, bool (H, W, C); which pixels hold none at all, bool (H, W).

        Raises:
            DataError: there are others, or it cannot be told which.
        """
        pixels, transparency = self.select(raw, path)
        return self.measured_of(pixels, transparency, raw.nodata, path, raw.masked)

    def measured_of(
        self,
        pixels: np.ndarray,
        transparency: np.ndarray | None,
        nodata: float | None,
        path: str | os.PathLike[str],
        masked: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """The same of what :meth:`select` gives; see :func:`exp.vision.data.values.no_data`."""
        missing = no_data(pixels, transparency, nodata, masked)
        invalid = invalid_values(pixels, nodata)
        if missing is not None:
            shown = missing[..., None]
            invalid = shown.repeat(pixels.shape[2], axis=2) if invalid is None else invalid | shown
        made = to_channels(pixels, path, self.channels)
        if invalid is not None and invalid.shape[2] != self.channels:
            invalid = invalid.any(axis=2, keepdims=True).repeat(self.channels, axis=2)
        return made, invalid, missing

    def select(self, raw: Raw, path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray | None]:
        """The measured bands (H, W, C) that are wanted, and transparency (H, W), if there is one.

        Raises:
            DataError: there are others, or it cannot be told which.
        """
        if self.bands is None:
            if raw.order is not None and self.takes_colours:
                raw = raw._replace(pixels=raw.pixels[..., raw.order])
            return split_alpha(raw, path, self.channels, self.alpha)
        plan = self.bands.plan(raw.pixels.shape[2], raw.names, raw.alpha, path)
        transparency = None if plan.alpha is None else raw.pixels[..., plan.alpha]
        if transparency is not None and self.alpha is None and is_measured_band(transparency):
            transparency = None
        return raw.pixels[..., plan.indexes], transparency

    @property
    def takes_colours(self) -> bool:
        """Whether the model gets red, green, blue, or the gray of these, in whichever order a file has them."""
        return self.bands is None and self.channels in (1, 3)

    def range_for(self, pixels: np.ndarray) -> ValueRange | None:
        """What becomes 0 and 255 of these values; None: they stay as they are, or may not come."""
        return None if pixels.dtype == np.uint8 and self.stretch is None else self.value_range

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


def spread_over(paths: Sequence[str], most: int) -> Sequence[str]:
    """At most so many of the paths, from the first to the last."""
    return [paths[number * len(paths) // most] for number in range(most)] if len(paths) > most else paths


def measured_range(reader: ImageReader) -> tuple[float, float] | None:
    """The 1st and 99th percentile of what images hold that are not of 8 bits; all bands together.

    Args:
        reader: whose ``examples`` are looked at: 64 of them, spread over all.

    Returns:
        (low, high); None: all of these images are of 8 bits.

    Raises:
        DataError: an image cannot be used, or all values are the same.
    """
    values = []
    for path in spread_over(reader.examples, _EXAMPLES):
        raw = read_raw(path)
        if raw.pixels.dtype != np.uint8:
            pixels, transparency = reader.select(raw, path)
            missing = no_data(pixels, transparency, raw.nodata, raw.masked)
            found = (pixels if missing is None else pixels[~missing]).reshape(-1)
            values.append(found[:: max(found.size // _VALUES, 1)].astype(np.float64))
    if not values:
        return None
    together = np.concatenate(values)
    low, high = np.percentile(together[np.isfinite(together)], (1.0, 99.0)).tolist()
    if not low < high:
        raise DataError(f"data.value_range=auto: the training images hold {low:g} nearly everywhere; set [low, high]")
    logger.info("data.value_range=[%g, %g]: percentiles 1 and 99 of %d training images", low, high, len(values))
    return low, high
