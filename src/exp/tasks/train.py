"""task=train: train with validation, then test the best weights; task=estimate: the cost of that, in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Optional

from exp.task import ParentTask, Task

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Estimate", "Train"]


@dataclass
class Train(Task):
    """Trains a model, saves checkpoints, and can resume from them."""

    _target_: str = "exp.tasks.train.Train"
    name: str = "train"

    trains: ClassVar[bool] = True
    saves_state: ClassVar[bool] = True
    work: ClassVar[str] = "exp.engine.training.train"

    def run(self, session: Session) -> dict[str, Any]:
        """Train (:func:`exp.engine.training.train`); with ``debug.restart_after``, rebuild all and resume after it."""
        from exp.engine.hooks import Interrupted
        from exp.engine.training import train

        try:
            return train(session, _rate, _what_fits)
        except Interrupted as interrupted:
            step = interrupted.step
        session.say(f"debug: interrupted after step {step}; everything is rebuilt, and resumes from the checkpoint")
        session.start_anew()
        return train(session, _rate, _what_fits)


def _rate(*arguments: Any) -> dict[str, float]:
    from exp.estimate import training_rate  # only once the training is over

    return training_rate(*arguments)


def _what_fits(config: Any, backend: Any, memory: int | None) -> Any:
    from exp.estimate import what_fits  # only if memory is exhausted

    return what_fits(config, backend, memory, Estimate.headroom)


@dataclass
class Estimate(ParentTask):
    """Estimates parameters, operations, memory by kind, and the batch size that fits; needs no hardware."""

    _target_: str = "exp.tasks.train.Estimate"
    name: str = "estimate"
    memory_gib: Optional[float] = None
    """Memory of a card, in GiB; null: that of the cards here, as the vendor's monitor reports it."""
    headroom: float = 0.1
    """Share of the memory for what is not counted: the driver, buffers of collectives, fragmentation."""

    trains: ClassVar[bool] = True
    work: ClassVar[str] = "exp.estimate.write_estimate"
