"""Semantic segmentation: images with a label for each pixel."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import torch

from exp.data.base import ExampleBatch
from exp.errors import DataError
from exp.vision.data.base import ImageData
from exp.vision.data.config import SegmentationDataConfig
from exp.vision.data.labels import IGNORED, ColorMasks, IndexMasks, distinct_colors
from exp.vision.data.layouts import Listing

if TYPE_CHECKING:
    from exp.vision.metrics import PixelsRight, SegmentationMetrics

__all__ = ["SegmentationData"]

_MASKS = 16  # of each split, that are looked at before a training


class SegmentationData(ImageData):
    """A segmentation data set; its keys are those of :class:`exp.vision.data.config.SegmentationDataConfig`.

    Attributes:
        gsd: on the ground, of files that do not tell it; None: not known.
    """

    ignore_index = IGNORED
    per_pixel = True
    classes_key = "data.palette or data.classes"

    def __init__(self, **keys: Any) -> None:
        config = SegmentationDataConfig(**keys)
        self.gsd = config.gsd
        super().__init__(config)

    def masks_of(self, listing: Listing, config: Any) -> ColorMasks | IndexMasks:
        """See :meth:`ImageData.masks_of`; masks hold colors where there is a palette, and the layout knows none."""
        self.classes = listing.classes or list(config.palette or config.classes or ())
        self.palette = distinct_colors(len(self.classes))
        if config.palette:
            values = [int(color, 16) for color in config.palette.values()]
            self.palette = [(value >> 16, value >> 8 & 255, value & 255) for value in values]
        if listing.ignored is not None:
            masks: ColorMasks | IndexMasks = IndexMasks(len(self.classes), listing.mask_values, listing.ignored)
        elif config.palette:
            masks = ColorMasks(list(config.palette.values()), config.ignore_colors, config.max_unknown)
        else:
            masks = IndexMasks(len(self.classes), config.mask_values, config.ignore_values)
        self.hint = f"; {masks.left_out}"
        return masks

    def labels_in(self, samples: Sequence[tuple[str, str]]) -> tuple[set[int], int]:
        """See :meth:`ImageData.labels_in`; 16 masks are looked at, spread over all."""
        found: set[int] = set()
        looked_at = 0
        for _, path in samples[:: -(-len(samples) // _MASKS) or 1]:
            with contextlib.suppress(DataError):  # reported when it is its turn, if it is not left out
                found.update(np.unique(self.train.masks.read(path).values).tolist())
                looked_at += 1
        return found, looked_at

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch:
        """As for scenes, with a label for each pixel."""
        made, size = super().example_batch(**keys), int(keys["size"])
        sample = {**made.train, "label": torch.zeros(1, size, size, dtype=torch.uint8)}
        return made._replace(train=sample, val={**sample, "sizes": [(size, size)]})

    def metrics(self, detailed: bool = False) -> SegmentationMetrics:
        """A new accumulator of this data set's metrics."""
        from exp.vision.metrics import SegmentationMetrics

        return SegmentationMetrics(self.classes)

    def ranking(self) -> PixelsRight:
        """The share of an image's pixels that are right."""
        from exp.vision.metrics import PixelsRight

        return PixelsRight(len(self.classes))
