"""task=eval and task=predict: use the weights of a checkpoint unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Optional

from exp.config.check import preflight_of
from exp.task import Task, named

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["Eval", "Predict"]


@named
class Eval(Task):
    """Evaluates weights on the test split, also in detail: per series and horizon step, or per class."""

    worst: int = 4
    """Number of the worst samples to draw, ground truth beside prediction; needs ``plots=true`` and support by the
    data."""
    best: int = 2
    """Number of the best samples to draw."""

    needs_weights: ClassVar[bool] = True
    work: ClassVar[str] = "exp.engine.outputs.evaluate"


@named
class Predict(Task):
    """Predicts with the weights of ``init_from``, and writes files and pictures; data may add keys."""

    input: Optional[str] = None
    """Input of the prediction: images, or a CSV file of new rows, depending on the data; null: the test split."""

    needs_weights: ClassVar[bool] = True
    work: ClassVar[str] = "exp.engine.outputs.predict"

    def check(self, config: ExpConfig) -> None:
        """Let the data take ``task.input``, such as a file of new rows, in place of their file, if they support it."""
        take = getattr(preflight_of(config.data), "take_input", None)
        if self.input is not None and take is not None:
            take(config.data, self.input)
