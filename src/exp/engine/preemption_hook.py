"""Saving and ending when the scheduler wants the machine back: all ranks agree where, so that none is a step ahead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from mmengine.hooks import Hook

from exp.errors import Preempted

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.engine.saving import CheckpointHook
    from exp.runs.status import PreemptionFlag
    from exp.session import Session

__all__ = ["Agreement", "Interrupted", "PreemptionHook"]

_EVERY_S = 1.0


class Interrupted(Preempted):
    """``debug.restart_after`` has been reached, and the state is saved."""


class Agreement:
    """Tells all ranks at one and the same point that one of them is to end.

    Asking costs a collective operation, so ranks ask about once a second, however short a step is. How many points
    that is they work out from the time that all of them took together, which makes it the same number everywhere.

    Args:
        preemption_flag: of this node.
        distributed: collectives.
    """

    def __init__(self, preemption_flag: PreemptionFlag, distributed: Distributed) -> None:
        self.preemption_flag = preemption_flag
        self.distributed = distributed
        self._alone = distributed.world_size == 1
        self.begin()

    def begin(self) -> None:
        """A phase with steps of another length begins: ask at its first point."""
        self._interval = self._left = 1
        self._asked = time.monotonic()

    def reached(self) -> bool:
        """Called by every rank at the same points; whether to end here."""
        if self._alone:
            return self.preemption_flag.is_set()
        self._left -= 1
        if self._left:
            return False
        now = time.monotonic()
        # Whole milliseconds: their sum is the same on every rank to the last bit.
        wanted, milliseconds = self.distributed.sum(
            torch.tensor([int(self.preemption_flag.is_set()), int((now - self._asked) * 1000)])
        ).tolist()
        self._asked = now
        mean_s = max(milliseconds, 1) / 1000 / self.distributed.world_size
        fitting = int(self._interval * _EVERY_S / mean_s)
        self._interval = self._left = max(1, min(fitting, 2 * self._interval))
        return bool(wanted)


class PreemptionHook(Hook):
    """Ends training when it is preempted, with a checkpoint from which it continues exactly.

    Between two steps, and between two batches of a validation: there the checkpoint says that the validation is still
    to be made. With ``debug.restart_after`` also after that step.

    Args:
        session: has the flag, and the group whose ranks agree.
        checkpoints: writes the checkpoint.
    """

    priority = "LOWEST"  # after everything that a checkpoint holds has its new state

    def __init__(self, session: Session, checkpoints: CheckpointHook) -> None:
        self.agreement = Agreement(session.info.preemption_flag, session.distributed)
        self.checkpoints = checkpoints
        self._restart_after = None if session.restarted_here else session.config.debug.restart_after
        self._common_batches = 0

    def before_train_epoch(self, runner: Any) -> None:
        """Steps begin."""
        self.agreement.begin()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Between two steps; if a validation follows, its beginning is the place."""
        step = runner.iter + 1
        if runner.train_loop.validates_after(step, batch_idx):
            return
        if step == self._restart_after:
            self._end(runner, Interrupted(step))
        if self.agreement.reached():
            self._end(runner, Preempted(step))

    def before_val_epoch(self, runner: Any) -> None:
        """Batches of another length begin, and ranks may have different numbers of them."""
        if runner.iter == self._restart_after:
            self._end(runner, Interrupted(runner.iter), validation_due=True)
        self._begin_evaluation(runner.val_loop)

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before a batch of the validation."""
        if batch_idx < self._common_batches and self.agreement.reached():
            self._end(runner, Preempted(runner.iter), validation_due=True)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Steps continue if the validation was within an epoch."""
        self.agreement.begin()

    def before_test_epoch(self, runner: Any) -> None:
        """As for the validation."""
        self._begin_evaluation(runner.test_loop)

    def before_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before a batch of the test; the end of the training has been saved."""
        if batch_idx < self._common_batches and self.agreement.reached():
            raise Preempted(runner.iter)

    def _begin_evaluation(self, loop: Any) -> None:
        self.agreement.begin()
        self._common_batches = loop.dataloader.sampler.common_batches

    def _end(self, runner: Any, reason: Preempted, validation_due: bool = False) -> None:
        self.checkpoints.save(runner, reason.step, validation_due=validation_due, waits=True)
        if isinstance(reason, Interrupted):
            runner.visualizer.close()
        raise reason
