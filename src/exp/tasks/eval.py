"""task=eval: test the weights of a checkpoint, also in detail: per series and horizon step, or per class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from exp.task import Task

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Eval"]


@dataclass
class Eval(Task):
    """Tests weights as they are."""

    _target_: str = "exp.tasks.eval.Eval"
    name: str = "eval"

    needs_weights: ClassVar[bool] = True
    modules = ("exp.engine.evaluation",)

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.engine.evaluation.evaluate`."""
        from exp.engine.evaluation import evaluate

        return evaluate(session)
