"""task=train: train with validation, then test the best weights; task=estimate: the cost of that, in advance."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Optional

from exp.task import ParentTask, Task, call, named

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Estimate", "Train"]


@named
class Train(Task):
    """Trains a model, saves checkpoints, and can resume from them."""

    trains: ClassVar[bool] = True
    saves_state: ClassVar[bool] = True
    work: ClassVar[str] = "exp.engine.training.train"

    def run(self, session: Session) -> dict[str, Any]:
        """Train (:func:`exp.engine.training.train`); after step ``debug.restart_after`` rebuild all, and resume."""
        from exp.engine.hooks import Interrupted
        from exp.engine.training import train

        # The engine must not import exp.estimate, a layer above it. It is imported only when these are called.
        rate, fits = (functools.partial(call, f"exp.estimate.{name}") for name in ("training_rate", "what_fits"))
        estimates = rate, functools.partial(fits, headroom=Estimate.headroom)
        try:
            return train(session, *estimates)
        except Interrupted as interrupted:
            step = interrupted.step
        session.say(f"debug: interrupted after step {step}; everything is rebuilt, and resumes from the checkpoint")
        session.start_anew()
        return train(session, *estimates)


@named
class Estimate(ParentTask):
    """Estimates parameters, operations, memory by kind, and the batch size that fits; needs no hardware."""

    memory_gib: Optional[float] = None
    """Memory of a card, in GiB; null: that of the cards here, as the vendor's monitor reports it."""
    headroom: float = 0.1
    """Share of the memory for what is not counted: the driver, buffers of collectives, fragmentation."""

    trains: ClassVar[bool] = True
    uses_data: ClassVar[bool] = False
    uses_hardware: ClassVar[bool] = False
    work: ClassVar[str] = "exp.estimate.write_estimate"
