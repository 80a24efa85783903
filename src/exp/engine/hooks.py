"""Our hooks on MMEngine's stages: metrics, progress, best model, early stopping and checkpoints."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any, TextIO

from mmengine.hooks import Hook

from exp.engine import checkpoint
from exp.engine.staged import staged_bytes
from exp.errors import RunError
from exp.runfolder import to_json

if TYPE_CHECKING:
    from pathlib import Path

    from exp.engine.progress import Progress

__all__ = ["CheckpointHook", "MetricsHook", "truncate_metrics"]


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
        self._epoch_seconds = 0.0
        self._epoch_samples = 0
        self._loop: Any = None  # the runner's, without its checks at every access
        self._file: TextIO | None = None

    def before_train(self, runner: Any) -> None:
        """Show the bar."""
        loop = self._loop = runner.train_loop
        self._staged = staged_bytes()
        self.progress.start(loop.max_iters, loop.max_epochs, loop.iter, loop.steps_per_epoch)

    def before_train_epoch(self, runner: Any) -> None:
        """Time training only, not the evaluation before it."""
        self._mark = time.perf_counter()
        self._steps_since_mark = 0
        self._epoch_seconds, self._epoch_samples = 0.0, 0
        runner.message_hub.update_info_dict(
            {"epoch": runner.epoch, "max_epochs": runner.max_epochs, "max_iters": runner.max_iters}
        )

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Count the step; read the losses when it is time."""
        self._steps_since_mark += 1
        step = self._loop.iter + 1
        if self.time_to_first_step is None:
            runner.backend.synchronize()
            self.time_to_first_step = time.time() - self.started
        if step % self.log_every == 0 or step == self._loop.max_iters:
            self._read(runner, step)
        self.progress.step(step)

    def after_train_epoch(self, runner: Any) -> None:
        """Read what the last full interval left over."""
        if self._steps_since_mark:
            self._read(runner, runner.iter)

    def _read(self, runner: Any, step: int) -> None:
        own = runner.losses.read()
        losses = {name: runner.distributed_group.mean(value) for name, value in own.items()}
        now = time.perf_counter()
        seconds, steps = now - self._mark, self._steps_since_mark
        samples = steps * runner.train_loop.sampler.global_batch_size
        self._mark, self._steps_since_mark = now, 0
        self.train_seconds += seconds
        self.samples += samples
        self._epoch_seconds += seconds
        self._epoch_samples += samples
        for name, value in losses.items():
            if not math.isfinite(value):
                by_rank = enumerate(runner.distributed_group.gather(own[name]))
                ranks = ", ".join(str(rank) for rank, mine in by_rank if not math.isfinite(mine))
                raise RunError(
                    f"{name} is {value} on rank {ranks} within the {steps} steps before step {step} (epoch "
                    f"{runner.epoch + 1}); lower optim.lr, set optim.clip_grad_norm, or use precision=fp32"
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
        self.write(runner, "train", step, record)
        # The epoch's mean: the last interval of an epoch can be a single step.
        self.progress.losses(losses, record["lr"], self._epoch_samples / self._epoch_seconds)

    def before_val_epoch(self, runner: Any) -> None:
        """A validation in mid-epoch is not training time."""
        self._paused = time.perf_counter()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the validation metrics."""
        self._mark += time.perf_counter() - self._paused
        self.write(runner, "val", runner.iter, metrics or {})
        self.progress.validated(metrics or {})

    def after_test_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the test metrics."""
        self.write(runner, "test", 0 if runner.train_loop is None else runner.iter, metrics or {})

    def after_train(self, runner: Any) -> None:
        """Take the bar away."""
        self.progress.stop()

    def after_run(self, runner: Any) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, runner: Any, split: str, step: int, values: dict[str, float]) -> None:
        """Append one line to ``metrics.jsonl`` and tell MMEngine's message hub and visualiser."""
        scalars = {f"{split}/{name}": value for name, value in values.items()}
        runner.message_hub.update_info("iter", step)
        for name, value in scalars.items():
            runner.message_hub.update_scalar(name, value)
        if runner.distributed_group.is_main:
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8", buffering=1)
            self._file.write(to_json({"split": split, "step": step, "epoch": runner.epoch, **values}) + "\n")
            if runner.visualizer._vis_backends:
                runner.visualizer.add_scalars(scalars, step=step)


class CheckpointHook(Hook):
    """Keeps the best and the newest checkpoints, and stops a run that no longer gets better.

    Best and early stopping live here together, because both are part of what a resumed run must know.

    Args:
        folder: ``checkpoints/``.
        config: :class:`exp.config.schema.CheckpointConfig`.
        patience: validations without a better metric after which training stops; None: never.
        min_delta: relative improvement that counts as better for ``patience``.
        metric: the validation metric.
        greater_is_better: whether larger values of it are better.
    """

    priority = "VERY_LOW"  # after the schedulers, so that their new state is in the file

    def __init__(
        self,
        folder: Path,
        config: Any,
        patience: int | None,
        min_delta: float,
        metric: str,
        greater_is_better: bool = False,
    ) -> None:
        self.folder = folder
        # Read once: an access to the configuration costs as much as a small kernel.
        self.every_steps: int = config.every_steps
        self.every_epochs: int = config.every_epochs
        self.keep_last: int = config.keep_last
        self.keep_best: bool = config.keep_best
        self.patience = patience
        self.min_delta = min_delta
        self.metric = metric
        self.sign = -1.0 if greater_is_better else 1.0  # of what is to be small
        self.best: float | None = None
        self.best_epoch = 0
        self.reference: float | None = None  # the last value that was better by min_delta
        self.bad_epochs = 0
        self._saved = (-1, False)

    @property
    def best_path(self) -> Path:
        """Where the best weights lie."""
        return self.folder / "best.pth"

    def before_train(self, runner: Any) -> None:
        """Remove what a killed writer left."""
        if runner.distributed_group.is_main:
            checkpoint.remove_stale_temporaries(self.folder)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save within the epoch."""
        if not self.every_steps:
            return
        step = runner.iter + 1
        # Where a validation follows, the checkpoint waits for it.
        if step % self.every_steps == 0 and not runner.train_loop.validates_after(step, batch_idx):
            self.save(runner, step)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Judge the weights, then save."""
        value = (metrics or {})[self.metric]
        if not math.isfinite(value):
            raise RunError(f"validation {self.metric} is {value} after step {runner.iter}; lower optim.lr")
        if self.best is None or self.sign * value < self.sign * self.best:
            self.best, self.best_epoch = value, runner.epoch
            if self.keep_best and runner.distributed_group.is_main:
                checkpoint.write(self.best_path, runner.weights_checkpoint())
        if self.reference is None or self._gained(value, self.reference):
            self.reference, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1
            if self.patience is not None and self.bad_epochs >= self.patience:
                runner.train_loop.stop_training = True
        at_steps = self.every_steps and runner.iter % self.every_steps == 0
        at_epochs = runner.train_loop.val_every is None and self._epoch_is_saved(runner.epoch)
        if at_steps or at_epochs:
            self.save(runner, runner.iter)

    def after_train_epoch(self, runner: Any) -> None:
        """Save at the end of an epoch where no validation follows, which would do it."""
        loop = runner.train_loop
        if loop.val_every is not None and self._epoch_is_saved(runner.epoch + 1):
            self.save(runner, runner.iter)

    def _epoch_is_saved(self, epoch: int) -> bool:
        return bool(self.every_epochs) and epoch % self.every_epochs == 0

    def _gained(self, value: float, reference: float) -> bool:
        return self.sign * value < self.sign * reference - self.min_delta * abs(reference)

    def after_train(self, runner: Any) -> None:
        """The last state is always kept."""
        self.save(runner, runner.iter)

    def save(self, runner: Any, step: int, validation_due: bool = False) -> None:
        """Write a checkpoint, unless the same one has been written. A collective.

        Args:
            runner: the runner.
            step: optimizer steps completed.
            validation_due: whether a validation is to be made before training goes on.
        """
        if (step, validation_due) == self._saved:
            return
        self._saved = (step, validation_due)
        content = runner.training_checkpoint(step, self.state_dict(), validation_due)
        if runner.distributed_group.is_main:
            checkpoint.write(self.folder / f"step_{step:08d}.pth", content)
            checkpoint.prune(self.folder, self.keep_last)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know of the epochs before it."""
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "reference": self.reference,
            "bad_epochs": self.bad_epochs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.best, self.best_epoch = state["best"], state["best_epoch"]
        self.reference, self.bad_epochs = state["reference"], state["bad_epochs"]


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``: a resumed run trains, and writes, them again."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off in mid-line when the run was killed
        if record["step"] <= step:
            kept.append(line)
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
