"""Images without regard to their labels, to learn a teacher's features on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError
from exp.vision.data.scenes import SceneData

if TYPE_CHECKING:
    from exp.data.base import Prediction, Sketch
    from exp.vision.agreement import FeatureAgreement

__all__ = ["DistillationData"]


class DistillationData(SceneData):
    """Folders of images as of scenes, or one of images alone; folders are not classes here, they only divide parts."""

    learns_classes = False

    def model_arguments(self) -> dict[str, int]:
        """Channels alone: a model for classes does not go with these data."""
        return {"in_channels": self.read.channels}

    @classmethod
    def sketch(cls, **keys: Any) -> Sketch:
        """As of scenes, without classes."""
        sketch = super().sketch(**keys)
        arguments = {"in_channels": sketch.model_arguments["in_channels"]}
        return sketch._replace(model_arguments=arguments, notes=sketch.notes[:1])

    def metrics(self, detailed: bool = False) -> list[FeatureAgreement]:  # type: ignore[override]
        """How alike student and teacher are."""
        from exp.vision.agreement import FeatureAgreement

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
