"""Semantic segmentation: images with a label for each pixel."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np
import torch

from exp.data.base import ExampleBatch
from exp.errors import DataError
from exp.vision.data.base import ImageData
from exp.vision.data.config import SegmentationDataConfig
from exp.vision.data.dataset import ImageDataset, stacked
from exp.vision.data.labels import IGNORED, NO_DATA, ColorMasks, IndexMasks, Masks, distinct_colors
from exp.vision.data.layouts import Listing
from exp.vision.data.transforms import is_resized

if TYPE_CHECKING:
    from exp.vision.metrics import PixelsRight, SegmentationMetrics

__all__ = ["SegmentationData", "SegmentationDataset"]

_MASKS = 16  # of each split, that are looked at before a training


class SegmentationDataset(ImageDataset):
    """Images and the class of each of their pixels; ``samples`` are (image path, mask path).

    Batches: ``image`` (B, C, H, W), uint8 or float32, 0..255; ``label`` (B, H, W), uint8, 255: does not count;
    ``index``. In evaluation images of different sizes are padded at the right and at the bottom, and ``sizes`` holds
    (height, width) of each. Where the pipeline resizes images, labels keep the pixels of the file, by which
    predictions are measured, and ``label_sizes`` holds (H, W) of each.

    Args:
        *arguments: see :class:`ImageDataset`.
        masks: reads them.
        **keywords: see :class:`ImageDataset`.
    """

    def __init__(self, *arguments: Any, masks: Masks, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.masks = masks

    def load(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Image and labels, decoded."""
        path, mask = self.samples[number]
        image, missing = self.read.with_missing(path)
        labels = self.masks.read(mask)
        if labels.values.shape != image.shape[:2]:
            here, there = (f"{shape[1]}x{shape[0]}" for shape in (labels.values.shape, image.shape))
            raise DataError(f"{mask} is {here} pixels, but its image {path} is {there}; make the mask anew")
        self.unknown[number] = labels.unknown
        values = labels.values if missing is None else np.where(missing, np.uint8(NO_DATA), labels.values)
        return image, values

    def transform(self, number: int, loaded: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Image and labels, transformed."""
        path = self.samples[number][0]
        results = self.pipeline(loaded[0], path, loaded[1])
        labels = loaded[1] if not self.needs_epoch and is_resized(results) else results["gt_seg_map"]
        return self.filled(results, path), np.where(labels == NO_DATA, np.uint8(IGNORED), labels)

    def collate(self, items: Sequence[tuple[np.ndarray, np.ndarray] | None]) -> dict[str, Any]:
        """See the class."""
        images = [None if item is None else item[0] for item in items]
        image = stacked(images, self.blank, self.pipeline.key if self.needs_epoch else None)
        blank = tuple(image.shape[-2:])
        sizes = [blank if item is None else item[1].shape for item in items]
        label = np.full((len(items), *(max(size[axis] for size in sizes) for axis in (0, 1))), IGNORED, np.uint8)
        for row, item in zip(label, items):
            if item is not None:
                row[: item[1].shape[0], : item[1].shape[1]] = item[1]
        batch: dict[str, Any] = {"image": image, "label": torch.from_numpy(label)}
        if not self.needs_epoch:
            batch["sizes"] = [blank if picture is None else picture.shape[:2] for picture in images]
            if sizes != batch["sizes"]:
                batch["label_sizes"] = sizes
        return batch


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

    def interpret(self, listing: Listing, config: Any) -> Callable[..., ImageDataset]:
        """See :meth:`ImageData.interpret`; masks hold colors where there is a palette, and the layout knows none."""
        self.classes = listing.classes or list(config.palette or config.classes or ())
        self.palette = distinct_colors(len(self.classes))
        if config.palette:
            values = [int(color, 16) for color in config.palette.values()]
            self.palette = [(value >> 16, value >> 8 & 255, value & 255) for value in values]
        self._masks: Masks
        if listing.ignored is not None:
            self._masks = IndexMasks(len(self.classes), listing.mask_values, listing.ignored)
        elif config.palette:
            self._masks = ColorMasks(list(config.palette.values()), config.ignore_colors, config.max_unknown)
        else:
            self._masks = IndexMasks(len(self.classes), config.mask_values, config.ignore_values)
        self.hint = f"; {self._masks.left_out}"
        return partial(SegmentationDataset, masks=self._masks)

    def labels_in(self, samples: Sequence[tuple[str, str]]) -> tuple[set[int], int]:
        """See :meth:`ImageData.labels_in`; 16 masks are looked at, spread over all."""
        found: set[int] = set()
        looked_at = 0
        for _, path in samples[:: -(-len(samples) // _MASKS)]:
            with contextlib.suppress(DataError):  # reported when it is its turn, if it is not left out
                found.update(np.unique(self._masks.read(path).values).tolist())
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
