"""The engine's own hooks: what a training reports, and when it ends before its last step.

Losses and metrics go into ``metrics.jsonl``, MMEngine's visualizer, and to the terminal. If the scheduler wants the
machine back, all ranks agree where to save and end, so that none is a step ahead.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Mapping, TextIO

import mmengine.hooks
import torch
from mmengine.hooks import Hook

from exp.data.loader import tensors_of
from exp.engine.checkpoint import not_finite
from exp.engine.distributed import staged_bytes
from exp.engine.saving import what_to_do
from exp.errors import Preempted, RunError
from exp.runs.files import to_json
from exp.runs.folder import read_records
from exp.runs.record import number_text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from exp.engine.distributed import Distributed
    from exp.engine.saving import CheckpointHook
    from exp.hardware.backend import Backend
    from exp.session import Session

__all__ = [
    "Interrupted", "LossMeter", "MetricsHook", "OverfitHook", "PreemptionHook", "Progress", "truncate_metrics",
]  # fmt: skip

_ASK_EVERY_S = 1.0
_NEAR_ZERO = 0.01  # of the first loss
_REDRAW_SECONDS = 0.25
_SHOWN = 4  # figures of a validation on the terminal; metrics.jsonl has all


class LossMeter:
    """Sums the losses that each step returns, without reading them.

    Reading a loss makes the host wait for the device; at every step that costs more than the step's other overhead
    together. :meth:`read` waits once for all steps since the last reading.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        """Since the last reading, on the device."""
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
        """Means since the last reading, of each loss over the micro-batches that had it; starts anew.

        The one place where training waits for the device.
        """
        sums, counts, self.sums, self._counts = self.sums, self._counts, {}, Counter()
        values = torch.stack(list(sums.values())).cpu().tolist() if sums else []
        return {name: value / counts[name] for name, value in zip(sums, values)}


class Progress:
    """Progress of training on rank 0: one bar on a terminal; elsewhere a line per validation, and each half minute.

    Args:
        console: where to draw; None: draw nothing (other ranks).
        line_every_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, console: Console | None, line_every_s: float = 30.0) -> None:
        self.console = console
        self.line_every_s = line_every_s
        self._loop: Any = None
        self._bar: Any = None
        self._drawn, self._begun = 0.0, (0.0, 0)
        self._text = ""
        self._step = 0

    def start(self, loop: Any, first: str) -> None:
        """Begin.

        Args:
            loop: the :class:`exp.engine.trainer.TrainLoop`.
            first: what the first step waits for.
        """
        self._loop, self._step, self._drawn = loop, loop.iter, time.monotonic()
        self._begun = (self._drawn, loop.iter)
        if self.console is None or not self.console.is_terminal:
            return
        from rich import progress

        words = progress.TextColumn("{task.description}"), progress.TextColumn("{task.fields[text]}")
        columns = (words[0], progress.BarColumn(bar_width=20), progress.TaskProgressColumn(), words[1])
        # No refresh thread: it would take the interpreter from the training loop ten times a second.
        self._bar = progress.Progress(*columns, console=self.console, auto_refresh=False, transient=True)
        self._bar.add_task("epoch", total=loop.max_iters, completed=loop.iter, text=first)
        self._bar.start()

    def step(self, step: int) -> None:
        """One step done; redraws four times a second at most."""
        self._step = step
        if self._bar is not None and (
            time.monotonic() - self._drawn >= _REDRAW_SECONDS or step == self._loop.max_iters
        ):
            self._show()

    def losses(self, losses: Mapping[str, float], lr: float, samples_per_second: float) -> None:
        """Newest readings."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self._text = f"{shown}  lr {lr:.1e}  {samples_per_second:,.0f} samples/s"
        if self._bar is None and time.monotonic() - self._drawn >= self.line_every_s:
            self._show()

    def validated(self, metrics: Mapping[str, float], units: Mapping[str, str]) -> None:
        """An epoch, or the part of one that ``max_steps`` left, has been validated.

        Args:
            metrics: by name.
            units: of some of them.
        """
        unit = {name: f" ({each})" for name, each in units.items()}
        first = list(metrics.items())[:_SHOWN]
        shown = "  ".join(f"val_{name} {number_text(value)}{unit.get(name, '')}" for name, value in first)
        self._text = f"{self._text.split('  val_')[0]}  {shown}"
        self._show()

    def _show(self) -> None:
        if self.console is None or self._loop is None:
            return
        self._drawn, loop, (begun, first) = time.monotonic(), self._loop, self._begun
        epochs, rest = divmod(self._step + loop.ahead, loop.steps_per_epoch)
        epoch, text = f"epoch {max(epochs + bool(rest), 1)}/{loop.max_epochs}", self._text
        if self._step > first:  # if every remaining epoch is trained, validation included
            seconds = (self._drawn - begun) / (self._step - first) * (loop.max_iters - self._step)
            text += f"  ETA {timedelta(seconds=round(seconds))}"
        if self._bar is None:
            place = f"{epoch}  step {self._step}" if rest else epoch
            self.console.print(f"{place}  {text}", soft_wrap=True)
        else:
            self._bar.update(self._bar.task_ids[0], completed=self._step, description=epoch, text=text, refresh=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class MetricsHook(Hook):
    """Reads the losses every ``log_every`` steps and hands them on: file, progress bar, MMEngine's visualizer.

    Every rank reads at the same steps, because the loss shown is the mean over ranks; rank 0 alone writes.

    Args:
        session: has the run folder, ``log_every``, and when the process of this rank began.
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
        self._loop: Any = None
        self._file: TextIO | None = None

    def before_train(self, runner: Any) -> None:
        """Show the bar, and forget what an earlier attempt wrote of steps that are trained again."""
        self._loop, begins_at = runner.train_loop, runner.iter
        runner.session.when_started(lambda: truncate_metrics(self.path, begins_at))
        self._staged = staged_bytes()
        self.progress.start(self._loop, f"{'compiling, ' if runner.session.config.compile else ''}first step ...")

    def before_train_epoch(self, runner: Any) -> None:
        """Time training only, not the evaluation before it."""
        self.left_device.begin()
        self._mark = time.perf_counter()
        self._steps_since_mark = 0

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
        self.progress.losses(losses, record["lr"], record["samples_per_second"])

    def before_val_epoch(self, runner: Any) -> None:
        """A validation in mid-epoch is not training time."""
        self._paused = time.perf_counter()
        self.left_device.pause()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the validation metrics."""
        self._mark += time.perf_counter() - self._paused
        self.left_device.begin()
        units = runner.val_loop.evaluator.units
        self._write(runner, "val", runner.iter, metrics or {}, units)
        self.progress.validated(metrics or {}, units)

    def after_test_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the test metrics."""
        self._write(runner, "test", runner.iter, metrics or {}, runner.test_loop.evaluator.units)

    def after_train(self, runner: Any) -> None:
        """Take the bar away."""
        self.progress.stop()

    def after_run(self, runner: Any) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, runner: Any, split: str, step: int, values: Mapping[str, float | None], units: Any = None) -> None:
        """Append a line to ``metrics.jsonl``; hand numbers to the visualizer and, of training, the message hub."""
        scalars = {f"{split}/{name}": value for name, value in values.items() if value is not None}
        # MMEngine's own hook, where the user names it, updates the message hub at every step.
        if split == "train" and not any(type(hook) is mmengine.hooks.RuntimeInfoHook for hook in runner.hooks):
            for name, value in scalars.items():
                runner.message_hub.update_scalar(name, value)
        if runner.distributed_group.is_main:
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8", buffering=1)
            record = {"split": split, "step": step, "epoch": runner.epoch, **values}
            self._file.write(to_json({**record, "units": units} if units else record) + "\n")
            runner.visualizer.add_scalars(scalars, step=step)
            for reporter in runner.session.reporters:
                reporter.log({name: float(value) for name, value in scalars.items()}, step)


class LeftDevice:
    """Counts operators and bytes that have left the device of this rank, in training steps alone.

    Args:
        backend: counts them (:meth:`exp.hardware.backend.Backend.fallbacks`).
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._since: Counter[tuple[str, int]] | None = None  # calls and bytes, as 0 and 1, by operator
        self._total: Counter[tuple[str, int]] = Counter()
        self._told = self._total.copy()
        self._steps = 0

    def begin(self) -> None:
        """Training begins, or continues after something else."""
        found = self._backend.fallbacks()
        each = {(name, kind): n for name, counts in (found or {}).items() for kind, n in enumerate(counts)}
        self._since = None if found is None else Counter(each)

    def pause(self) -> None:
        """Training is interrupted, by a validation."""
        since = self._since
        self.begin()
        if since is not None and self._since is not None:
            self._total += self._since - since

    def read(self, steps: int) -> dict[str, float | None]:
        """Figures of this rank for ``metrics.jsonl``, over the ``steps`` steps since the last reading.

        Returns:
            Calls and bytes per step; None for bytes that are not counted. Empty if nothing is.
        """
        self.pause()
        if self._since is None:
            return {}
        interval, self._told = self._total - self._told, self._total.copy()
        self._steps += steps
        return {f"left_device_{key}": value for key, value in _per_step(interval, steps).items()}

    def summary(self, distributed: Distributed) -> dict[str, Any] | None:
        """Figures for ``result.json``, of the rank that sends most: the others wait for it. A collective.

        Returns:
            ``rank``, ``calls_per_step``, ``bytes_per_step``, and the same two by name in ``operators``, most bytes
            first; None if a rank cannot tell, or nothing was trained.
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
    """Calls and bytes; None for bytes if there are calls only."""
    calls, size = (sum(count for (_, kind), count in counts.items() if kind == each) for each in (0, 1))
    return {"calls_per_step": calls / steps, "bytes_per_step": None if calls and not size else size / steps}


def _nan_in(batch: Any) -> str:
    """What to add where a loss is not finite and the latest batch has NaN, too; its tensors are read."""
    parts = batch.items() if isinstance(batch, dict) else ()
    tensors = {f"{key}/{place}": value for key, part in parts for place, value in enumerate(tensors_of(part))}
    names = ", ".join(dict.fromkeys(repr(name.rpartition("/")[0]) for name in not_finite(tensors, ())))
    return (
        f"; the latest batch has nan in {names}: leave those values out of the loss, or mend the data" if names else ""
    )


def _card(backend: Backend) -> dict[str, float]:
    """How full this rank's card has been, and how busy it is, as far as it tells."""
    usage = backend.usage()
    most = usage.get("max_allocated", usage.get("allocated"))
    figures = {} if most is None else {"memory_gib": most / 2**30}
    return {**figures, **{name: usage[name] for name in ("utilisation_percent",) if usage.get(name) is not None}}


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``: a resumed run trains, and writes, them again."""
    if path.is_file():
        records = read_records(path.read_bytes().splitlines())
        kept = [f"{to_json(record)}\n" for record in records if record["step"] <= step]
        path.write_text("".join(kept), encoding="utf-8")


class Interrupted(Preempted):
    """``debug.restart_after`` has been reached, and the state is saved."""


class PreemptionHook(Hook):
    """Ends training when it is preempted, with a checkpoint from which it continues exactly.

    Between two steps, and between two batches of a validation: there the checkpoint says that the validation is still
    to be made. With ``debug.restart_after`` also after that step.

    All ranks end at one and the same point. Asking costs a collective operation, so they ask about once a second,
    however short a step is. How many points that is they work out from the time that all of them took together, which
    makes it the same number everywhere.

    Args:
        session: has the flag, and the group whose ranks agree.
        checkpoints: writes the checkpoint.
    """

    priority = "LOWEST"  # after everything that a checkpoint holds has its new state

    def __init__(self, session: Session, checkpoints: CheckpointHook) -> None:
        self.preemption_flag, self.distributed = session.info.preemption_flag, session.distributed
        self.checkpoints = checkpoints
        self._restart_after = None if session.restarted_here else session.config.debug.restart_after
        self._begin()

    def _begin(self, common_batches: int = 0) -> None:
        """A phase with steps of another length begins: ask at its first point."""
        self._common_batches = common_batches  # of an evaluation: those that every rank has
        self._interval = self._left = 1
        self._asked = time.monotonic()

    def _wanted(self) -> bool:
        """Called by every rank at the same points; whether to end here."""
        if self.distributed.world_size == 1:
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
        fitting = int(self._interval * _ASK_EVERY_S / mean_s)
        self._interval = self._left = max(1, min(fitting, 2 * self._interval))
        return bool(wanted)

    def before_train_epoch(self, runner: Any) -> None:
        """Steps begin."""
        self._begin()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Between two steps; if a validation follows, its beginning is the place."""
        step = runner.iter + 1
        if runner.train_loop.validates_after(step, batch_idx):
            return
        if step == self._restart_after:
            self._end(runner, Interrupted(step))
        if self._wanted():
            self._end(runner, Preempted(step))

    def before_validation(self, runner: Any) -> None:
        """Before a validation, and before hooks put other weights in place for it."""
        if runner.iter == self._restart_after:
            self._end(runner, Interrupted(runner.iter), validation_due=True)
        # With other weights in place nothing can be saved until its end.
        others = runner.hooks_at("before_val", "before_val_epoch", "before_val_iter")
        self._begin(0 if others else runner.val_loop.dataloader.sampler.common_batches)
        if self._wanted():
            self._end(runner, Preempted(runner.iter), validation_due=True)

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before a batch of the validation; ranks may have different numbers of them."""
        if batch_idx < self._common_batches and self._wanted():
            self._end(runner, Preempted(runner.iter), validation_due=True)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Steps continue if the validation was within an epoch."""
        self._begin()

    def before_test_epoch(self, runner: Any) -> None:
        """As for the validation."""
        self._begin(runner.test_loop.dataloader.sampler.common_batches)

    def before_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Before a batch of the test; the end of the training has been saved."""
        if batch_idx < self._common_batches and self._wanted():
            raise Preempted(runner.iter)

    def _end(self, runner: Any, reason: Preempted, validation_due: bool = False) -> None:
        self.checkpoints.save(runner, reason.step, validation_due=validation_due, waits=True)
        if isinstance(reason, Interrupted):
            runner.visualizer.close()
        raise reason


class OverfitHook(Hook):
    """Stops when the loss of the last round over the batches is near zero, and reports the verdict.

    Reads the loss at every step, which costs time that a few batches have.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.first: float | None = None
        self.last: deque[float] = deque(maxlen=session.config.debug.train_batches)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Take in the loss, as the mean over ranks."""
        loss = outputs["loss"].detach().cpu().double().reshape(1)
        self.last.append(float(self.session.distributed.sum(loss)) / self.session.distributed.world_size)
        if len(self.last) == self.last.maxlen:
            self.first = self._mean() if self.first is None else self.first
            runner.train_loop.stop_training |= self._learned()

    def after_train(self, runner: Any) -> None:
        """The verdict."""
        if self.first is not None:
            verdict = (
                "the model can learn"
                if self._learned()
                else "that is not near zero: give it more steps (max_steps) or another optim.lr, take out dropout, or "
                "look at the loss, the targets and which parameters are trained"
            )
            self.session.say(
                f"overfit: the loss on {self.last.maxlen} batches went from {self.first:.4g} to {self._mean():.4g} in "
                f"{runner.iter} steps; {verdict}"
            )

    def _mean(self) -> float:
        return sum(self.last) / len(self.last)

    def _learned(self) -> bool:
        return self.first is not None and self.first > 0 and self._mean() < _NEAR_ZERO * self.first
