"""Sanity check of a user's loss: whether it depends on how a batch is split over micro-batches and ranks.

A mean over samples does not. Other losses do: a mean over a number that varies (masked or weighted elements), a loss
that compares samples (contrastive), batch norm, and dropout that a global generator draws. Trainings with them are
valid, but have other losses with other values of ``nproc`` and ``accumulate``.
"""

from __future__ import annotations

import copy
import logging
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from mmengine.hooks import Hook
from torch import nn

from exp.data.fingerprint import shortened
from exp.distributed import rng_state, seed_everything, set_rng_state
from exp.engine.optim import BackwardOnly
from exp.engine.wrapper import class_name, is_sharded, unwrapped
from exp.errors import first_line
from exp.models.dropout import uses_global_rng
from exp.runs.heartbeat import Stage, report_stage

if TYPE_CHECKING:
    from exp.session import Session

logger = logging.getLogger(__name__)

_MOST_SAMPLES = 32
_TOLERANCE = 1e-3
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SplitCheck(Hook):
    """Runs the first batch of a training whole and as two micro-batches, and warns if loss or gradients differ.

    It uses a copy of the model and restores the random generators, so that the training does not change. A batch of
    one sample and a sharded model are not checked.

    Args:
        session: takes the warning.
    """

    priority = "LOWEST"

    def __init__(self, session: Session) -> None:
        self.session, self._is_due = session, True

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Check the first batch of a new training. A collective."""
        if not self._is_due:
            return
        self._is_due = False
        model, sampler = unwrapped(runner.model), runner.train_loop.sampler
        if runner.iter or max(sampler.parts) == 1 or is_sharded(model):
            return
        report_stage(Stage.FREE)  # no time limit
        runner.metrics_hook.pause()
        state, warning = rng_state(runner.backend), None
        try:
            if sampler.batch_size > 1:
                warning = _Comparison(runner, copy.deepcopy(model), data_batch, sampler.batch_size).warning()
        except Exception as error:  # noqa: BLE001 - user code may raise anything; in the training it will be reported
            logger.info("not checked whether the loss depends on the split of a batch: %s", first_line(error))
        finally:
            if runner.train_loop.dropouts is not None:
                runner.train_loop.dropouts.end()
            set_rng_state(state, runner.backend)
            runner.metrics_hook.resume()
        warnings = [value for value in runner.distributed_group.gather(warning) if value is not None]
        self.session.warn(*warnings[:1])


class _Comparison:
    """Losses and gradients of a batch: whole, and as the mean of two parts.

    Args:
        runner: the trainer.
        model: a copy of its model.
        batch: a batch on the device.
        size: number of its samples.
    """

    def __init__(self, runner: Any, model: nn.Module, batch: Any, size: int) -> None:
        self.runner, self.model, self.batch, self.size = runner, model, batch, size
        self.used = min(size, _MOST_SAMPLES)
        self.draws = False  # whether the last run has drawn random numbers

    def warning(self) -> str | None:
        """The warning for the user; None: there is no difference."""
        differs, named = self.difference(), dict(self.model.named_modules())
        if differs is None:
            return None
        causes, draws = [], self.draws
        norms = [name for name, module in named.items() if isinstance(module, _BATCH_NORMS) and module.training]
        drawing = [name for name, module in named.items() if uses_global_rng(module)]
        for name in (*norms, *drawing):
            named[name].eval()
        if draws:
            where = f" ({shortened(drawing, 3)})" if drawing else ""
            causes.append(f"dropout or other random numbers that a global generator draws{where}")
        if norms:
            causes.append(f"batch norm ({shortened(norms, 3)}), which computes statistics of each micro-batch")
        if not (draws or norms) or (self.difference() is not None and not self.draws):
            causes.append(
                "a mean over a number that varies (masked or weighted elements), or a loss that compares samples; "
                "divide by the number of samples, or declare it with loss_is_mean = False"
            )
        return (
            f"the loss of {class_name(self.model)} depends on how a batch is split, so it differs with nproc and "
            f"accumulate (a batch of {self.used}, whole and as two micro-batches: by {differs:.2g} of its value or "
            f"gradients): {'; and '.join(causes)}"
        )

    def difference(self) -> float | None:
        """Largest relative difference of loss and gradients; None: they are equal up to rounding, or not finite."""
        used = self.used
        loss, gradients = self.run(0, used)
        # Unequal parts follow, since halves may have equally many masked elements by chance.
        for cut in dict.fromkeys((used // 2, used // 4, used // 3, used * 3 // 4)):
            if cut:
                other, others = self.run(0, cut, used)
                distance = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(gradients, others)))
                length = math.sqrt(sum(float(value.square().sum()) for value in gradients))
                parts = (abs(loss - other), max(abs(loss), abs(other))), (distance, length)
                largest = max(difference / scale if scale else 0.0 for difference, scale in parts)
                if largest > _TOLERANCE and math.isfinite(largest):
                    return largest
        return None

    def run(self, *bounds: int) -> tuple[float, list[torch.Tensor]]:
        """Mean loss of the samples between these bounds, each range by itself, and the gradients on the CPU."""
        backend, dropouts = self.runner.backend, self.runner.train_loop.dropouts
        # In float32, without autocast, since that shows smaller differences.
        optimizer = BackwardOnly(backward_context=nullcontext if dropouts is None else dropouts.during_backward)
        step: Any = self.model.train_step
        self.model.zero_grad(set_to_none=True)
        self.draws = False
        for seed, (first, end) in enumerate(zip(bounds, bounds[1:])):
            seed_everything(seed, backend)  # as on several ranks, each range draws other numbers
            before = _as_text(rng_state(backend))
            if dropouts is not None:
                dropouts.begin(self.runner.iter, 0, first, end - first)
            optimizer.share = (end - first) / self.used
            step(_rows(self.batch, first, end, self.size), optim_wrapper=optimizer)
            self.draws = self.draws or _as_text(rng_state(backend)) != before
        if not optimizer.losses:
            raise RuntimeError("train_step computes the gradients without the optimizer wrapper")
        gradients = (value.grad for value in self.model.parameters())
        return sum(map(float, optimizer.losses)), [
            torch.zeros(()) if value is None else value.detach().float().cpu() for value in gradients
        ]


def _as_text(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _rows(value: Any, first: int, end: int, size: int) -> Any:
    """The samples ``first`` to ``end`` of a batch of ``size``; what has no axis of samples is returned as it is."""
    if isinstance(value, torch.Tensor):
        return value[first:end] if value.dim() and value.shape[0] == size else value
    if isinstance(value, dict):
        return {key: _rows(part, first, end, size) for key, part in value.items()}
    if isinstance(value, list) and len(value) == size:
        return value[first:end]
    return [_rows(part, first, end, size) for part in value] if isinstance(value, list) else value
