"""task=train: train with validation, then test the best weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from exp.task import Task

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Train"]


@dataclass
class Train(Task):
    """Trains, and goes on from checkpoints of its own."""

    _target_: str = "exp.tasks.train.Train"
    name: str = "train"

    trains: ClassVar[bool] = True
    saves_state: ClassVar[bool] = True
    modules = ("exp.engine.training",)

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.engine.training.train`."""
        from exp.engine.training import train

        return train(session)
