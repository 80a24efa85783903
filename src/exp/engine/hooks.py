"""The engine's hooks that report losses and metrics: to ``metrics.jsonl``, to trackers, and to the terminal."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Container, Mapping, Sequence

import numpy as np
import torch
from mmengine.hooks import Hook

from exp import console
from exp.data.loader import tensors_of
from exp.errors import ConfigError, RunError
from exp.runs.files import to_json, write_atomically
from exp.runs.folder import read_records

if TYPE_CHECKING:
    from rich.console import Console

    from exp.distributed import Distributed
    from exp.hardware.backend import Backend
    from exp.session import Session

_MOST_METRICS = 4  # metrics of a validation on the terminal; metrics.jsonl has all
_NEAR_ZERO = 0.01  # as a share of the first loss
_REDRAW_SECONDS = 0.25  # of the bar on a terminal
_LINE_SECONDS = 30.0  # between two lines elsewhere
_BAR_WIDTH = 20  # characters
_TRAINED = "loss"  # the key of the loss that is minimized


def _wrong_losses(returned: str) -> ConfigError:
    return ConfigError(f"model: train_step must return a dict of 0-dim tensors such as {{'loss': ...}}, not {returned}")


class LossMeter:
    """Keeps the losses of each step on the device, without reading them.

    To read a loss, the host must wait for the device. At every step this would take longer than all other overhead of a
    step. :meth:`read` waits once for all steps since the last reading. A step launches one kernel for each loss: the
    trained one is copied, so that each step's value is known; the others are added up.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}  # 0-dim, float32, on the device
        self._counts: dict[str, float] = {}  # not whole numbers after a resume with another number of ranks
        self._single: list[torch.Tensor] = []  # the trained loss of each micro-batch since the last reading

    def __bool__(self) -> bool:
        """Whether there is a loss since the last reading."""
        return bool(self._counts)

    def add(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Add one micro-batch's losses (0-dim tensors on the device).

        Raises:
            ConfigError: the model's own ``train_step`` returns something else.
        """
        if not isinstance(losses, dict):
            raise _wrong_losses(f"a {type(losses).__name__}")
        for name, value in losses.items():
            if not isinstance(value, torch.Tensor) or value.dim():
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
                raise _wrong_losses(f"{name}, a {type(value).__name__}{shape}")
            if name == _TRAINED:  # a copy: a compiled model may reuse the memory of its outputs
                self._single.append(value.detach().float().clone())
            elif name in self._sums:
                self._sums[name].add_(value.detach())
            else:
                self._sums[name] = value.detach().float().clone()
            self._counts[name] = self._counts.get(name, 0) + 1

    def read(self) -> tuple[dict[str, float], list[float]]:
        """Read the losses since the last reading, and forget them.

        This is the only place where a training step waits for the device.

        Returns:
            The mean of each loss, over the micro-batches that had it; and the trained loss of each micro-batch.
        """
        state, single = self._read()
        self._sums, self._counts, self._single = {}, {}, []
        return {name: total / count for name, (total, count) in state.items()}, single

    def state(self) -> dict[str, tuple[float, float]]:
        """Sum and count of each loss since the last reading, for checkpoints; waits for the device once."""
        return self._read()[0]

    def _read(self) -> tuple[dict[str, tuple[float, float]], list[float]]:
        values = [*self._sums.values(), *self._single]
        read = torch.stack(values).cpu() if values else torch.zeros(0)
        sums, single = dict(zip(self._sums, read.tolist())), read[len(self._sums) :]
        if len(single):  # in float32, and in this order, as on the device
            total = sum(single.numpy(), np.float32(sums.get(_TRAINED, 0.0)))
            sums[_TRAINED] = float(total)
        return {name: (sums[name], count) for name, count in self._counts.items()}, single.tolist()

    def totals(self) -> dict[str, torch.Tensor]:
        """A tensor of each loss since the last reading, on the device, that is not finite if one of them is not."""
        single = {_TRAINED: torch.stack(self._single).sum()} if self._single else {}
        return {**self._sums, **single}

    def load(
        self,
        states: Sequence[Mapping[str, Sequence[float]]],
        saved_parts: Sequence[int],
        parts: Sequence[int],
        rank: int,
        device: torch.device,
    ) -> None:
        """Restore the results of :meth:`state`; if ranks have other parts of a batch now, each gets the mean of all.

        Args:
            states: of each rank that has saved.
            saved_parts: samples of these ranks in a micro-batch.
            parts: samples of the ranks now.
            rank: this rank.
            device: of this rank.
        """
        if list(saved_parts) == list(parts):
            loaded, size = [(states[rank], 1)], 1
        else:  # the global batch is the same, so larger micro-batches are fewer
            loaded, size = [*zip(states, saved_parts)], sum(parts)
        for name in dict.fromkeys(name for state, _ in loaded for name in state):
            total, count = (
                sum(state[name][i] * part for state, part in loaded if name in state) / size for i in (0, 1)
            )
            self._sums[name], self._counts[name] = torch.tensor(total, dtype=torch.float32, device=device), count


class MetricsHook(Hook):
    """Reads the losses every ``log_every`` steps, and logs them to file, terminal and trackers.

    All ranks read at the same steps, because the logged loss is the mean over all samples. Only rank 0 writes.

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
        self.fallback_counter = FallbackCounter(session.backend)
        self._mark = self._paused = 0.0
        self._steps_since_mark = self._staged = 0
        self._losses = self._rate = ""  # texts of the latest ones for the terminal
        self._loop: Any = None

    def before_train(self, runner: Any) -> None:
        """Show the bar, and have the lines of steps removed that will be trained again."""
        self._loop = runner.train_loop
        again = ["val"] * self._loop.validation_due + ["train"] * bool(runner.losses)
        runner.session.on_start(functools.partial(self._truncate, runner.iter, again))
        self._staged = runner.backend.collectives.staged_bytes
        self.progress.start(self._loop, f"{'compiling, ' if runner.session.config.compile else ''}first step ...")

    def before_train_epoch(self, runner: Any) -> None:
        """Start measuring the time, which excludes evaluation."""
        self.fallback_counter.begin()
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
        if runner.losses:
            self._read(runner, runner.iter)

    def _read(self, runner: Any, step: int, batch: Any = None) -> None:
        group = runner.distributed_group
        times, (losses, single) = runner.rank_times, runner.losses.read()
        gathered = group.gather((losses, None if times is None else times.read(), single))
        by_rank: list[dict[str, float]] = [rank_losses for rank_losses, *_ in gathered]
        weights = self._loop.sampler.weights
        now, steps = time.perf_counter(), self._steps_since_mark
        seconds, samples = now - self._mark, steps * self._loop.sampler.global_batch_size
        self._mark, self._steps_since_mark = now, 0
        self.train_seconds += seconds
        self.samples += samples
        fallbacks = self.fallback_counter.read(steps) if steps else {}
        record: dict[str, Any] = {}
        for name in dict.fromkeys(name for rank_losses in by_rank for name in rank_losses):
            values = [(losses[name], weight) for losses, weight in zip(by_rank, weights) if name in losses]
            # The mean over the samples of the ranks that have it.
            record[name] = value = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
            if not math.isfinite(value):
                ranks = ", ".join(
                    str(rank) for rank, losses in enumerate(by_rank) if not math.isfinite(losses.get(name, 0))
                )
                raise RunError(
                    f"{name} is {value} on rank {ranks} within the {steps} steps before step {step} (epoch "
                    f"{runner.epoch + 1}){_nan_hint(batch)}",
                    *runner.divergence_advice(),
                )
        if not record:
            return
        self._losses = "  ".join(f"{name} {value:.4f}" for name, value in record.items())
        record["lr"] = runner.optim_wrapper.get_lr()["lr"][0]
        if runner.optim_wrapper.grad_norm is not None:
            record["grad_norm"] = float(runner.optim_wrapper.grad_norm)
        if steps:  # none if the run has resumed after the last step of an epoch
            record["samples_per_second"] = samples / seconds
        if group.fallback is not None and steps:
            staged, self._staged = self._staged, runner.backend.collectives.staged_bytes
            record["staged_bytes_per_step"] = (self._staged - staged) / steps
        record.update(fallbacks)
        if group.is_main and runner.device.type != "cpu":  # a processor has no memory of its own
            record.update(_device_usage(runner.backend))
        slow = (
            times.compare([times_of_rank for _, times_of_rank, _ in gathered], seconds / steps, step)
            if times and steps
            else []
        )
        of_steps = _loss_of_steps([single for *_, single in gathered], weights, self._loop.accumulate)
        self._write(runner, "train", step, record, slow_ranks=slow, loss_of_steps=of_steps if len(of_steps) > 1 else [])
        self._rate = f"lr {record['lr']:.1e}  {record.get('samples_per_second', 0.0):,.0f} samples/s"
        self.progress.set_text([self._losses, self._rate], line=False)

    def before_val_epoch(self, runner: Any) -> None:
        """Pause the training time during a validation within an epoch."""
        self.pause()

    def pause(self) -> None:
        """Stop counting time and CPU fallbacks, until :meth:`resume`."""
        self._paused = time.perf_counter()
        self.fallback_counter.pause()

    def resume(self) -> None:
        """Count again."""
        self._mark += time.perf_counter() - self._paused
        self.fallback_counter.begin()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the validation metrics."""
        self.resume()
        units, metrics = runner.val_loop.evaluator.units, metrics or {}
        self._write(runner, "val", runner.iter, metrics, units=units)
        first = list(metrics.items())[:_MOST_METRICS]
        texts = [f"val_{name} {console.format_metric(value)}" for name, value in first]
        differ = len({units.get(name) for name, _ in first}) > 1
        for number, (name, _) in enumerate(first):  # a unit of all stands once
            if name in units and (differ or number == len(first) - 1):
                texts[number] += f" ({units[name]})"
        self.progress.set_text([self._losses, *texts, self._rate], line=True)

    def after_test_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Record the test metrics."""
        self._write(runner, "test", runner.iter, metrics or {}, units=runner.test_loop.evaluator.units)

    def after_train(self, runner: Any) -> None:
        """Remove the bar."""
        self.progress.stop()

    def _truncate(self, step: int, again: Container[str]) -> None:
        """Remove the lines that a resumed run writes again. On a full disk the file stays as it is.

        Args:
            step: optimizer steps completed; later ones are trained again.
            again: the splits of which a line for ``step`` itself is written again, too. Any line of the test is.
        """

        def is_kept(record: Mapping[str, Any]) -> bool:
            return record["split"] != "test" and (record["step"], record["split"] in again) <= (step, False)

        if self.path.is_file():
            lines = self.path.read_bytes().splitlines()
            write_atomically(
                self.path, b"".join(line + b"\n" for line in lines if any(map(is_kept, read_records([line]))))
            )

    def _write(self, runner: Any, split: str, step: int, values: Mapping[str, float | None], **others: Any) -> None:
        """Append a line to ``metrics.jsonl``; pass values to trackers, and to MMEngine's message hub.

        ``others``, unless they are empty, are for the file alone.
        """
        scalars = {f"{split}/{name}": value for name, value in values.items() if value is not None}
        runner.share_scalars(split, scalars)
        if runner.distributed_group.is_main:
            record = {"split": split, "step": step, "epoch": runner.epoch, **values}
            with self.path.open("a", encoding="utf-8") as file:  # closed, so that other machines see the line (NFS)
                file.write(to_json({**record, **{key: other for key, other in others.items() if other}}) + "\n")
            runner.session.log_scalars({name: float(value) for name, value in scalars.items()}, step)


def _loss_of_steps(by_rank: Sequence[Sequence[float]], weights: Sequence[float], accumulate: int) -> list[float]:
    """The mean loss of each step, over its samples on all ranks, with the nine digits of a float32."""
    steps = min(map(len, by_rank)) // accumulate
    of_ranks = (
        [sum(single[step * accumulate : (step + 1) * accumulate]) for step in range(steps)] for single in by_rank
    )
    total = sum(weights) * accumulate
    return [
        float(f"{sum(value * weight for value, weight in zip(values, weights)) / total:.9g}")
        for values in zip(*of_ranks)
    ]


def _nan_hint(batch: Any) -> str:
    """Text for the message about a loss that is not finite, if the latest batch has NaN; reads the batch."""
    parts = batch.items() if isinstance(batch, dict) else ()
    names = ", ".join(
        repr(key) for key, part in parts if any(tensor.cpu().isnan().any() for tensor in tensors_of(part))
    )
    hint = f"; the latest batch has nan in {names}: leave those values out of the loss, or fix the data"
    return hint if names else ""


def _device_usage(backend: Backend) -> dict[str, float]:
    """The most memory used on this rank's device, and its utilization, if the backend knows them."""
    usage = backend.usage()
    most = usage.get("max_allocated", usage.get("allocated"))
    memory = {} if most is None else {"memory_gib": most / 2**30}
    return {**memory, **{name: usage[name] for name in ("utilization_percent",) if usage.get(name) is not None}}


class OverfitHook(Hook):
    """Stops a training with ``debug.overfit`` when the mean loss of an epoch is near zero, and prints the result."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []  # of the steps of this epoch, on the device
        self.means: list[float] = []  # of each epoch

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Keep the loss."""
        self.losses.append(outputs["loss"].detach())

    def after_train_epoch(self, runner: Any) -> None:
        """Read the losses, take the mean over steps and samples, and stop the training when it is near zero."""
        weight = runner.train_loop.sampler.weights[runner.rank]
        loss = runner.distributed_group.sum(torch.stack(self.losses).cpu().double().mean() * weight)
        self.means.append(float(loss) / runner.world_size)
        self.losses.clear()
        runner.train_loop.stop_training |= 0 <= self.means[-1] < _NEAR_ZERO * self.means[0]

    def after_train(self, runner: Any) -> None:
        """Print the result."""
        if self.means:
            first, last = self.means[0], self.means[-1]
            advice = "that is not near zero: train longer (max_steps), change optim.lr, or check loss and targets"
            verdict = "the model can learn" if 0 <= last < _NEAR_ZERO * first else advice
            runner.session.print(
                f"overfit: the loss went from {first:.4g} to {last:.4g} in {runner.iter} steps; {verdict}"
            )


# -- the terminal ------------------------------------------------------------------------------------------------------


class Progress:
    """Shows the progress of training on rank 0: a line per validation, and a bar below, or a line every 30 seconds.

    Args:
        console: where to print; None: print nothing (other ranks).
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self._loop: Any = None
        self._bar: Any = None
        self._drawn, self._started_at, self._step = 0.0, (0.0, 0), 0
        self._texts: Sequence[str] = ()

    def start(self, loop: Any, first: str) -> None:
        """Show the bar.

        Args:
            loop: the :class:`exp.engine.loops.TrainLoop`.
            first: text until the first losses are known.
        """
        self._loop, self._step, self._drawn = loop, loop.iter, time.monotonic()
        self._started_at = (self._drawn, loop.iter)
        if self.console is None or not self.console.is_terminal:
            return
        from rich import progress

        bar = progress.BarColumn(bar_width=_BAR_WIDTH), progress.TaskProgressColumn()
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

    def set_text(self, texts: Sequence[str], line: bool) -> None:
        """Change the text, the most important part first.

        Args:
            texts: its parts; on a terminal, those that a line has room for.
            line: print it as a line that stays; without a bar, a line is also printed if the last one is old.
        """
        self._texts = texts
        if line or (self._bar is None and time.monotonic() - self._drawn >= _LINE_SECONDS):
            self._show(line=True)

    def _show(self, line: bool = False) -> None:
        if self.console is None or self._loop is None:
            return
        self._drawn, loop, (started, first) = time.monotonic(), self._loop, self._started_at
        epochs, rest = divmod(self._step + loop.step_offset, loop.steps_per_epoch)
        epoch, texts, remaining = f"epoch {max(epochs + bool(rest), 1)}/{loop.max_epochs}", [*self._texts], []
        if self._step > first:  # an estimate without early stopping; the mean time per step includes validation
            seconds = (self._drawn - started) / (self._step - first) * (loop.max_iters - self._step)
            remaining = [f"ETA {timedelta(seconds=round(seconds))}"]
        if line:
            position = [f"{epoch}  step {self._step}" if rest else epoch]
            texts = [*position, *texts, *remaining]
            text = "  ".join(texts if self._bar is None else console.fitting(texts, self.console.width))
            self.console.print(text, soft_wrap=True, markup=False)
        if self._bar is not None:
            text = "  ".join(
                console.fitting([*remaining, *self._texts], self.console.width - len(epoch) - _BAR_WIDTH - 8)
            )
            self._bar.update(self._bar.task_ids[0], completed=self._step, description=epoch, text=text, refresh=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


# -- operators that run on the CPU -------------------------------------------------------------------------------------


class FallbackCounter:
    """Counts CPU fallbacks in training steps: operators of this rank that ran on the CPU, and the copied bytes.

    Args:
        backend: counts them (:meth:`exp.hardware.backend.Backend.fallbacks`).
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._since: Counter[tuple[str, int]] | None = None  # by (operator, 0) calls, and by (operator, 1) bytes
        self._total: Counter[tuple[str, int]] = Counter()
        self._last_total, self._steps = self._total, 0  # at the last reading

    def begin(self) -> None:
        """Start or continue counting."""
        fallbacks = self._backend.fallbacks()
        counts_by_kind = {
            (name, kind): n for name, counts in (fallbacks or {}).items() for kind, n in enumerate(counts)
        }
        self._since = None if fallbacks is None else Counter(counts_by_kind)

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
        interval, self._last_total = self._total - self._last_total, self._total
        self._steps += steps
        return {f"cpu_fallback_{key}": value for key, value in _per_step(interval, steps).items()}

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
        rank = max(
            range(len(sums)), key=lambda index: (sums[index]["bytes_per_step"] or 0, sums[index]["calls_per_step"])
        )
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
    calls = sum(count for (_, kind), count in counts.items() if kind == 0)
    size = sum(count for (_, kind), count in counts.items() if kind == 1)
    return {"calls_per_step": calls / steps, "bytes_per_step": None if calls and not size else size / steps}
