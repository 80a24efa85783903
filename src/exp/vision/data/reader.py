"""Reads the image files of a data set in one way, with the range of values that its model has been trained on."""

from __future__ import annotations

import logging
import os
from typing import Sequence

import numpy as np

from exp.errors import DataError
from exp.vision.data.decode import read_image, read_raw
from exp.vision.data.values import no_data, split_alpha

__all__ = ["ImageReader", "measured_range"]

_EXAMPLES, _VALUES = 64, 2**16  # of images, and of values of each, that a range is measured on

logger = logging.getLogger(__name__)


class ImageReader:
    """Reads image files in one way; picklable.

    Attributes:
        channels: see :func:`exp.vision.data.values.convert`.
        alpha: see :func:`exp.vision.data.values.split_alpha`.

    Args:
        channels: see there.
        value_range: see :func:`exp.vision.data.values.convert`; or ``auto``: measured on ``examples`` when it is first
            needed.
        alpha: see there.
        examples: image files of the training split.
    """

    def __init__(
        self,
        channels: int = 3,
        value_range: Sequence[float] | str | None = None,
        alpha: bool | None = None,
        examples: Sequence[str] = (),
    ) -> None:
        self.channels = channels
        self.alpha = alpha
        self._value_range = value_range
        self._examples = examples

    @property
    def value_range(self) -> Sequence[float] | None:
        """(low, high), or None: only 8-bit values can be read."""
        if isinstance(self._value_range, str):
            self._value_range = measured_range(self._examples, self.channels, self.alpha)
        return self._value_range

    @value_range.setter
    def value_range(self, value_range: Sequence[float] | None) -> None:
        self._value_range = value_range

    @property
    def is_measured(self) -> bool:
        """Whether the range was not given, but is to be measured."""
        return isinstance(self._value_range, str)

    def __call__(self, path: str | os.PathLike[str]) -> np.ndarray:
        """:func:`read_image`."""
        return read_image(path, self.channels, self.value_range, self.alpha)


def measured_range(paths: Sequence[str], channels: int, alpha: bool | None) -> tuple[float, float] | None:
    """The 1st and 99th percentile of what images hold that are not of 8 bits.

    Args:
        paths: of the training images; 64 of them, spread over all, are looked at.
        channels: see :func:`exp.vision.data.values.split_alpha`.
        alpha: see there.

    Returns:
        (low, high); None: all of these images are of 8 bits.

    Raises:
        DataError: an image cannot be used, or all values are the same.
    """
    values = []
    chosen = (
        [paths[number * len(paths) // _EXAMPLES] for number in range(_EXAMPLES)] if len(paths) > _EXAMPLES else paths
    )
    for path in chosen:
        raw = read_raw(path)
        if raw.pixels.dtype != np.uint8:
            pixels, transparency = split_alpha(raw, path, channels, alpha)
            missing = no_data(pixels, transparency, raw.nodata)
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
