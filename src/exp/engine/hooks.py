"""Our hook on MMEngine's stages for metrics and progress."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Mapping, TextIO

from mmengine.hooks import Hook

from exp.engine.finiteness import nan_in, what_to_do
from exp.engine.left_device import LeftDevice
from exp.engine.losses import mean_over_ranks
from exp.engine.staged import staged_bytes
from exp.engine.stock_hooks import EveryStepHook
from exp.errors import RunError
from exp.runfolder import read_records, to_json

if TYPE_CHECKING:
    from pathlib import Path

    from exp.engine.progress import Progress
    from exp.hardware.backend import Backend

__all__ = ["MetricsHook", "truncate_metrics"]


class MetricsHook(Hook):
    """Reads the losses every ``log_every`` steps and hands them on: file, progress bar, MMEngine's visualiser.

    Every rank reads at the same steps, because the loss shown is the mean over ranks; rank 0 alone writes.

    Args:
        path: ``metrics.jsonl``.
        log_every: steps between readings.
        progress: draws the bar; does nothing on ranks other than 0.
        started: ``time.time()`` at which the process of this rank began.
    """

    priority = "BELOW_NORMAL"

    def __init__(self, path: Path, log_every: int, progress: Progress, started: float) -> None:
        self.path = path
        self.log_every = log_every
        self.progress = progress
        self.started = started
        self.time_to_first_step: float | None = None
        self.train_seconds = 0.0
        self.samples = 0
        self._mark = 0.0
        self._paused = 0.0
        self._steps_since_mark = 0
        self._staged = 0
        self.left_device: LeftDevice | None = None
        self._epoch_seconds = 0.0
        self._epoch_samples = 0
        self._every_step = False  # another hook tells the message hub, at every step
        self._loop: Any = None  # the runner's, without its checks at every access
        self._file: TextIO | None = None

    def before_train(self, runner: Any) -> None:
        """Show the bar, and forget what an earlier attempt wrote of steps that are trained again."""
        loop = self._loop = runner.train_loop
        begins_at = loop.iter
        runner.session.when_started(lambda: truncate_metrics(self.path, begins_at))
        self._staged = staged_bytes()
        self.left_device = LeftDevice(runner.backend)
        self._every_step = any(isinstance(hook, EveryStepHook) for hook in runner.hooks)
        first = "compiling, first step ..." if runner.session.config.compile else "first step ..."
        self.progress.start(loop.max_iters, loop.max_epochs, loop.iter, loop.steps_per_epoch, loop.ahead, first)

    def before_train_epoch(self, runner: Any) -> None:
        """Time training only, not the evaluation before it."""
        assert self.left_device is not None
        self.left_device.begin()
        self._mark = time.perf_counter()
        self._steps_since_mark = 0
        self._epoch_seconds, self._epoch_samples = 0.0, 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Count the step; read the losses when it is time."""
        self._steps_since_mark += 1
        step = self._loop.iter + 1
        if self.time_to_first_step is None:
            runner.backend.synchronize()
            self.time_to_first_step = time.time() - self.started
        if step % self.log_every == 0 or step == self._loop.max_iters:
            self._read(runner, step, data_batch)
        self.progress.step(step)

    def after_train_epoch(self, runner: Any) -> None:
        """Read what the last full interval left over."""
        if self._steps_since_mark:
            self._read(runner, runner.iter)

    def _read(self, runner: Any, step: int, batch: Any = None) -> None:
        losses, by_rank = mean_over_ranks(runner.losses.read(), runner.distributed_group)
        now = time.perf_counter()
        seconds, steps = now - self._mark, self._steps_since_mark
        assert self.left_device is not None
        left = self.left_device.read(steps)
        samples = steps * runner.train_loop.sampler.global_batch_size
        self._mark, self._steps_since_mark = now, 0
        self.train_seconds += seconds
        self.samples += samples
        self._epoch_seconds += seconds
        self._epoch_samples += samples
        for name, value in losses.items():
            if not math.isfinite(value):
                ranks = ", ".join(str(rank) for rank, own in enumerate(by_rank) if not math.isfinite(own.get(name, 0)))
                raise RunError(
                    f"{name} is {value} on rank {ranks} within the {steps} steps before step {step} (epoch "
                    f"{runner.epoch + 1}){nan_in(batch)}; {what_to_do(runner)}"
                )
        if not losses:
            return
        record: dict[str, Any] = dict(losses)
        record["lr"] = runner.optim_wrapper.learning_rate
        if runner.optim_wrapper.grad_norm is not None:
            record["grad_norm"] = float(runner.optim_wrapper.grad_norm)
        record["samples_per_second"] = samples / seconds
        if runner.distributed_group.fallback is not None:
            copied = staged_bytes()
            record["staged_bytes_per_step"] = (copied - self._staged) / steps
            self._staged = copied
        record.update(left)
        if runner.distributed_group.is_main:
            record.update(_card(runner.backend))
        self.write(runner, "train", step, record)
        # The epoch's mean: the last interval of an epoch can be a single step.
        self.progress.losses(losses, record["lr"], self._epoch_samples / self._epoch_seconds)

    def before_val_epoch(self, runner: Any) -> None:
        """A validation in mid-epoch is not training time."""
        self._paused = time.perf_counter()
        if self.left_device is not None:
            self.left_device.pause()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the validation metrics."""
        self._mark += time.perf_counter() - self._paused
        if self.left_device is not None:
            self.left_device.begin()
        units = _units(runner.val_loop)
        self.write(runner, "val", runner.iter, metrics or {}, units)
        self.progress.validated(metrics or {}, units)

    def after_test_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the test metrics."""
        units = _units(runner.test_loop)
        self.write(runner, "test", 0 if runner.train_loop is None else runner.iter, metrics or {}, units)

    def after_train(self, runner: Any) -> None:
        """Take the bar away."""
        self.progress.stop()

    def after_run(self, runner: Any) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(
        self,
        runner: Any,
        split: str,
        step: int,
        values: Mapping[str, float | None],
        units: dict[str, str] | None = None,
    ) -> None:
        """Append one line to ``metrics.jsonl`` and tell MMEngine's message hub (of training) and visualiser.

        Args:
            runner: the runner.
            split: ``train``, ``val`` or ``test``.
            step: optimizer steps completed.
            values: numbers by name; None for what is not known, which the file alone takes.
            units: what values some of them are of, where their names do not say it.
        """
        scalars = {f"{split}/{name}": value for name, value in values.items() if value is not None}
        if split == "train" and not self._every_step:
            for name, value in scalars.items():
                runner.message_hub.update_scalar(name, value)
        if runner.distributed_group.is_main:
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8", buffering=1)
            record = {"split": split, "step": step, "epoch": runner.epoch, **values}
            if units:
                record["units"] = units
            self._file.write(to_json(record) + "\n")
            runner.visualizer.add_scalars(scalars, step=step)


def _card(backend: Backend) -> dict[str, float]:
    """How full this rank's card has been, and how busy it is, as far as it tells."""
    memory = backend.usage()
    most = memory.get("max_allocated", memory.get("allocated"))
    figures = {
        "memory_gib": None if most is None else most / 2**30,
        "utilisation_percent": memory.get("utilisation_percent"),
    }
    return {name: value for name, value in figures.items() if value is not None}


def _units(loop: Any) -> dict[str, str]:
    """Units of the metrics by name; a loop of the user's own need not have an evaluator that tells them."""
    units: dict[str, str] = getattr(getattr(loop, "evaluator", None), "units", {})
    return units


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``: a resumed run trains, and writes, them again."""
    if not path.is_file():
        return
    records = read_records(path.read_bytes().splitlines())
    kept = [f"{to_json(record)}\n" for record in records if record["step"] <= step]
    path.write_text("".join(kept), encoding="utf-8")
