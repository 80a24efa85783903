"""Ends a training on preemption: all ranks agree on the step after which they save and end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from mmengine.hooks import Hook

from exp.engine.checkpoint.policy import CheckpointHook
from exp.errors import Preempted

if TYPE_CHECKING:
    from torch.distributed import Store

    from exp.distributed import Distributed
    from exp.session import RankInfo

_POLL_S = 1.0  # seconds between two looks for a preemption


class PreemptionHook(Hook):
    """Ends training when the preemption flag is set, with a checkpoint from which it resumes exactly.

    It can end between two steps, and between two batches of a validation; then the checkpoint says that the validation
    must be done again.

    All ranks end at the same point, within about a second and a step. A thread of each rank looks for the flags of all
    once a second. When it finds one, it publishes the next point that its rank reaches, and the rank waits there until
    all have published theirs. The latest is where all end: every rank passes the same points in the same order, and
    none has passed this one. No rank is late, because a thread answers also while its rank is in a long step, or in a
    collective operation with a rank that waits.

    Args:
        info: has the notice of preemption.
        distributed: collectives of the ranks.
        store: of the ranks; None if there is only one.
        checkpoints: writes the checkpoint.
    """

    priority = "LOWEST"  # after all hooks whose state is in a checkpoint

    def __init__(
        self, info: RankInfo, distributed: Distributed, store: Store | None, checkpoints: CheckpointHook
    ) -> None:
        self.preempted, self.distributed = info.preempted, distributed
        self.store: Any = store and dist.PrefixStore("preemption", store)
        # The ranks of one node share their flag, a file; a file store, which they have then, would grow when asked.
        self._asks_others = info.store is None
        self.checkpoints = checkpoints
        self._common_batches = 0  # of a validation: number of batches that every rank has
        self._lock, self._agreed, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._noticed, self._points, self._end = False, 0, 0

    def before_train(self, runner: Any) -> None:
        """Start the thread, if there are several ranks."""
        if self.distributed.world_size > 1:
            threading.Thread(target=self._watch, name="preemption", daemon=True).start()

    def after_train(self, runner: Any) -> None:
        """Wait until all ranks have passed their last point, and end the thread."""
        self.distributed.barrier()
        self._over.set()

    def _watch(self) -> None:
        """Wait for the flag of any rank, then agree on the point at which all end."""
        try:
            while not self._is_asked():
                if self._over.wait(_POLL_S):
                    return
            with self._lock:
                self._noticed, first = True, self._points + 1
            self.store.add(f"first/{self.distributed.rank}", first)
            if self.distributed.is_main:
                firsts = [self._read(f"first/{rank}") for rank in range(self.distributed.world_size)]
                self.store.add("end", max(firsts))
            self._end = self._read("end")
        except (RuntimeError, OSError):  # the store is gone, and its rank with it: the next collective operation fails
            pass
        finally:
            self._agreed.set()

    def _is_asked(self) -> bool:
        """Whether the flag of any rank is set."""
        if self.preempted():
            self.store.add("asked", 1)
            return True
        return self._asks_others and bool(self.store.add("asked", 0))

    def _read(self, key: str) -> int:
        """A number that another rank writes; 0 if the training is over before."""
        while True:
            value = int(self.store.add(key, 0))
            if value or self._over.wait(0.02):
                return value

    def _preemption_agreed(self) -> bool:
        """Whether to end at this point; called by every rank at the same points."""
        if self.distributed.world_size == 1:
            return self.preempted()
        with self._lock:
            self._points += 1
            noticed, point = self._noticed, self._points
        if noticed:
            self._agreed.wait()
        return noticed and point == self._end

    def _check(self, runner: Any, step: int, validation_due: bool = False) -> None:
        """End here if wanted, with a checkpoint; called by every rank at the same points."""
        if self._preemption_agreed():
            self.checkpoints.save(runner, step, validation_due=validation_due, wait=True)
            raise Preempted(step)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """End after this step if wanted; if a validation follows, :meth:`before_validation` decides instead."""
        if not runner.train_loop.validates_after(runner.iter + 1, batch_idx):
            self._check(runner, runner.iter + 1)

    def before_validation(self, runner: Any) -> None:
        """End before a validation if wanted, before hooks replace the weights for it, such as by averaged ones."""
        # While a hook has replaced the weights, no checkpoint can be written, so do not check during this validation.
        others = runner.user_hooks_overriding("before_val", "before_val_epoch", "before_val_iter")
        self._common_batches = 0 if others else runner.val_loop.dataloader.sampler.common_batches
        self._check(runner, runner.iter, validation_due=True)

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """End before a batch of the validation if wanted, but only at batches that every rank has."""
        if batch_idx < self._common_batches:
            self._check(runner, runner.iter, validation_due=True)
