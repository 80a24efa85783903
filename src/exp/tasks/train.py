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
        """Train, once more from the checkpoint after ``debug.restart_after`` (:func:`exp.engine.training.train`)."""
        from exp.engine.hooks import Interrupted
        from exp.engine.training import train

        try:
            return train(session, _rate, _what_fits)
        except Interrupted as interrupted:
            step = interrupted.step
        session.say(
            f"debug: interrupted after step {step}; everything is built anew, and continues from the checkpoint"
        )
        session.start_anew()
        return train(session, _rate, _what_fits)


def _rate(*arguments: Any) -> dict[str, float]:
    from exp.estimate.rate import training_rate  # only once the training is over

    return training_rate(*arguments)


def _what_fits(*arguments: Any) -> Any:
    from exp.estimate.trace import what_fits  # only if memory is exhausted

    return what_fits(*arguments)
