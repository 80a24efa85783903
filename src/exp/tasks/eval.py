"""task=eval and predict: weights of a checkpoint as they are, on data that they were not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Optional

from exp.config.check import preflight_of
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["Eval", "Predict"]


@dataclass
class Eval(Task):
    """Tests weights as they are, also in detail: per series and horizon step, or per class."""

    _target_: str = "exp.tasks.eval.Eval"
    name: str = "eval"
    worst: int = 4
    """How many of the worst samples are drawn, truth beside prediction, where the data can; with ``plots=true``."""
    best: int = 2
    """How many of the best."""

    needs_weights: ClassVar[bool] = True
    work: ClassVar[str] = "exp.engine.outputs.evaluate"


@dataclass
class Predict(Task):
    """Predicts with the weights of ``init_from``, as files and pictures; data bring further keys."""

    _target_: str = "exp.tasks.eval.Predict"
    name: str = "predict"
    input: Optional[str] = None
    """What to predict for, as the data say: images, a CSV file of new rows; null: the test split."""

    needs_weights: ClassVar[bool] = True
    work: ClassVar[str] = "exp.engine.outputs.predict"

    def check(self, config: ExpConfig) -> None:
        """``task.input`` stands for the data where their family says so: a file of new rows."""
        take = getattr(preflight_of(config.data), "take_input", None)
        if self.input is not None and take is not None:
            take(config.data, self.input)
