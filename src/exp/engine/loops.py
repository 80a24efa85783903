"""The position and the length of a training, and the evaluation of a split.

There are two differences from MMEngine's loops. One iteration is one optimizer step, not one micro-batch, so that
schedules, logs and checkpoints count the same steps with any accumulation. And a step reads no value from the device:
losses stay there until a hook reads them, every ``log_every`` steps.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Callable, cast

import torch

from exp.data.loader import tensors_of, to_device
from exp.engine.fsdp import unsharded
from exp.engine.wrapper import class_name, unwrapped
from exp.errors import (
    EXPERIMENT_PAGE,
    ConfigError,
    RunError,
    format_user_error,
    is_about_shapes,
    raised_by_user_code,
    typed_line,
    user_error_lines,
)
from exp.runs.heartbeat import Stage, report_stage

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from exp.data.loader import TrainBatchSampler
    from exp.models.dropout import DropoutStream
    from exp.session import Session


class TrainLoop:
    """Position and length of a training. It ends by ``max_epochs`` or ``max_steps``, or if a hook stops it.

    Args:
        dataloader: yields micro-batches (dicts of tensors) from the position of its sampler. Only the training loop
            moves this position, so it is correct although loader processes read ahead.
        max_epochs: passes over the data; None: as many as ``max_steps`` needs.
        max_steps: optimizer steps in all; None: no limit.
        accumulate: micro-batches per optimizer step.
        val_every: optimizer steps between validations; None: after each epoch.
        dropouts: counters of dropout masks, with ``dropout_by_sample=true``; None: torch's dropout.

    Attributes:
        epoch: epochs completed.
        iter: optimizer steps completed; within ``after_train_iter``, those before the current one, as in MMEngine.
        max_epochs: epochs to train.
        max_iters: optimizer steps to train.
        steps_per_epoch: optimizer steps in an epoch of the data.
        step_offset: number of steps that the epochs so far would have with the current data, minus the steps taken. It
            is 0, unless the run has resumed with data of another size.
        ends_by_steps: whether ``max_steps`` ends the training, not ``max_epochs``.
        validation_due: whether the training starts with a validation.
        validated: number of completed steps at the latest validation.
        stop_training: hooks set it to True to end the training.
    """

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
        self.stop_training = False
        self._limits = max_epochs, max_steps
        self.validated = 0
        self.restore(0, 0, 0)

    def restore(self, epoch: int, step: int, samples: int, validation_due: bool = False) -> None:
        """Set the position from which to train, and compute the length of the training.

        If the run has resumed with other data, earlier epochs had another length. So ``step`` need not be
        ``epoch * steps_per_epoch`` plus the steps of the current epoch.

        Args:
            epoch: epochs completed.
            step: optimizer steps completed.
            samples: samples of the current epoch that were trained, over all ranks.
            validation_due: whether to start with a validation.

        Raises:
            ConfigError: there is no such position in the data.
        """
        self.sampler.set_position(epoch, samples)
        within, (max_epochs, max_steps) = samples // self.sampler.global_batch_size, self._limits
        if max_epochs is None:
            assert max_steps is not None
            max_epochs = epoch - (step - within - max_steps) // self.steps_per_epoch
        self.epoch, self.iter, self.max_epochs, self.validation_due = epoch, step, max_epochs, validation_due
        self.step_offset = epoch * self.steps_per_epoch + within - step
        steps = max_epochs * self.steps_per_epoch - self.step_offset
        self.ends_by_steps = max_steps is not None and max_steps <= steps
        self.max_iters = steps if max_steps is None else min(steps, max_steps)

    @property
    def finished(self) -> bool:
        """Whether all epochs and steps have been trained."""
        return self.epoch >= self.max_epochs or self.iter >= self.max_iters

    def validates_after(self, step: int, batch_idx: int) -> bool:
        """Whether a validation follows an optimizer step.

        Args:
            step: number of the step in the training, from 1.
            batch_idx: index of the step in its epoch, from 0.
        """
        if step == self.max_iters:
            return True
        return batch_idx + 1 == self.steps_per_epoch if self.val_every is None else step % self.val_every == 0


class EvalLoop:
    """Evaluates a split: every sample exactly once over all ranks, so that metrics are exact.

    Uses the model without its wrapper. The forward pass of DDP may be a collective, and ranks may have different
    numbers of batches.

    Args:
        session: has device, backend, precision and process group.
        model: on the device, wrapped or not; is left in eval mode.
        dataloader: loads this rank's share of the split.
        evaluator: has ``reset()``, ``update(outputs, batch)`` and ``compute(distributed) -> dict``.
        stage: ``val`` or ``test``: which hooks are called.
        transform: see :func:`exp.engine.evaluate.measure`; None: batches are not changed.
        on_batch: called with the predictions for each batch, and the batch; None: nothing is called.
    """

    runner: Any = None
    """The :class:`exp.engine.trainer.Trainer` whose hooks are called; None: no hooks."""

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        dataloader: DataLoader[Any],
        evaluator: Any,
        stage: str,
        transform: Callable[[dict[str, Any], torch.Tensor], dict[str, Any]] | None = None,
        on_batch: Callable[[Any, dict[str, Any]], object] | None = None,
    ) -> None:
        self.session, self.model, self.dataloader, self.evaluator = session, unwrapped(model), dataloader, evaluator
        self.stage, self.transform, self.on_batch = stage, transform, on_batch
        self._heartbeat = Stage.VALIDATION if stage == "val" else Stage.TEST
        self._sums: list[tuple[int, torch.Tensor]] = []

    def run(self) -> dict[str, float]:
        """Evaluate, and call the hooks; returns the metrics by name. A collective."""
        runner, stage, validates = self.runner, self.stage, self.stage == "val"
        if validates:
            runner.average_buffers()
            runner.call_hook("before_validation")  # not in MMEngine; called before a hook can replace the weights
        runner.call_hook(f"before_{stage}")
        self.session.start_run()  # a collective, so before the first batch: ranks may have different numbers of batches
        runner.call_hook(f"before_{stage}_epoch")
        report_stage(self._heartbeat, runner.iter)
        metrics = self.measure()
        # No time limit for what follows the test, such as pictures.
        report_stage(Stage.AFTER_VALIDATION if validates else Stage.FREE)
        runner.call_hook(f"after_{stage}_epoch", metrics=metrics)
        runner.call_hook(f"after_{stage}")
        return metrics

    def measure(self) -> dict[str, float]:
        """Evaluate, with the hooks of batches only; returns the metrics by name. A collective.

        Raises:
            RunError: predictions are NaN.
        """
        self.model.eval()
        self.evaluator.reset()
        self._sums = []
        numbers = iter(self.dataloader.sampler)
        with unsharded(self.model):
            for index, batch in enumerate(self.dataloader):
                self.run_iter(index, batch, next(numbers) if self.transform is not None else None)
        report_stage(Stage.METRICS if self.stage == "val" else Stage.TEST_METRICS)
        self._refuse_nan()
        metrics: dict[str, float] = self.evaluator.compute(self.session.distributed)
        return metrics

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: dict[str, Any], numbers: torch.Tensor | None = None) -> None:
        """Predict one batch, and add it to the metrics.

        Args:
            idx: index of the batch on this rank.
            data_batch: the batch as the loader yields it.
            numbers: indices of its samples in the split, int64 (B,) on the CPU; used only with ``change``.
        """
        runner, stage, session = self.runner, self.stage, self.session
        report_stage(self._heartbeat)
        batch = to_device(data_batch, session.device)
        if runner is not None:
            runner.call_hook(f"before_{stage}_iter", batch_idx=idx, data_batch=batch)
        if self.transform is not None and numbers is not None:
            batch = self.transform(batch, numbers)
        with session.backend.autocast(session.config.precision):
            outputs = self._predict(batch)
        self._sums += [(idx, value.sum()) for value in tensors_of(outputs) if value.is_floating_point()]
        self._measure(outputs, batch)
        session.backend.end_batch(outputs)
        if self.on_batch is not None:
            self.on_batch(outputs, batch)
        if runner is not None:
            runner.call_hook(f"after_{stage}_iter", batch_idx=idx, data_batch=batch, outputs=outputs)

    def _predict(self, batch: dict[str, Any]) -> Any:
        try:
            return getattr(self.model, f"{self.stage}_step")(batch)
        except TypeError as error:
            if not re.search(r"\bforward\(\) .*argument", str(error)) or format_user_error(error) is not None:
                raise
            # Python's text, as for a wrong call, which does not say who calls, and with what.
            raise ConfigError(
                f"model: {error}; {class_name(self.model)}.forward is called with mode ('loss', 'predict' or "
                f"'tensor') and the keys of the batch, {', '.join(batch)}: declare mode='tensor' and the keys that it "
                f"needs, and accept the others as **_; see {EXPERIMENT_PAGE}"
            ) from error

    def _measure(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Add a batch to the metrics; if its shape does not fit, name the model, to whose outputs that is due."""
        mismatch = self.evaluator.shape_error(outputs, batch)
        try:
            if mismatch is None:
                self.evaluator.update(outputs, batch)
        except Exception as error:  # a metric may raise anything
            if not (is_about_shapes(error) and raised_by_user_code(error)) or not isinstance(outputs, torch.Tensor):
                raise
            targets = ", ".join(
                f"{key} {tuple(value.shape)}" for key, value in batch.items() if hasattr(value, "shape")
            )
            cause = (user_error_lines(error) or [typed_line(error)])[0]
            mismatch = f"returns shape {tuple(outputs.shape)} for a batch with {targets}; {cause}"
        if mismatch is not None:
            raise ConfigError(
                f"model: {class_name(self.model)}.forward(..., mode='predict') {mismatch}; see {EXPERIMENT_PAGE}"
            )

    def _refuse_nan(self) -> None:
        """Refuse predictions that are NaN. A collective; waits for the device once.

        A metric may hide NaN: argmax returns the first class, and means leave out samples without a value. The sum of a
        tensor is NaN if an element is. An element of -inf, as for a masked class, does not make the sum NaN.

        Raises:
            RunError: predictions are NaN; the message has the first such batch. Raised on every rank.
        """
        sums, device = self._sums, self.session.device
        values = torch.stack([value.float().to(device) for _, value in sums]).cpu().tolist() if sums else []
        wrong = [batch for (batch, _), value in zip(sums, values) if math.isnan(value)]
        by_rank = self.session.distributed.gather(wrong)
        rank = next((rank for rank, batches in enumerate(by_rank) if batches), None)
        if rank is not None:
            split = "validation" if self.stage == "val" else "test"
            advice = ("check the weights and the data, or use precision=fp32",)
            raise RunError(
                f"predictions are NaN in the {split} split, first in batch {by_rank[rank][0] + 1} of rank {rank}",
                *(advice if self.runner is None else self.runner.divergence_advice()),
                rank=rank,
            )
