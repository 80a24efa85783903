"""Images with one label each; and images without regard to their labels, to learn a teacher's features on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError
from exp.vision.data.base import ImageData
from exp.vision.data.config import DistillationDataConfig, SceneDataConfig
from exp.vision.data.dataset import NO_LABEL

if TYPE_CHECKING:
    from exp.data.base import ExampleBatch, Prediction
    from exp.vision.metrics import FeatureAgreement, SceneMetrics, TrueClassProbability

__all__ = ["DistillationData", "SceneData"]


class SceneData(ImageData):
    """A scene classification data set; its keys are those of :class:`exp.vision.data.config.SceneDataConfig`."""

    ignore_index = NO_LABEL
    keys = SceneDataConfig

    def __init__(self, **keys: Any) -> None:
        super().__init__(self.keys(**keys))

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
