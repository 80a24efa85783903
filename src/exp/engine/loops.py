"""The training and evaluation loops, in MMEngine's terms: hooks see the stages and counters that they know.

Two things differ from MMEngine's own loops. One iteration is one optimizer step, whatever the number of micro-batches,
so that schedules, logs and checkpoints count the same thing at any accumulation. And nothing reads a value from the
device: losses stay there until a hook asks, every ``log_every`` steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, cast

import torch

from exp.data.transfer import move, tensors_of
from exp.engine.finiteness import refuse_nan
from exp.engine.fsdp import UnevenPasses, is_sharded
from exp.engine.wrapper import predictions, unwrapped
from exp.runs.status import Stage, beat

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from exp.data.sampler import TrainBatchSampler
    from exp.models.dropout import DropoutStream

__all__ = ["EvalLoop", "TrainLoop"]


class TrainLoop:
    """Trains until ``max_epochs`` or ``max_steps``, or until a hook sets :attr:`stop_training`.

    Args:
        dataloader: yields micro-batches (dicts of tensors) from its sampler's position on. The loop alone advances
            that, so prefetching workers cannot falsify it.
        max_epochs: passes over the data; None: as many as ``max_steps`` takes.
        max_steps: optimizer steps in all; None: no limit.
        accumulate: micro-batches per optimizer step.
        val_every: optimizer steps between validations; None: after each epoch.
        dropouts: where masks of dropout are drawn by sample, what they are a function of.

    Attributes:
        runner: the :class:`exp.engine.trainer.Trainer`, which sets it.
        epoch: epochs completed.
        iter: optimizer steps completed; within ``after_train_iter``, those before the current one, as in MMEngine.
        max_epochs: epochs to train.
        max_iters: optimizer steps to train.
        steps_per_epoch: optimizer steps in an epoch of the data.
        ahead: steps that the epochs so far have with these data, minus those taken: not 0 if the data were others.
        ends_by_steps: whether ``max_steps`` ends the training, not ``max_epochs``.
        validation_due: whether a validation comes before any further step.
        stop_training: set by hooks: no further step.
    """

    runner: Any
    val_begin = 1

    def __init__(
        self,
        dataloader: DataLoader[Any],
        max_epochs: int | None,
        max_steps: int | None = None,
        accumulate: int = 1,
        val_every: int | None = None,
        dropouts: DropoutStream | None = None,
    ) -> None:
        self.dataloader = dataloader
        self.sampler = cast("TrainBatchSampler", dataloader.sampler)
        self.accumulate = accumulate
        self.val_every = val_every
        self.val_interval = val_every or 1
        self.dropouts = dropouts
        self.steps_per_epoch = self.sampler.steps_per_epoch
        self.validation_due = self.stop_training = False
        self._limits = max_epochs, max_steps
        self._validated = 0
        self._set_position(0, 0, 0)

    def restore(self, epoch: int, step: int, samples: int, validation_due: bool = False) -> None:
        """Continue after ``step`` optimizer steps, ``samples`` samples (over all ranks) into ``epoch``.

        Args:
            epoch: epochs completed.
            step: optimizer steps completed.
            samples: of the epoch, over all ranks.
            validation_due: whether a validation comes first.
        """
        self.validation_due = validation_due
        self.sampler.set_position(epoch, samples)
        self._set_position(epoch, step, samples // self.sampler.global_batch_size)

    def _set_position(self, epoch: int, step: int, within: int) -> None:
        """Continue ``within`` steps into ``epoch``, after ``step`` steps in all.

        If a run continues with other data, its earlier epochs had another length: steps are not epochs times length.
        """
        max_epochs, max_steps = self._limits
        if max_epochs is None:
            assert max_steps is not None
            max_epochs = epoch - (step - within - max_steps) // self.steps_per_epoch
        self.epoch, self.iter, self.max_epochs = epoch, step, max_epochs
        self.ahead = epoch * self.steps_per_epoch + within - step
        steps = max_epochs * self.steps_per_epoch - self.ahead
        self.ends_by_steps = max_steps is not None and max_steps <= steps
        self.max_iters = steps if max_steps is None else min(steps, max_steps)

    @property
    def finished(self) -> bool:
        """Whether all epochs and steps have been trained."""
        return self.epoch >= self.max_epochs or self.iter >= self.max_iters

    def run(self) -> None:
        """Train and validate, epoch by epoch.

        An epoch that ``max_steps`` cuts short is validated like any other, but does not count as completed, so that
        a resumed run with a larger ``max_steps`` continues in its middle.
        """
        runner = self.runner
        runner.call_hook("before_train")
        if self.validation_due:
            self._validate()
        start_epoch: Any = getattr(unwrapped(runner.model), "start_epoch", None)  # MMEngine's models have none
        while not self.finished and not self.stop_training:
            runner.call_hook("before_train_epoch")
            if start_epoch is not None:
                start_epoch(self.epoch)
            runner.model.train()
            batches = iter(self.dataloader)
            index = self.sampler.samples // self.sampler.global_batch_size
            while index < self.steps_per_epoch and self.iter < self.max_iters and not self.stop_training:
                self.run_iter(index, batches)
                index += 1
                if self.val_every is not None and self.iter % self.val_every == 0 and not self.stop_training:
                    self._validate()
            del batches
            if self.stop_training:
                break
            if index == self.steps_per_epoch:
                runner.call_hook("after_train_epoch")
                self.epoch += 1
                self.sampler.set_position(self.epoch, 0)
            if self.val_every is None or self.iter == self.max_iters:
                self._validate()
        beat(Stage.FREE)  # what comes now, comes once
        runner.session.begin()  # if there was no step left
        runner.call_hook("after_train")

    def run_iter(self, idx: int, batches: Iterator[dict[str, torch.Tensor]]) -> None:
        """One optimizer step: ``accumulate`` micro-batches."""
        runner = self.runner
        try:
            for micro in range(self.accumulate):
                beat(Stage.DATA, self.iter + 1)
                batch = move(next(batches), runner.device)
                if micro == 0:
                    runner.call_hook("before_train_iter", batch_idx=idx, data_batch=batch)
                beat(Stage.FORWARD)
                if self.dropouts is not None:
                    self.dropouts.begin(self.iter, micro)
                outputs = runner.model.train_step(batch, optim_wrapper=runner.optim_wrapper)
                runner.losses.add(outputs)
        finally:
            if self.dropouts is not None:
                self.dropouts.end()
        self.sampler.advance()
        beat(Stage.HOOKS)
        if not runner.session.begun:  # the memory that a step needs is there
            runner.session.begin()
        runner.call_hook("after_train_iter", batch_idx=idx, data_batch=batch, outputs=outputs)
        self.iter += 1

    def validates_after(self, step: int, batch_idx: int) -> bool:
        """Whether a validation follows optimizer step ``step``, the one with number ``batch_idx`` of its epoch."""
        if step == self.max_iters:
            return True
        return batch_idx + 1 == self.steps_per_epoch if self.val_every is None else step % self.val_every == 0

    def _validate(self) -> None:
        if self._validated != self.iter and self.runner.val_loop is not None:
            self._validated = self.iter
            self.runner.val_loop.run()
            self.runner.model.train()


class EvalLoop:
    """One pass over a split: every sample once over all ranks, metrics exact.

    Runs the bare module: a DDP forward may exchange buffers, and ranks may have different numbers of batches here.

    Args:
        dataloader: this rank's share.
        evaluator: has ``reset()``, ``update(outputs, batch)`` and ``compute(distributed) -> dict``.
        stage: ``val`` or ``test``: which hooks are called.
    """

    runner: Any

    def __init__(self, dataloader: DataLoader[Any], evaluator: Any, stage: str) -> None:
        self.dataloader = dataloader
        self.evaluator = evaluator
        self.stage = stage
        self._heartbeat = Stage.VALIDATION if stage == "val" else Stage.TEST
        self._sums: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Evaluate; returns the metrics by name."""
        runner, stage, validates = self.runner, self.stage, self.stage == "val"
        if validates:
            runner.prepare_validation()
        runner.call_hook(f"before_{stage}")
        runner.session.begin()  # before the first batch: ranks may have different numbers of them
        runner.call_hook(f"before_{stage}_epoch")
        model = unwrapped(runner.model)
        model.eval()
        self.evaluator.reset()
        self._sums = []
        beat(self._heartbeat, runner.iter)
        uneven = None
        if is_sharded(model):
            uneven = UnevenPasses(model, runner.distributed_group, lambda: self._predict_first_sample(model))
        for idx, batch in enumerate(self.dataloader):
            self.run_iter(idx, batch)
        if uneven is not None:
            uneven.finish()
        beat(Stage.METRICS if validates else Stage.TEST_METRICS)
        refuse_nan(runner, self._sums, stage)
        metrics: dict[str, float] = self.evaluator.compute(runner.distributed_group)
        # What follows the test, such as pictures, takes as long as it takes.
        beat(Stage.AFTER_VALIDATION if validates else Stage.FREE)
        runner.call_hook(f"after_{stage}_epoch", metrics=metrics)
        runner.call_hook(f"after_{stage}")
        if validates:
            runner.end_validation()
        return metrics

    def _predict_first_sample(self, model: torch.nn.Module) -> None:
        beat(self._heartbeat)
        batch = move(self.dataloader.dataset[torch.zeros(1, dtype=torch.int64)], self.runner.device)
        with self.runner.backend.autocast(self.runner.precision):
            self.runner.backend.end_batch(predictions(model, batch, self.stage))

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: dict[str, Any]) -> None:
        """Predict one batch, as the loader gives it, and have it measured."""
        runner, stage = self.runner, self.stage
        beat(self._heartbeat)
        batch = move(data_batch, runner.device)
        runner.call_hook(f"before_{stage}_iter", batch_idx=idx, data_batch=batch)
        with runner.backend.autocast(runner.precision):
            outputs = predictions(unwrapped(runner.model), batch, stage)
        self._sums.append([value.sum() for value in tensors_of(outputs) if value.is_floating_point()])
        self.evaluator.update(outputs, batch)
        runner.backend.end_batch(outputs)
        runner.call_hook(f"after_{stage}_iter", batch_idx=idx, data_batch=batch, outputs=outputs)
