"""Semantic segmentation: images with a label for each pixel."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import cv2
import numpy as np
import torch

from exp.data.base import Sketch
from exp.errors import DataError
from exp.vision.data.base import ImageData
from exp.vision.data.config import SegmentationDataConfig
from exp.vision.data.dataset import ImageDataset, stacked
from exp.vision.data.labels import IGNORED, NO_DATA, ColorMasks, IndexMasks, Masks, distinct_colors
from exp.vision.data.layouts import Listing
from exp.vision.data.statistics import spread_over
from exp.vision.data.transforms import is_resized

if TYPE_CHECKING:
    from exp.vision.metrics import PixelsRight, SegmentationMetrics

__all__ = ["SegmentationData", "SegmentationDataset"]

_MASKS, _PIXELS = 16, 2**26  # of each split, that are looked at before a training
_CALLED = {"train": "training", "val": "validation", "test": "test"}

logger = logging.getLogger(__name__)


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
        # Shared with loader workers, as what was left out is.
        self._read = torch.zeros(len(self.samples), dtype=torch.bool).share_memory_()
        self._values = torch.zeros(256, dtype=torch.bool).share_memory_()

    def met(self) -> dict[str, Any]:
        """And ``read``: the samples whose masks were read; ``values``: the labels that these hold."""
        read, values = (torch.nonzero(flags)[:, 0].tolist() for flags in (self._read, self._values))
        return {**super().met(), "read": read, "values": values}

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
        if not self._read[number]:
            self._read[number] = True
            self._values[_values_in(values)] = True
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
    classes_key = "data.palette or data.classes"

    def __init__(self, **keys: Any) -> None:
        config = SegmentationDataConfig(**keys)
        self.gsd = config.gsd
        self._say: Callable[[str], object] = logger.warning
        self._warned: set[str] = set()
        super().__init__(config)

    def interpret(
        self, listing: Listing, config: Any
    ) -> tuple[Callable[..., ImageDataset], list[str], list[tuple[int, int, int]]]:
        """See :meth:`ImageData.interpret`; masks hold colors where there is a palette, and the layout knows none."""
        names = listing.classes or list(config.palette or config.classes or ())
        colors = distinct_colors(len(names))
        if config.palette:
            values = [int(color, 16) for color in config.palette.values()]
            colors = [(value >> 16, value >> 8 & 255, value & 255) for value in values]
        self._masks: Masks
        if listing.ignored is not None:
            self._masks = IndexMasks(len(names), listing.mask_values, listing.ignored)
        elif config.palette:
            self._masks = ColorMasks(list(config.palette.values()), config.ignore_colors, config.max_unknown)
        else:
            self._masks = IndexMasks(len(names), config.mask_values, config.ignore_values)
        return partial(SegmentationDataset, masks=self._masks), names, colors

    # -- classes without a pixel: not learned, or not measured ---------------------------------------------------------

    def look_at_files(self, say: Callable[[str], None]) -> None:
        """And at some masks of each split, spread over it, for classes without a pixel.

        Of a few masks of many only what is no chance is a warning: a single class, and pixels that are left out.

        Raises:
            DataError: no mask of a split has a pixel that counts.
        """
        super().look_at_files(say)
        self._say = say
        for split, data in self._splits.items():
            read, found = self._some_of(data.samples)
            if not read:
                continue
            whole = read == len(data)
            met = [name for number, name in enumerate(self.classes) if number in found]
            where = f"the {read} {_CALLED[split]} masks" if whole else f"{read} of {len(data)} {_CALLED[split]} masks"
            if not met:
                text = f"no pixel of {where} has a class: {self._masks.left_out}"
                if whole:
                    raise DataError(text)
                say(f"warning: {text}")
            elif split == "train" and (whole or (len(met) == 1 < len(self.classes) and self._masks.hint(found))):
                self._warn(where, found, "cannot be learned")

    def _some_of(self, samples: Sequence[tuple[str, str]]) -> tuple[int, list[int]]:
        """How many masks were read, and the values that they hold."""
        read, pixels, found = 0, 0, set()
        for path in spread_over([mask for _, mask in samples], _MASKS):
            try:
                labels = self._masks.read(path).values
            except DataError:
                continue  # reported when it is its turn, if it is not left out
            read, pixels = read + 1, pixels + labels.size
            found.update(_values_in(labels))
            if pixels >= _PIXELS:
                break
        return read, sorted(found)

    def found_in(self, gathered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """And the classes without a pixel, as far as masks were read: ``classes_without_training_pixels`` and
        ``classes_not_measured``.
        """
        record = super().found_in(gathered)
        for split, key, means in (
            ("train", "classes_without_training_pixels", "cannot be learned"),
            (self.tested_on, "classes_not_measured", "no figure tells of it"),
        ):
            size = len(self._splits[split])
            read = {number for rank in gathered for number in rank[split]["read"]}
            found = sorted({value for rank in gathered for value in rank[split]["values"]})
            share = "the" if len(read) == size else f"{len(read)} of"
            lacking = self._warn(f"{share} {size} {_CALLED[split]} masks", found, means) if read else []
            if lacking:
                record[key] = lacking
        return record

    def _warn(self, where: str, found: Sequence[int], means: str) -> list[str]:
        """Classes that masks hold no pixel of; a warning once for what it means, however often it is found."""
        lacking = [name for number, name in enumerate(self.classes) if number not in found]
        if lacking and means not in self._warned:
            self._warned.add(means)
            names = ("class " if len(lacking) == 1 else "classes ") + ", ".join(lacking)
            self._say(f"warning: no pixel of {names} in {where}: {means}{self._masks.hint(found)}")
        return lacking

    # ------------------------------------------------------------------------------------------------------------------

    @classmethod
    def sketch(cls, **keys: Any) -> Sketch:
        """As for scenes, with a label for each pixel."""
        made, size = super().sketch(**keys), int(keys["size"])
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


def _values_in(labels: np.ndarray) -> list[int]:
    """The values that labels hold, uint8, ascending."""
    counts = cv2.calcHist([np.ascontiguousarray(labels).reshape(-1, 1)], [0], None, [256], [0, 256])
    found: list[int] = np.flatnonzero(counts.reshape(-1)).tolist()
    return found
