"""Images with one label each; and images without regard to their labels, to learn a teacher's features on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np
import torch

from exp.errors import ConfigError
from exp.vision.data.base import ImageData
from exp.vision.data.config import DistillationDataConfig, SceneDataConfig
from exp.vision.data.dataset import ImageDataset, stacked
from exp.vision.data.labels import NO_DATA, distinct_colors
from exp.vision.data.layouts import Listing

if TYPE_CHECKING:
    from exp.data.base import ExampleBatch, Prediction
    from exp.vision.metrics import FeatureAgreement, SceneMetrics, TrueClassProbability

__all__ = ["DistillationData", "SceneData", "SceneDataset"]

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
        return self.filled(self.pipeline(loaded[0], path, loaded[1], gt_label=label), path), label

    def collate(self, items: Sequence[tuple[np.ndarray, int] | None]) -> dict[str, Any]:
        """See the class."""
        image = stacked([None if item is None else item[0] for item in items], self.blank, self.pipeline.key)
        labels = [_IGNORED if item is None else item[1] for item in items]
        return {"image": image, "label": torch.tensor(labels, dtype=torch.int64)}


class SceneData(ImageData):
    """A scene classification data set; its keys are those of :class:`exp.vision.data.config.SceneDataConfig`."""

    ignore_index = _IGNORED
    keys = SceneDataConfig

    def __init__(self, **keys: Any) -> None:
        super().__init__(self.keys(**keys))

    def interpret(self, listing: Listing, config: Any) -> Callable[..., ImageDataset]:
        """See :meth:`ImageData.interpret`."""
        self.classes, self.palette = listing.classes, distinct_colors(len(listing.classes))
        return SceneDataset

    def metrics(self, detailed: bool = False) -> SceneMetrics:
        """A new accumulator of this data set's metrics."""
        from exp.vision.metrics import SceneMetrics

        return SceneMetrics(self.classes)

    def ranking(self) -> TrueClassProbability:
        """The probability of the class that an image has."""
        from exp.vision.metrics import TrueClassProbability

        return TrueClassProbability()


class DistillationData(SceneData):
    """Folders of images as of scenes, or one of images alone; folders are not classes here, they only divide splits."""

    learns_classes = False
    keys = DistillationDataConfig

    def model_arguments(self) -> dict[str, int]:
        """Channels alone: a model for classes does not go with these data."""
        return {"in_channels": self.read.channels}

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch:
        """As of scenes, without classes."""
        example = super().example_batch(**keys)
        arguments = {"in_channels": example.model_arguments["in_channels"]}
        return example._replace(model_arguments=arguments, notes=example.notes[:1])

    def metrics(self, detailed: bool = False) -> list[FeatureAgreement]:  # type: ignore[override]
        """How alike student and teacher are."""
        from exp.vision.metrics import FeatureAgreement

        return [FeatureAgreement("cls"), FeatureAgreement("patches")]

    def ranking(self) -> None:  # type: ignore[override]
        """None: there is no truth to draw beside a prediction."""

    def pictures(self, session: Any, model: Any, evaluator: Any = None) -> dict[str, Any]:
        """None; ``task=features`` draws what a student sees."""
        return {}

    def predict(self, session: Any, model: Any) -> Prediction:
        """Refused.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("task=predict: a student of features predicts no classes; use task=features, or train a head")
