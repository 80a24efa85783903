"""Semantic segmentation: images with a label for each pixel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np
import torch

from exp.data.base import Sketch
from exp.errors import DataError
from exp.vision.data import loveda, mmrs1m_masks
from exp.vision.data import masks as pairs
from exp.vision.data.base import ImageData
from exp.vision.data.colors import distinct_colors, rgb
from exp.vision.data.dataset import ImageDataset, stacked
from exp.vision.data.labels import IGNORED, NO_DATA, ColourMasks, IndexMasks
from exp.vision.data.listing import data_root
from exp.vision.data.pipeline import is_resized
from exp.vision.data.presence import Presence, values_in

if TYPE_CHECKING:
    from exp.vision.metrics import PixelsRight, SegmentationMetrics

__all__ = ["SegmentationData", "SegmentationDataset"]


_MASKS = ("labels", "masks", "annotations")


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

    def __init__(self, *arguments: Any, masks: IndexMasks | ColourMasks, **keywords: Any) -> None:
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
            self._values[values_in(values)] = True
        return image, values

    def transform(self, number: int, loaded: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Image and labels, transformed."""
        results = self.pipeline(loaded[0], self.samples[number][0], loaded[1])
        labels = results["gt_seg_map"]
        if not self.needs_epoch and is_resized(results):
            labels = loaded[1]
        return self.filled(results, self.samples[number][0]), np.where(labels == NO_DATA, np.uint8(IGNORED), labels)

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
    """A segmentation data set; the arguments are those of :class:`exp.config.schema.SegmentationDataConfig`.

    Attributes:
        metres_per_pixel: on the ground, of files that do not tell it; None: not known.

    Raises:
        DataError: files are missing, or not laid out as expected.
        ConfigError: a pipeline is wrong.
    """

    ignore_index = IGNORED
    classes_key = "data.palette or data.classes"

    def __init__(
        self,
        name: str,
        root: str | None = None,
        sample_data: str | None = None,
        layout: str = "masks",
        images: str = "images",
        masks: str = "masks",
        split: Sequence[float] = (0.8, 0.2, 0.0),
        parts: Mapping[str, Sequence[str]] | None = None,
        classes: Sequence[str] | None = None,
        palette: Mapping[str, str] | None = None,
        ignore_colours: Sequence[str] = (),
        max_unknown: float = 0.1,
        mask_values: Mapping[int, int] | None = None,
        ignore_values: Sequence[int] = (IGNORED,),
        metres_per_pixel: float | None = None,
        on_error: str = "raise",
        datasets: Sequence[str] | None = None,
        modality: str | None = None,
        **common: Any,
    ) -> None:
        self.metres_per_pixel = metres_per_pixel
        folder = data_root(root, sample_data, name)
        reader: IndexMasks | ColourMasks
        if layout == "loveda":
            listing = loveda.find(folder)
            reader = IndexMasks(len(listing.classes), listing.mask_values, listing.ignored)
        else:
            if layout == "mmrs1m":
                places = list(dict.fromkeys([masks, *_MASKS]))
                listing = mmrs1m_masks.find(folder, datasets, modality, images, places, split)
            else:
                listing = pairs.find(folder, images, masks, split, parts, on_error == "skip")
            listing.classes = list(palette or classes or ())
            if palette:
                reader = ColourMasks(list(palette.values()), ignore_colours, max_unknown)
            else:
                reader = IndexMasks(len(listing.classes), mask_values, ignore_values)
        colors = [rgb(color) for color in palette.values()] if palette else distinct_colors(len(listing.classes))
        super().__init__(
            listing,
            partial(SegmentationDataset, masks=reader),
            colors,
            name=name,
            on_error=on_error,
            modality=modality,
            **common,
        )
        self._presence = Presence(self.classes, reader)

    def settle(self, session: Any) -> None:
        """As of all images; and before a training rank 0 looks at some masks, for classes without a pixel.

        Raises:
            DataError: see :meth:`exp.vision.data.base.ImageData.settle`; or no mask of a part has a pixel that counts.
        """
        super().settle(session)
        self._presence.say = session.say
        if session.config.task.name != "train":
            return
        trouble = None
        if session.distributed.is_main:
            try:
                self._presence.look(self._parts)  # type: ignore[arg-type]
            except DataError as error:
                trouble = error
        trouble = session.distributed.gather(trouble)[0]
        if trouble is not None:
            raise trouble

    def found_in(self, gathered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """And the classes without a pixel, as far as masks were read."""
        sizes = {part: len(data) for part, data in self._parts.items()}
        return {**super().found_in(gathered), **self._presence.record(sizes, self.tested_on, gathered)}

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
