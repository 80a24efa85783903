"""What a training reports: losses and metrics in ``metrics.jsonl``, in MMEngine's visualizer, and on the terminal."""

from __future__ import annotations

import math
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Mapping

import mmengine.hooks
import torch
from mmengine.hooks import Hook

from exp.data.loader import tensors_of
from exp.engine import checkpoint
from exp.engine.distributed import staged_bytes
from exp.engine.hooks import what_to_do
from exp.errors import RunError
from exp.runs.files import to_json
from exp.runs.folder import number_text, read_records

if TYPE_CHECKING:
    from rich.console import Console

    from exp.engine.distributed import Distributed
    from exp.hardware.backend import Backend
    from exp.session import Session

__all__ = ["LossMeter", "MetricsHook", "Progress"]

_REDRAW_SECONDS = 0.25
_SHOWN = 4  # metrics of a validation on the terminal; metrics.jsonl has all


class LossMeter:
    """Sums the losses of each step on the device, without reading them.

    To read a loss, the host must wait for the device. At every step this would take longer than all other overhead of a
    step. :meth:`read` waits once for all steps since the last reading.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        """Sums since the last reading, by name; 0-dim float32 tensors on the device."""
        self._counts: Counter[str] = Counter()

    def add(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Add one micro-batch's losses (0-dim tensors on the device)."""
        for name, value in losses.items():
            if name in self.sums:
                self.sums[name].add_(value.detach())
            else:
                self.sums[name] = value.detach().float().clone()
            self._counts[name] += 1

    def read(self) -> dict[str, float]:
        """Read the mean of each loss, over the micro-batches that had it since the last reading, and reset the sums.

        This is the only place where a training step waits for the device.
        """
        sums, counts, self.sums, self._counts = self.sums, self._counts, {}, Counter()
        values = torch.stack(list(sums.values())).cpu().tolist() if sums else []
        return {name: value / counts[name] for name, value in zip(sums, values)}


class Progress:
    """Shows the progress of training on rank 0: a bar on a terminal, else a line per validation and every 30 seconds.

    Args:
        console: where to print; None: print nothing (other ranks).
        line_every_s: seconds between two lines if the console is not a terminal.
    """

    def __init__(self, console: Console | None, line_every_s: float = 30.0) -> None:
        self.console = console
        self.line_every_s = line_every_s
        self._loop: Any = None
        self._bar: Any = None
        self._drawn, self._begun, self._step, self._text = 0.0, (0.0, 0), 0, ""

    def start(self, loop: Any, first: str) -> None:
        """Show the bar.

        Args:
            loop: the :class:`exp.engine.trainer.TrainLoop`.
            first: text until the first losses are known.
        """
        self._loop, self._step, self._drawn = loop, loop.iter, time.monotonic()
        self._begun = (self._drawn, loop.iter)
        if self.console is None or not self.console.is_terminal:
            return
        from rich import progress

        words = progress.TextColumn("{task.description}"), progress.TextColumn("{task.fields[text]}")
        columns = (words[0], progress.BarColumn(bar_width=20), progress.TaskProgressColumn(), words[1])
        # No refresh thread: it would interrupt the training loop ten times a second.
        self._bar = progress.Progress(*columns, console=self.console, auto_refresh=False, transient=True)
        self._bar.add_task("epoch", total=loop.max_iters, completed=loop.iter, text=first)
        self._bar.start()

    def step(self, step: int) -> None:
        """Show the number of completed steps; redraws at most four times a second."""
        self._step = step
        if self._bar is not None and (
            time.monotonic() - self._drawn >= _REDRAW_SECONDS or step == self._loop.max_iters
        ):
            self._show()

    def tell(self, text: str, line: bool) -> None:
        """Change the text; if there is no bar, print it as a line if ``line`` is set, or if the last line is old."""
        self._text = text
        if line or (self._bar is None and time.monotonic() - self._drawn >= self.line_every_s):
            self._show()

    def _show(self) -> None:
        if self.console is None or self._loop is None:
            return
        self._drawn, loop, (begun, first) = time.monotonic(), self._loop, self._begun
        epochs, rest = divmod(self._step + loop.ahead, loop.steps_per_epoch)
        epoch, text = f"epoch {max(epochs + bool(rest), 1)}/{loop.max_epochs}", self._text
        if self._step > first:  # an estimate without early stopping; the mean time per step includes validation
            seconds = (self._drawn - begun) / (self._step - first) * (loop.max_iters - self._step)
            text += f"  ETA {timedelta(seconds=round(seconds))}"
        if self._bar is None:
            place = f"{epoch}  step {self._step}" if rest else epoch
            self.console.print(f"{place}  {text}", soft_wrap=True)
        else:
            self._bar.update(self._bar.task_ids[0], completed=self._step, description=epoch, text=text, refresh=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class MetricsHook(Hook):
    """Reads the losses every ``log_every`` steps, and logs them to file, terminal, visualizer and trackers.

    All ranks read at the same steps, because the logged loss is the mean over ranks. Only rank 0 writes.

    Args:
        session: has the run folder, ``log_every``, and the start time of this rank's process.
    """

    priority = "BELOW_NORMAL"

    def __init__(self, session: Session) -> None:
        self.path, self.progress, self.started = session.folder.metrics, Progress(session.console), session.started
        self.log_every: int = session.config.log_every
        self.time_to_first_step: float | None = None
        self.train_seconds = 0.0
        self.samples = 0
        self.left_device = LeftDevice(session.backend)
        self._mark = self._paused = 0.0
        self._steps_since_mark = self._staged = 0
        self._losses = ""  # text of the latest ones for the terminal
        self._loop: Any = None

    def before_train(self, runner: Any) -> None:
        """Show the bar, and have the lines of steps removed that will be trained again."""
        self._loop, begins_at = runner.train_loop, runner.iter
        runner.session.when_started(lambda: self._truncate(begins_at))
        self._staged = staged_bytes()
        self.progress.start(self._loop, f"{'compiling, ' if runner.session.config.compile else ''}first step ...")

    def before_train_epoch(self, runner: Any) -> None:
        """Start measuring the time, which excludes evaluation."""
        self.left_device.begin()
        self._mark = time.perf_counter()
        self._steps_since_mark = 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Count the step, and read the losses every ``log_every`` steps."""
        self._steps_since_mark += 1
        step = self._loop.iter + 1
        if self.time_to_first_step is None:
            runner.backend.synchronize()
            self.time_to_first_step = time.time() - self.started
        if step % self.log_every == 0 or step == self._loop.max_iters:
            self._read(runner, step, data_batch)
        self.progress.step(step)

    def after_train_epoch(self, runner: Any) -> None:
        """Read the losses of the steps since the last reading, so that every epoch is complete in the log."""
        if self._steps_since_mark:
            self._read(runner, runner.iter)

    def _read(self, runner: Any, step: int, batch: Any = None) -> None:
        group = runner.distributed_group
        by_rank: list[dict[str, float]] = group.gather(runner.losses.read())
        now, steps = time.perf_counter(), self._steps_since_mark
        seconds, samples = now - self._mark, steps * self._loop.sampler.global_batch_size
        self._mark, self._steps_since_mark = now, 0
        self.train_seconds += seconds
        self.samples += samples
        left = self.left_device.read(steps)
        record: dict[str, Any] = {}
        for name in dict.fromkeys(name for each in by_rank for name in each):
            values = [each[name] for each in by_rank if name in each]
            record[name] = value = sum(values) / len(values)  # the mean over the ranks that have it
            if not math.isfinite(value):
                ranks = ", ".join(str(rank) for rank, own in enumerate(by_rank) if not math.isfinite(own.get(name, 0)))
                raise RunError(
                    f"{name} is {value} on rank {ranks} within the {steps} steps before step {step} (epoch "
                    f"{runner.epoch + 1}){_nan_in(batch)}; {what_to_do(runner)}"
                )
        if not record:
            return
        losses = dict(record)
        record["lr"] = runner.optim_wrapper.learning_rate
        if runner.optim_wrapper.grad_norm is not None:
            record["grad_norm"] = float(runner.optim_wrapper.grad_norm)
        record["samples_per_second"] = samples / seconds
        if group.fallback is not None:
            copied = staged_bytes()
            record["staged_bytes_per_step"] = (copied - self._staged) / steps
            self._staged = copied
        record.update(left)
        if group.is_main:
            record.update(_card(runner.backend))
        self._write(runner, "train", step, record)
        self._losses = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self._losses += f"  lr {record['lr']:.1e}  {record['samples_per_second']:,.0f} samples/s"
        self.progress.tell(self._losses, line=False)

    def before_val_epoch(self, runner: Any) -> None:
        """Pause the training time during a validation within an epoch."""
        self._paused = time.perf_counter()
        self.left_device.pause()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the validation metrics."""
        self._mark += time.perf_counter() - self._paused
        self.left_device.begin()
        units, metrics = runner.val_loop.evaluator.units, metrics or {}
        self._write(runner, "val", runner.iter, metrics, units)
        unit = {name: f" ({each})" for name, each in units.items()}
        first = list(metrics.items())[:_SHOWN]
        shown = "  ".join(f"val_{name} {number_text(value)}{unit.get(name, '')}" for name, value in first)
        self.progress.tell(f"{self._losses}  {shown}", line=True)

    def after_test_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the test metrics."""
        self._write(runner, "test", runner.iter, metrics or {}, runner.test_loop.evaluator.units)

    def after_train(self, runner: Any) -> None:
        """Remove the bar."""
        self.progress.stop()

    def _truncate(self, step: int) -> None:
        """Remove the lines of steps after ``step``, because a resumed run trains and writes these steps again."""
        if self.path.is_file():
            records = read_records(self.path.read_bytes().splitlines())
            kept = [f"{to_json(record)}\n" for record in records if record["step"] <= step]
            self.path.write_text("".join(kept), encoding="utf-8")

    def _write(self, runner: Any, split: str, step: int, values: Mapping[str, float | None], units: Any = None) -> None:
        """Append a line to ``metrics.jsonl``; pass values to visualizer and trackers, and losses to the message hub."""
        scalars = {f"{split}/{name}": value for name, value in values.items() if value is not None}
        # If the user names MMEngine's RuntimeInfoHook, that updates the message hub at every step.
        if split == "train" and not any(type(hook) is mmengine.hooks.RuntimeInfoHook for hook in runner.hooks):
            for name, value in scalars.items():
                runner.message_hub.update_scalar(name, value)
        if runner.distributed_group.is_main:
            record = {"split": split, "step": step, "epoch": runner.epoch, **values}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(to_json({**record, "units": units} if units else record) + "\n")
            runner.visualizer.add_scalars(scalars, step=step)
            for reporter in runner.session.reporters:
                reporter.log({name: float(value) for name, value in scalars.items()}, step)


class LeftDevice:
    """Counts CPU fallbacks in training steps: operators of this rank that ran on the CPU, and the copied bytes.

    Args:
        backend: counts them (:meth:`exp.hardware.backend.Backend.fallbacks`).
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._since: Counter[tuple[str, int]] | None = None  # by (operator, 0) calls, and by (operator, 1) bytes
        self._interval: Counter[tuple[str, int]] = Counter()
        self._total = self._interval.copy()  # without the interval
        self._steps = 0

    def begin(self) -> None:
        """Start or continue counting."""
        found = self._backend.fallbacks()
        each = {(name, kind): n for name, counts in (found or {}).items() for kind, n in enumerate(counts)}
        self._since = None if found is None else Counter(each)

    def pause(self) -> None:
        """Stop counting, for example before a validation."""
        since = self._since
        self.begin()
        if since is not None and self._since is not None:
            self._interval += self._since - since

    def read(self, steps: int) -> dict[str, float | None]:
        """Counts of this rank for ``metrics.jsonl``, over the ``steps`` steps since the last reading.

        Returns:
            Calls and bytes per step; None for bytes if only calls are counted. Empty if the backend counts nothing.
        """
        self.pause()
        if self._since is None:
            return {}
        interval, self._interval = self._interval, Counter()
        self._total += interval
        self._steps += steps
        return {f"left_device_{key}": value for key, value in _per_step(interval, steps).items()}

    def summary(self, distributed: Distributed) -> dict[str, Any] | None:
        """Counts for ``result.json``, of the rank with the most bytes, since the others wait for it. A collective.

        Returns:
            ``rank``, ``calls_per_step``, ``bytes_per_step``, and under ``operators`` the last two for each operator,
            most bytes first. None if the backend of a rank counts nothing, or no step was trained.
        """
        totals = distributed.gather(self._total if self._since is not None and self._steps else None)
        if None in totals:
            return None
        sums = [_per_step(total, self._steps) for total in totals]
        rank = max(range(len(sums)), key=lambda each: (sums[each]["bytes_per_step"] or 0, sums[each]["calls_per_step"]))
        counts = totals[rank]
        names = sorted({name for name, _ in counts}, key=lambda name: (-counts[name, 1], -counts[name, 0], name))
        return {
            "rank": rank,
            **sums[rank],
            "operators": {
                name: _per_step({key: counts[key] for key in ((name, 0), (name, 1))}, self._steps) for name in names
            },
        }


def _per_step(counts: Mapping[tuple[str, int], int], steps: int) -> dict[str, Any]:
    """Calls and bytes per step; None for bytes if there are calls but no bytes."""
    calls, size = (sum(count for (_, kind), count in counts.items() if kind == each) for each in (0, 1))
    return {"calls_per_step": calls / steps, "bytes_per_step": None if calls and not size else size / steps}


def _nan_in(batch: Any) -> str:
    """Text for the message about a loss that is not finite, if the latest batch has NaN; reads the batch."""
    parts = batch.items() if isinstance(batch, dict) else ()
    tensors = {f"{key}/{place}": value for key, part in parts for place, value in enumerate(tensors_of(part))}
    names = ", ".join(dict.fromkeys(repr(name.rpartition("/")[0]) for name in checkpoint.not_finite(tensors, ())))
    return (
        f"; the latest batch has nan in {names}: leave those values out of the loss, or fix the data" if names else ""
    )


def _card(backend: Backend) -> dict[str, float]:
    """The most memory used on this rank's device, and its utilization, if the backend knows them."""
    usage = backend.usage()
    most = usage.get("max_allocated", usage.get("allocated"))
    figures = {} if most is None else {"memory_gib": most / 2**30}
    return {**figures, **{name: usage[name] for name in ("utilization_percent",) if usage.get(name) is not None}}
