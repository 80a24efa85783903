"""task=eval: test the weights of a checkpoint, also in detail: per series and horizon step, or per class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from exp.errors import ConfigError
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.session import Session

__all__ = ["Eval"]


@dataclass
class Eval(Task):
    """Tests weights as they are."""

    _target_: str = "exp.tasks.eval.Eval"
    name: str = "eval"
    worst: int = 4
    """How many of the worst samples are drawn, truth beside prediction, where the data can; with ``plots=true``."""
    best: int = 2
    """How many of the best."""

    needs_weights: ClassVar[bool] = True
    modules = ("exp.engine.evaluation",)

    def check(self, config: ExpConfig) -> None:
        """Counts are no less than 0."""
        for key, value in (("worst", self.worst), ("best", self.best)):
            if value < 0:
                raise ConfigError(f"task.{key}={value} must not be negative")

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.engine.evaluation.evaluate`."""
        from exp.engine.evaluation import evaluate

        return evaluate(session)
