"""Scene classification: images with one label each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import torch

from exp.vision.data import folders, mmrs1m
from exp.vision.data.base import ImageData
from exp.vision.data.colors import distinct_colors
from exp.vision.data.dataset import ImageDataset, stacked
from exp.vision.data.labels import NO_DATA
from exp.vision.data.listing import data_root

if TYPE_CHECKING:
    from exp.vision.metrics import SceneMetrics, TrueClassProbability

__all__ = ["SceneData", "SceneDataset"]

_IGNORED = -1


class SceneDataset(ImageDataset):
    """Images and their class numbers; ``samples`` are (path, class number).

    Batches: ``image`` (B, C, H, W), uint8 or float32, 0..255; ``label`` int64 (B,), -1: does not count; ``index``.
    """

    def load(self, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The image, decoded, and a mask (H, W), uint8, where pixels hold no data."""
        image, missing = self.read.with_missing(self.samples[number][0])
        return image, None if missing is None else missing.astype(np.uint8) * np.uint8(NO_DATA)

    def transform(self, number: int, loaded: tuple[np.ndarray, np.ndarray | None]) -> tuple[np.ndarray, int]:
        """The image, transformed, and its label."""
        path, label = self.samples[number]
        image, mask = loaded
        return self.filled(self.pipeline(image, path, mask, gt_label=label), path), label

    def collate(self, items: Sequence[tuple[np.ndarray, int] | None]) -> dict[str, Any]:
        """See the class."""
        images = [None if item is None else item[0] for item in items]
        labels = [_IGNORED if item is None else item[1] for item in items]
        image = stacked(images, self.blank, self.pipeline.key)
        return {"image": image, "label": torch.tensor(labels, dtype=torch.int64)}


class SceneData(ImageData):
    """A scene classification data set; the arguments are those of :class:`exp.config.schema.SceneDataConfig`.

    Raises:
        DataError: files are missing, or not laid out as expected.
        ConfigError: a pipeline is wrong.
    """

    ignore_index = _IGNORED

    def __init__(
        self,
        name: str,
        root: str | None = None,
        sample_data: str | None = None,
        layout: str = "folders",
        split: Sequence[float] = (0.7, 0.1, 0.2),
        classes: Sequence[str] | None = None,
        datasets: Sequence[str] | None = None,
        modality: str | None = None,
        **common: Any,
    ) -> None:
        folder = data_root(root, sample_data, name)
        if layout == "mmrs1m":
            listing = mmrs1m.find(folder, datasets, modality, split, classes)
        else:
            listing = folders.find(folder, split, classes, unlabelled=not self.learns_classes)
        super().__init__(
            listing, SceneDataset, distinct_colors(len(listing.classes)), name=name, modality=modality, **common
        )

    def metrics(self, detailed: bool = False) -> SceneMetrics:
        """A new accumulator of this data set's metrics."""
        from exp.vision.metrics import SceneMetrics

        return SceneMetrics(self.classes)

    def ranking(self) -> TrueClassProbability:
        """The probability of the class that an image has."""
        from exp.vision.metrics import TrueClassProbability

        return TrueClassProbability()
