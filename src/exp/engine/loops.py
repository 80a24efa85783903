"""The training and evaluation loops, in MMEngine's terms: hooks see the stages and counters that they know.

Two things differ from MMEngine's own loops. One iteration is one optimizer step, whatever the number of micro-batches,
so that schedules, logs and checkpoints count the same thing at any accumulation. And nothing reads a value from the
device: losses stay there until a hook asks, every ``log_every`` steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, cast

import torch
from mmengine.runner import BaseLoop

from exp.data.transfer import move, tensors_of
from exp.engine.finiteness import refuse_nan
from exp.engine.fsdp import is_sharded
from exp.engine.together import Together
from exp.engine.wrapper import predictions, unwrapped
from exp.heartbeat import Stage, beat

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from exp.data.sampler import TrainBatchSampler
    from exp.models.dropout import DropoutStream

__all__ = ["EvalLoop", "TrainLoop"]


class TrainLoop(BaseLoop):
    """Trains until ``max_epochs`` or ``max_steps``, or until a hook sets :attr:`stop_training`.

    Args:
        runner: the runner.
        dataloader: yields micro-batches (dicts of tensors) from its sampler's position on. The loop alone advances
            that, so prefetching workers cannot falsify it.
        max_epochs: passes over the data; None: as many as ``max_steps`` takes.
        max_steps: optimizer steps in all; None: no limit.
        accumulate: micro-batches per optimizer step.
        val_every: optimizer steps between validations; None: after each epoch.
        dropouts: where masks of dropout are drawn by sample, what they are a function of.
    """

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader[Any],
        max_epochs: int | None,
        max_steps: int | None = None,
        accumulate: int = 1,
        val_every: int | None = None,
        dropouts: DropoutStream | None = None,
    ) -> None:
        super().__init__(runner, dataloader)
        self.dropouts = dropouts
        self.sampler = cast("TrainBatchSampler", dataloader.sampler)
        self.accumulate = accumulate
        self.steps_per_epoch = self.sampler.steps_per_epoch
        self.val_every = val_every
        self._limits = max_epochs, max_steps
        self._set_length(0, 0, 0)
        self._epoch = 0
        self._iter = 0
        self._validated = 0
        self.validation_due = False
        """Whether a validation comes before any further step."""
        self.stop_training = False

    ahead: int
    """Steps that the epochs so far have with these data, less those taken: not 0 where the data were others."""
    ends_by_steps: bool
    """Whether ``max_steps`` ends the training, not ``max_epochs``."""

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    @property
    def iter(self) -> int:
        """Optimizer steps completed; within ``after_train_iter``, those before the current one, as in MMEngine."""
        return self._iter

    @property
    def max_epochs(self) -> int:
        """Epochs to train."""
        return self._max_epochs

    @property
    def max_iters(self) -> int:
        """Optimizer steps to train."""
        return self._max_iters

    @property
    def val_interval(self) -> int:
        """Epochs between validations; optimizer steps, where ``val_every`` is set."""
        return 1 if self.val_every is None else self.val_every

    @property
    def val_begin(self) -> int:
        """From the first on."""
        return 1

    @property
    def finished(self) -> bool:
        """Whether all epochs and steps have been trained."""
        return self._epoch >= self._max_epochs or self._iter >= self._max_iters

    def restore(self, epoch: int, step: int, samples: int, validation_due: bool = False) -> None:
        """Continue after ``step`` optimizer steps, ``samples`` samples (over all ranks) into ``epoch``.

        Args:
            epoch: epochs completed.
            step: optimizer steps completed.
            samples: of the epoch, over all ranks.
            validation_due: whether a validation comes first.
        """
        self._epoch, self._iter = epoch, step
        self.validation_due = validation_due
        self.sampler.set_position(epoch, samples)
        self._set_length(epoch, step, samples // self.sampler.global_batch_size)

    def _set_length(self, epoch: int, step: int, within: int) -> None:
        """How far to train from ``within`` steps into ``epoch`` on, after ``step`` steps in all.

        These are not those of as many epochs where earlier ones had another length: a run that goes on with other data.
        """
        max_epochs, max_steps = self._limits
        if max_epochs is None:
            assert max_steps is not None
            max_epochs = epoch - (step - within - max_steps) // self.steps_per_epoch
        self._max_epochs = max_epochs
        self.ahead = epoch * self.steps_per_epoch + within - step
        self._max_iters: int = max_epochs * self.steps_per_epoch - self.ahead
        self.ends_by_steps = max_steps is not None and max_steps <= self._max_iters
        if max_steps is not None:
            self._max_iters = min(self._max_iters, max_steps)

    def run(self) -> torch.nn.Module:
        """Train and validate, epoch by epoch."""
        runner = self.runner
        runner.call_hook("before_train")
        if self.validation_due:
            self._validate()
        while not self.finished and not self.stop_training:
            if self._run_epoch() and (self.val_every is None or self._iter == self._max_iters):
                self._validate()
        beat(Stage.FREE)  # what comes now, comes once
        runner.call_hook("after_train")
        model: torch.nn.Module = runner.model
        return model

    def validates_after(self, step: int, batch_idx: int) -> bool:
        """Whether a validation follows optimizer step ``step``, the one with number ``batch_idx`` of its epoch."""
        if step == self._max_iters:
            return True
        return batch_idx + 1 == self.steps_per_epoch if self.val_every is None else step % self.val_every == 0

    def _validate(self) -> None:
        if self._validated != self._iter:
            self._validated = self._iter
            self.runner.val_loop.run()
            self.runner.model.train()

    def _run_epoch(self) -> bool:
        """Train from the sampler's position to the end of the epoch; False where a hook stopped the run at once.

        An epoch that ``max_steps`` cuts short is validated like any other, but does not count as completed, so that
        a resumed run with a larger ``max_steps`` goes on in its middle.
        """
        runner = self.runner
        runner.call_hook("before_train_epoch")
        start_epoch: Any = getattr(unwrapped(runner.model), "start_epoch", None)  # a model of MMEngine's has none
        if start_epoch is not None:
            start_epoch(self._epoch)
        runner.model.train()
        batches = iter(self.dataloader)
        step = self.sampler.samples // self.sampler.global_batch_size
        while step < self.steps_per_epoch and self._iter < self._max_iters and not self.stop_training:
            self.run_iter(step, batches)
            step += 1
            if self.val_every is not None and self._iter % self.val_every == 0 and not self.stop_training:
                self._validate()
        del batches
        if self.stop_training:
            return False
        if step == self.steps_per_epoch:
            runner.call_hook("after_train_epoch")
            self._epoch += 1
            self.sampler.set_position(self._epoch, 0)
        return True

    def run_iter(self, idx: int, batches: Iterator[dict[str, torch.Tensor]]) -> None:
        """One optimizer step: ``accumulate`` micro-batches."""
        runner = self.runner
        try:
            for micro in range(self.accumulate):
                beat(Stage.DATA, self._iter + 1)
                batch = move(next(batches), runner.device)
                if micro == 0:
                    runner.call_hook("before_train_iter", batch_idx=idx, data_batch=batch)
                beat(Stage.FORWARD)
                if self.dropouts is not None:
                    self.dropouts.begin(self._iter, micro)
                outputs = runner.model.train_step(batch, optim_wrapper=runner.optim_wrapper)
                runner.losses.add(outputs)
        finally:
            if self.dropouts is not None:
                self.dropouts.end()
        self.sampler.advance()
        beat(Stage.HOOKS)
        runner.call_hook("after_train_iter", batch_idx=idx, data_batch=batch, outputs=outputs)
        self._iter += 1


class EvalLoop(BaseLoop):
    """One pass over a part of the data: every sample once over all ranks, metrics exact.

    Runs the bare module: a DDP forward may exchange buffers, and ranks may hold different numbers of batches here.

    Args:
        runner: the runner.
        dataloader: this rank's share.
        evaluator: has ``reset()``, ``update(outputs, batch)`` and ``compute(distributed) -> dict``.
        stage: ``val`` or ``test``: which hooks are called.
    """

    def __init__(self, runner: Any, dataloader: DataLoader[Any], evaluator: Any, stage: str) -> None:
        super().__init__(runner, dataloader)
        self.evaluator = evaluator
        self.stage = stage
        self.beats = Stage.VALIDATION if stage == "val" else Stage.TEST
        self._sums: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Evaluate; returns the metrics by name."""
        runner, stage = self.runner, self.stage
        if stage == "val":
            runner.prepare_validation()
        runner.call_hook(f"before_{stage}")
        runner.call_hook(f"before_{stage}_epoch")
        model = unwrapped(runner.model)
        model.eval()
        self.evaluator.reset()
        self._sums = []
        beat(self.beats, 0 if runner.train_loop is None else runner.iter)
        together = None
        if is_sharded(model):
            together = Together(model, runner.distributed_group, lambda: self._take_any(model))
        for idx, batch in enumerate(self.dataloader):
            self.run_iter(idx, batch)
        if together is not None:
            together.finish()
        beat(Stage.METRICS if stage == "val" else Stage.TEST_METRICS)
        refuse_nan(runner, self._sums, stage)
        metrics: dict[str, float] = self.evaluator.compute(runner.distributed_group)
        # What follows the test, such as pictures, takes as long as it takes.
        beat(Stage.AFTER_VALIDATION if stage == "val" else Stage.FREE)
        runner.call_hook(f"after_{stage}_epoch", metrics=metrics)
        runner.call_hook(f"after_{stage}")
        if stage == "val":
            runner.end_validation()
        return metrics

    def _take_any(self, model: torch.nn.Module) -> None:
        """Take the first sample through the model; nothing is measured."""
        beat(self.beats)
        batch = move(self.dataloader.dataset[torch.zeros(1, dtype=torch.int64)], self.runner.device)
        with self.runner.backend.autocast(self.runner.precision):
            self.runner.backend.end_batch(predictions(model, batch, self.stage))

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: dict[str, Any]) -> None:
        """Predict one batch, as the loader gives it, and have it measured."""
        runner, stage = self.runner, self.stage
        beat(self.beats)
        batch = move(data_batch, runner.device)
        runner.call_hook(f"before_{stage}_iter", batch_idx=idx, data_batch=batch)
        with runner.backend.autocast(runner.precision):
            outputs = predictions(unwrapped(runner.model), batch, stage)
        self._sums.append([value.sum() for value in tensors_of(outputs) if value.is_floating_point()])
        self.evaluator.update(outputs, batch)
        runner.backend.end_batch(outputs)
        runner.call_hook(f"after_{stage}_iter", batch_idx=idx, data_batch=batch, outputs=outputs)
