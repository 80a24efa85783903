"""The engine's hooks: they report losses and metrics, save checkpoints, and end a training early.

Losses and metrics go to ``metrics.jsonl``, to MMEngine's visualizer, and to the terminal. Weights that are not finite
are never saved. On preemption all ranks agree on the step after which they save and end.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Container, Mapping, Sequence

import mmengine.hooks
import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer

from exp import console
from exp.data.loader import tensors_of
from exp.data.places import shortened
from exp.distributed import staged_bytes
from exp.engine import checkpoint
from exp.engine.wrapper import unwrapped
from exp.errors import Preempted, RunError
from exp.runs.files import to_json, write_atomically
from exp.runs.folder import read_records
from exp.task import to_continue

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from exp.distributed import Distributed
    from exp.hardware.backend import Backend
    from exp.session import Session

logger = logging.getLogger(__name__)

_REDRAW_SECONDS = 0.25  # of the bar on a terminal
_LINE_SECONDS = 30.0  # between two lines elsewhere
_SHOWN = 4  # metrics of a validation on the terminal; metrics.jsonl has all
_HISTORY = 1000  # values of a scalar that the message hub keeps, since it copies them all at each update
_LOOK_S = 1.0  # seconds between two looks for a preemption
_NEAR_ZERO = 0.01  # as a share of the first loss
_VERDICTS = ("best", "best_epoch", "best_step", "last", "last_step", "reference", "bad_epochs")
"""Attributes of :class:`CheckpointHook` with the results of earlier validations, which every checkpoint contains."""


# -- reports -----------------------------------------------------------------------------------------------------------


class LossMeter:
    """Sums the losses of each step on the device, without reading them.

    To read a loss, the host must wait for the device. At every step this would take longer than all other overhead of a
    step. :meth:`read` waits once for all steps since the last reading.

    Attributes:
        sums: sums since the last reading, by name; 0-dim float32 tensors on the device.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, float] = {}  # not whole numbers after a resume with another number of ranks

    def add(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Add one micro-batch's losses (0-dim tensors on the device)."""
        for name, value in losses.items():
            if name in self.sums:
                self.sums[name].add_(value.detach())
                self._counts[name] += 1
            else:
                self.sums[name], self._counts[name] = value.detach().float().clone(), 1

    def read(self) -> dict[str, float]:
        """Read the mean of each loss, over the micro-batches that had it since the last reading, and reset the sums.

        This is the only place where a training step waits for the device.
        """
        state = self.state()
        self.sums, self._counts = {}, {}
        return {name: total / count for name, (total, count) in state.items()}

    def state(self) -> dict[str, tuple[float, float]]:
        """Sum and count of each loss since the last reading, for checkpoints; waits for the device once."""
        values = torch.stack(list(self.sums.values())).cpu().tolist() if self.sums else []
        return {name: (value, self._counts[name]) for name, value in zip(self.sums, values)}

    def load(
        self, states: Sequence[Mapping[str, Sequence[float]]], rank: int, ranks: int, device: torch.device
    ) -> None:
        """Restore the results of :meth:`state`; if the number of ranks has changed, each gets an equal share of all.

        Args:
            states: of each rank that has saved.
            rank: this rank.
            ranks: number of ranks now.
            device: of this rank.
        """
        own = states if len(states) != ranks else [states[rank]]
        share = ranks if len(states) != ranks else 1
        for name in dict.fromkeys(name for state in own for name in state):
            total, count = (sum(state[name][part] for state in own if name in state) / share for part in (0, 1))
            self.sums[name], self._counts[name] = torch.tensor(total, dtype=torch.float32, device=device), count


class Progress:
    """Shows the progress of training on rank 0: a bar on a terminal, else a line per validation and every 30 seconds.

    Args:
        console: where to print; None: print nothing (other ranks).
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console
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

        bar = progress.BarColumn(bar_width=20), progress.TaskProgressColumn()
        columns = "{task.description}", *bar, "{task.fields[text]}"
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
        if line or (self._bar is None and time.monotonic() - self._drawn >= _LINE_SECONDS):
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
        self._loop = runner.train_loop
        again = ["val"] * self._loop.validation_due + ["train"] * bool(runner.losses.sums)
        runner.session.when_started(functools.partial(self._truncate, runner.iter, again))
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
        if runner.losses.sums:
            self._read(runner, runner.iter)

    def _read(self, runner: Any, step: int, batch: Any = None) -> None:
        group = runner.distributed_group
        by_rank: list[dict[str, float]] = group.gather(runner.losses.read())
        now, steps = time.perf_counter(), self._steps_since_mark
        seconds, samples = now - self._mark, steps * self._loop.sampler.global_batch_size
        self._mark, self._steps_since_mark = now, 0
        self.train_seconds += seconds
        self.samples += samples
        left = self.left_device.read(steps) if steps else {}
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
        record["lr"] = runner.optim_wrapper.get_lr()["lr"][0]
        if runner.optim_wrapper.grad_norm is not None:
            record["grad_norm"] = float(runner.optim_wrapper.grad_norm)
        if steps:  # none if the run has resumed after the last step of an epoch
            record["samples_per_second"] = samples / seconds
        if group.fallback is not None and steps:
            copied = staged_bytes()
            record["staged_bytes_per_step"] = (copied - self._staged) / steps
            self._staged = copied
        record.update(left)
        if group.is_main and runner.device.type != "cpu":  # a processor has no memory of its own
            record.update(_card(runner.backend))
        self._write(runner, "train", step, record)
        self._losses = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self._losses += f"  lr {record['lr']:.1e}  {record.get('samples_per_second', 0.0):,.0f} samples/s"
        self.progress.tell(self._losses, line=False)

    def before_val_epoch(self, runner: Any) -> None:
        """Pause the training time during a validation within an epoch."""
        self.pause()

    def pause(self) -> None:
        """Stop counting time and CPU fallbacks, until :meth:`resume`."""
        self._paused = time.perf_counter()
        self.left_device.pause()

    def resume(self) -> None:
        """Count again."""
        self._mark += time.perf_counter() - self._paused
        self.left_device.begin()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the validation metrics."""
        self.resume()
        units, metrics = runner.val_loop.evaluator.units, metrics or {}
        self._write(runner, "val", runner.iter, metrics, units)
        unit = {name: f" ({each})" for name, each in units.items()}
        first = list(metrics.items())[:_SHOWN]
        shown = "  ".join(f"val_{name} {console.format_metric(value)}{unit.get(name, '')}" for name, value in first)
        self.progress.tell(f"{self._losses}  {shown}", line=True)

    def after_test_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the test metrics."""
        self._write(runner, "test", runner.iter, metrics or {}, runner.test_loop.evaluator.units)

    def after_train(self, runner: Any) -> None:
        """Remove the bar."""
        self.progress.stop()

    def _truncate(self, step: int, again: Container[str]) -> None:
        """Remove the lines that a resumed run writes again. On a full disk the file stays as it is.

        Args:
            step: optimizer steps completed; later ones are trained again.
            again: the splits of which a line for ``step`` itself is written again, too. Any line of the test is.
        """

        def kept(record: Mapping[str, Any]) -> bool:
            return record["split"] != "test" and (record["step"], record["split"] in again) <= (step, False)

        if self.path.is_file():
            lines = self.path.read_bytes().splitlines()
            write_atomically(
                self.path, b"".join(line + b"\n" for line in lines if any(map(kept, read_records([line]))))
            )

    def _write(self, runner: Any, split: str, step: int, values: Mapping[str, float | None], units: Any = None) -> None:
        """Append a line to ``metrics.jsonl``; pass values to visualizer and trackers, and losses to the message hub."""
        scalars = {f"{split}/{name}": value for name, value in values.items() if value is not None}
        # If the user names MMEngine's RuntimeInfoHook, that updates the message hub at every step.
        if split == "train" and not any(type(hook) is mmengine.hooks.RuntimeInfoHook for hook in runner.hooks):
            for name, value in scalars.items():
                runner.message_hub.log_scalars.setdefault(name, HistoryBuffer(max_length=_HISTORY))
                runner.message_hub.update_scalar(name, value, resumed=False)
        if runner.distributed_group.is_main:
            record = {"split": split, "step": step, "epoch": runner.epoch, **values}
            with self.path.open("a", encoding="utf-8") as file:  # closed, so that other machines see the line (NFS)
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
        self._total: Counter[tuple[str, int]] = Counter()
        self._known, self._steps = self._total, 0  # at the last reading

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
            self._total = self._total + (self._since - since)

    def read(self, steps: int) -> dict[str, float | None]:
        """Counts of this rank for ``metrics.jsonl``, over the ``steps`` steps since the last reading.

        Returns:
            Calls and bytes per step; None for bytes if only calls are counted. Empty if the backend counts nothing.
        """
        self.pause()
        if self._since is None:
            return {}
        interval, self._known = self._total - self._known, self._total
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
    names = ", ".join(repr(key) for key, part in parts if any(each.cpu().isnan().any() for each in tensors_of(part)))
    said = f"; the latest batch has nan in {names}: leave those values out of the loss, or fix the data"
    return said if names else ""


def _card(backend: Backend) -> dict[str, float]:
    """The most memory used on this rank's device, and its utilization, if the backend knows them."""
    usage = backend.usage()
    most = usage.get("max_allocated", usage.get("allocated"))
    figures = {} if most is None else {"memory_gib": most / 2**30}
    return {**figures, **{name: usage[name] for name in ("utilization_percent",) if usage.get(name) is not None}}


# -- checkpoints, and the end of a training ----------------------------------------------------------------------------


class CheckpointHook(Hook):
    """Writes checkpoints, keeps the newest and the best, and stops a training that no longer improves.

    The best checkpoint and early stopping are in one hook, because a resumed run needs the state of both.

    Args:
        session: has the configuration and the run folder.
        metric: name of the main metric.
        greater_is_better: whether larger values of it are better.
    """

    priority = "VERY_LOW"  # after the schedulers, so that their new state is in the file

    def __init__(self, session: Session, metric: str = "", greater_is_better: bool = False) -> None:
        config, self.folder = session.config, session.folder.checkpoints
        self.best_path = self.folder / checkpoint.BEST
        # Read once, because an access to an OmegaConf key takes as long as a small kernel.
        keys = config.checkpoint
        self.every_steps, self.every_epochs = keys.every_steps, keys.every_epochs
        self.keep_last, self.keep_best, self.trusted = keys.keep_last, keys.keep_best, keys.trusted
        self.patience, self.min_delta = config.patience, config.min_delta
        self.metric = metric
        self.sign = -1.0 if greater_is_better else 1.0  # smaller values of sign * metric are better
        self.best: float | None = None
        self.best_epoch, self.best_step = 0, 0
        self.last: float | None = None  # value of the latest validation
        self.last_step: int | None = None
        self.reference: float | None = None  # the last value that was better by min_delta
        self.bad_epochs = 0  # validations since then
        self._resumed_here = False  # whether this run has resumed from a checkpoint in this folder
        self._saved = (-1, False, False)  # step, whether a validation is due, whether the training was stopped

    def state_dict(self) -> dict[str, Any]:
        """The results of earlier validations, for a resumed run."""
        return {name: getattr(self, name) for name in _VERDICTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.__dict__.update((name, state[name]) for name in _VERDICTS if name in state)

    # -- when something is saved -----------------------------------------------------------------------------------

    def before_train(self, runner: Any) -> None:
        """Remove incomplete files; once the run has started, set aside checkpoints that do not belong to it."""
        if runner.distributed_group.is_main:
            checkpoint.remove_leftovers(self.folder)
        runner.session.when_started(functools.partial(self._set_aside, runner.session, runner.iter))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save every ``every_steps`` steps; if a validation follows this step, :meth:`after_val_epoch` saves."""
        runner.checkpoint_writer.check()
        step = runner.iter + 1
        if self.every_steps and step % self.every_steps == 0 and not runner.train_loop.validates_after(step, batch_idx):
            self.save(runner, step)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Compare the metric with earlier validations, save, and stop the training if it no longer improves.

        Raises:
            RunError: the metric is not finite.
        """
        value = (metrics or {})[self.metric]
        if not math.isfinite(value):
            raise RunError(f"validation {self.metric} is {value} after step {runner.iter}; {what_to_do(runner)}")
        self.last, self.last_step = value, runner.iter
        best: dict[Path, Any] = {}
        if self.best is None or self.sign * value < self.sign * self.best:
            self.best, self.best_epoch, self.best_step = value, runner.epoch, runner.iter
            if self.keep_best:
                content = runner.weights(runner.iter)
                content["meta"]["validation"] = {self.metric: value}
                if runner.distributed_group.is_main:
                    runner.let_hooks_change(content)
                check_finite(runner, content["state_dict"], runner.iter)
                best[self.best_path] = content
        least = None if self.reference is None else self.sign * self.reference - self.min_delta * abs(self.reference)
        self.bad_epochs += 1
        if least is None or self.sign * value < least:
            self.reference, self.bad_epochs = value, 0
        elif self.patience is not None and self.bad_epochs >= self.patience:
            runner.train_loop.stop_training = True
        at_steps = self.every_steps and runner.iter % self.every_steps == 0
        if at_steps or (runner.train_loop.val_every is None and self._epoch_is_saved(runner.epoch)):
            self.save(runner, runner.iter, beside=best)
        elif best:
            runner.checkpoint_writer.start(best, self._written)

    def after_train_epoch(self, runner: Any) -> None:
        """Save at the end of an epoch, if ``val_every`` is set; otherwise :meth:`after_val_epoch` saves."""
        if runner.train_loop.val_every is not None and self._epoch_is_saved(runner.epoch + 1):
            self.save(runner, runner.iter, epoch_ended=True)

    def _epoch_is_saved(self, epoch: int) -> bool:
        return bool(self.every_epochs) and epoch % self.every_epochs == 0

    def after_train(self, runner: Any) -> None:
        """Save the final state, and wait until it is on the disk."""
        self.save(runner, runner.iter, waits=True)

    def save(
        self,
        runner: Any,
        step: int,
        validation_due: bool = False,
        epoch_ended: bool = False,
        waits: bool = False,
        beside: Mapping[Path, Any] | None = None,
    ) -> None:
        """Write a checkpoint in the background, unless the last call was for the same state. A collective.

        Args:
            runner: the runner.
            step: optimizer steps completed.
            validation_due: whether a resumed run starts with a validation.
            epoch_ended: whether to save the position as the start of the next epoch.
            waits: return only when the checkpoint is on the disk, because no training follows.
            beside: other files to write with it.

        Raises:
            RunError: weights or losses are not finite.
            OSError: the checkpoint before, or this one if ``waits``, could not be written.
        """
        files = dict(beside or {})
        state = (step, validation_due, runner.train_loop.stop_training)
        if state != self._saved:
            self._saved = state
            content = runner.training_checkpoint(step, self.state_dict(), validation_due)
            if epoch_ended:
                content["meta"].update(epoch=runner.epoch + 1, samples=0)
            check_finite(runner, content["state_dict"], step)
            files[self._path(step)] = content
        if files:
            runner.checkpoint_writer.start(files, self._written)
        if waits:
            runner.checkpoint_writer.wait()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.pth"

    def _written(self) -> None:
        """Remove older files; called in the background once the new ones are on the disk."""
        checkpoint.prune(self.folder, self.keep_last)

    # -- earlier checkpoints, and the weights to test --------------------------------------------------------------

    def _set_aside(self, session: Session, begins_at: int) -> None:
        """Set aside checkpoints in this folder that do not belong to this run, and best weights of another run.

        If the run has resumed from a checkpoint in this folder, these are the checkpoints of later steps, else all. The
        next resume would take them for the newest.
        """
        steps = checkpoint.list_checkpoints(self.folder)
        paths = [path for path in steps if not self._resumed_here or checkpoint.step_of(path) > begins_at]
        if not (self.keep_best and self.best is not None) and self.best_path.is_file():
            paths.append(self.best_path)
        if paths:
            checkpoint.set_aside(paths)
            session.say(
                f"moved checkpoints that do not belong to this run to {self.folder.name}/{checkpoint.SET_ASIDE}: "
                + ", ".join(path.name for path in paths)
            )

    def take_over_best(self, runner: Any, source: Path) -> None:
        """After resuming, copy the best weights so far into this folder; if they are missing, forget their metric.

        The tested weights must be those to which the reported validation belongs. A collective.

        Args:
            runner: the runner.
            source: the checkpoint from which the run resumes; the best weights are beside it, in ``best.pth``.

        Raises:
            CheckpointError: the best weights are damaged; the user may still be able to restore them.
        """
        self._resumed_here = source.resolve().parent == self.folder.resolve()
        if self.keep_best and self.best is not None:
            path = source.parent / self.best_path.name
            content: Any = {}
            if runner.distributed_group.is_main and path.is_file():
                content = checkpoint.read(path, trusted=self.trusted)
            meta = content.get("meta", {})
            found = (meta.get("epoch"), meta.get("step"), meta.get("validation", {}).get(self.metric))
            there = runner.distributed_group.gather(found == (self.best_epoch, self.best_step, self.best))[0]
            if not there:
                runner.session.say(
                    f"warning: the best weights so far ({self.metric} {self.best:.6g} after step {self.best_step}) are "
                    f"lost and no longer count: {path} does not exist, or is of another step"
                )
                self.best, self.best_epoch, self.best_step = None, 0, 0
            elif not self._resumed_here:
                runner.session.when_started(
                    functools.partial(checkpoint.write, self.best_path, content, runner.session.run_id)
                )
        judged = self.best is not None if self.keep_best else self.last_step == runner.iter
        if not judged and runner.train_loop.finished:
            runner.train_loop.validation_due = True  # no step is left after which one would come

    def tested(self, runner: Any) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
        """Choose the weights to test at the end of a training: the best, or else the last. A collective.

        Returns:
            The checkpoint to load (None: the model has these weights already), and entries of ``result.json``: the
            file, its epoch and step, under ``validation`` the metric of these weights (None: not validated), and the
            epoch of the best validation, which may be another one with ``checkpoint.keep_best=false``.
        """
        runner.checkpoint_writer.wait()
        runner.distributed_group.barrier()  # other ranks must not read before rank 0 has written
        epoch, step, path, value = runner.epoch, runner.iter, self._path(runner.iter), self.last
        name = f"last weights, step {step}"
        if self.keep_best and self.best is not None:
            epoch, step, path, value = self.best_epoch, self.best_step, self.best_path, self.best
            name = f"{self.folder.name}/best.pth"
        elif self.last_step != step:
            value = None
        content: Any = None
        # The model has the last weights, but a hook may have saved others instead, such as averaged ones.
        if path is self.best_path or (runner.hooks_at("before_save_checkpoint") and path.is_file()):
            content = checkpoint.read(path, mapped=True, whole=False, check=runner.distributed_group.is_main)
        record = {"tested_checkpoint": name, "tested_epoch": epoch, "tested_step": step}
        best_epoch = None if self.best is None else self.best_epoch
        return content, {**record, "best_epoch": best_epoch, "validation": {self.metric: value}}


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
        session: has the notice of preemption and the store of the ranks.
        checkpoints: writes the checkpoint.
    """

    priority = "LOWEST"  # after all hooks whose state is in a checkpoint

    def __init__(self, session: Session, checkpoints: CheckpointHook) -> None:
        self.preempted, self.distributed = session.info.preempted, session.distributed
        self.store: Any = session.store and dist.PrefixStore("preemption", session.store)
        # The ranks of one node share their flag, a file; a file store, which they have then, would grow when asked.
        self._asks_others = session.info.store is None
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
                if self._over.wait(_LOOK_S):
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

    def _wanted(self) -> bool:
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
        if self._wanted():
            self.checkpoints.save(runner, step, validation_due=validation_due, waits=True)
            raise Preempted(step)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """End after this step if wanted; if a validation follows, :meth:`before_validation` decides instead."""
        if not runner.train_loop.validates_after(runner.iter + 1, batch_idx):
            self._check(runner, runner.iter + 1)

    def before_validation(self, runner: Any) -> None:
        """End before a validation if wanted, before hooks replace the weights for it, such as by averaged ones."""
        # While a hook has replaced the weights, no checkpoint can be written, so do not check during this validation.
        others = runner.hooks_at("before_val", "before_val_epoch", "before_val_iter")
        self._common_batches = 0 if others else runner.val_loop.dataloader.sampler.common_batches
        self._check(runner, runner.iter, validation_due=True)

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """End before a batch of the validation if wanted, but only at batches that every rank has."""
        if batch_idx < self._common_batches:
            self._check(runner, runner.iter, validation_due=True)


class OverfitHook(Hook):
    """Stops a training with ``debug.overfit`` when the mean loss of an epoch is near zero, and prints the result."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []  # of the steps of this epoch, on the device
        self.means: list[float] = []  # of each epoch

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Keep the loss."""
        self.losses.append(outputs["loss"].detach())

    def after_train_epoch(self, runner: Any) -> None:
        """Read the losses, take the mean over steps and ranks, and stop the training when it is near zero."""
        loss = runner.distributed_group.sum(torch.stack(self.losses).cpu().double().mean())
        self.means.append(float(loss) / runner.world_size)
        self.losses.clear()
        runner.train_loop.stop_training |= 0 <= self.means[-1] < _NEAR_ZERO * self.means[0]

    def after_train(self, runner: Any) -> None:
        """Print the result."""
        if self.means:
            first, last = self.means[0], self.means[-1]
            advice = "that is not near zero: train longer (max_steps), change optim.lr, or check loss and targets"
            verdict = "the model can learn" if 0 <= last < _NEAR_ZERO * first else advice
            runner.session.say(
                f"overfit: the loss went from {first:.4g} to {last:.4g} in {runner.iter} steps; {verdict}"
            )


def check_finite(runner: Any, state: Mapping[str, Any], step: int) -> None:
    """Refuse to save weights that are not finite, or that follow losses that are not finite. A collective.

    The losses since the last reading are checked, too, because the run would fail at the next reading.

    Args:
        runner: the runner.
        state: the state dict to be saved.
        step: optimizer steps completed.

    Raises:
        RunError: a tensor is not finite; the message has step, rank and the first such tensor. Raised on every rank.
    """
    losses = {f"the {name} since the last reading": value for name, value in runner.losses.sums.items()}
    watched = {name for name, _ in unwrapped(runner.model).named_parameters()} | set(losses)
    by_rank = runner.distributed_group.gather(checkpoint.not_finite({**losses, **state}, watched))
    ranks = [rank for rank, names in enumerate(by_rank) if names]
    if ranks:
        raise RunError(
            f"not finite after step {step}: {shortened(by_rank[ranks[0]], 1)}, on rank {shortened(ranks)}; the weights "
            f"are not saved; {what_to_do(runner)}"
        )


def what_to_do(runner: Any) -> str:
    """Advice for a diverged training and, if there is a checkpoint, the command that resumes with a lower rate.

    A collective, because it waits for the checkpoint that is being written.
    """
    session = runner.session
    try:
        runner.checkpoint_writer.wait()
    except Exception:
        logger.exception("the last checkpoint is not saved")  # only logged: not the reason for the failure
    runner.distributed_group.barrier()
    text = "lower optim.lr, set optim.clip_grad_norm, or use precision=fp32"
    saved = checkpoint.list_checkpoints(session.folder.checkpoints)
    if not saved:
        return text
    which, wanted = "newest", "auto"
    if len(saved) > 1 and session.resumed_from is not None and saved[0].samefile(session.resumed_from):
        which, wanted = (
            "last but one",
            console.display_path(saved[1]),
        )  # this run has resumed from the newest, and diverged
    rate = f"optim.lr={session.config.optim.lr / 2:.4g}"
    command = to_continue(session.config, session.folder, f"resume={wanted}", rate)
    return f"{text}\n  to resume from the {which} checkpoint with half the learning rate: {command}"
