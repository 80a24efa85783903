"""Each rank's own time of a training step, and the name of a slow rank.

Ranks wait for each other in every step, so whole steps take equally long on all of them. What a rank does alone
differs: it gets its batch (data), computes the forward pass, and the backward pass until its last gradient is ready.
Only after that does DDP wait for other ranks.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np
from torch import nn

from exp.distributed import AveragingDataParallel
from exp.engine.wrapper import has_own_step, is_sharded, unwrapped

if TYPE_CHECKING:
    import torch

    from exp.session import Session

logger = logging.getLogger(__name__)

_PARTS = ("data", "forward", "backward")
_INTERVALS = 3
_SLOWER = 1.25  # than the median rank, in each interval
_LEAST_SHARE = 0.1  # of a step: a smaller delay is not worth a warning
_STANDARD_ERRORS = 3.0  # by which the difference of the means exceeds the limit: a busy machine delays ranks at random
_WARM_UP_STEPS = 2  # kernels are chosen or compiled in the first; DDP arranges its buckets anew in the second
_LEAST_STEPS, _LEAST_SECONDS = 5, 1.0  # of a rank's own in an interval; shorter ones are joined
_MOST_STEPS = 64  # of an interval that are measured, the last ones


class RankTimes:
    """Measures this rank's own times, and compares those of all ranks.

    On the CPU the host's clock counts. A card computes later than the host calls it, so there the card's events count;
    they are read after the losses, when they are complete, so that the host waits for nothing more.

    Args:
        model: the wrapped model.
        session: has the device, the backend and the descriptions of all devices.
        accumulate: micro-batches per optimizer step.

    Attributes:
        parts: what is measured.
        unmeasured: why a part is not measured; None: all are.
        slow: the slow ranks that were found, for ``result.json``.
    """

    def __init__(self, model: nn.Module, session: Session, accumulate: int) -> None:
        self.session, device, backend = session, session.device.type, session.backend
        self.slow: list[dict[str, Any]] = []
        self._event = None if device == "cpu" else _timed_events(backend.torch_module)
        self.parts: tuple[str, ...] = _PARTS
        self.unmeasured = _why_passes_wait(model)
        if self.unmeasured is None and device != "cpu" and self._event is None:
            self.unmeasured = f"{device} has no timed events, and computes later than it is called"
        if self.unmeasured is not None:
            self.parts = _PARTS[:1]
        elif self._event is not None and not backend.capabilities.pinned_memory:
            self.parts, self.unmeasured = _PARTS[1:], f"copies from pageable memory to {device} wait for its other work"
        # Ranks may have cards of several kinds; only what all of them measure can be compared.
        by_rank = session.distributed.gather((self.parts, self.unmeasured))
        self.parts = tuple(part for part in self.parts if all(part in parts for parts, _ in by_rank))
        self.unmeasured = next((reason for _, reason in by_rank if reason is not None), None)
        logger.info("measured of each rank's own time: %s; %s", ", ".join(self.parts), self.unmeasured or "all parts")
        self._calls = accumulate * len(self.parts)  # per step
        self._running: tuple[str, Any] | None = None
        self._step: list[tuple[str, Any, Any]] = []
        self._steps: deque[list[tuple[str, Any, Any]]] = deque(maxlen=_MOST_STEPS)
        self._warm_up = _WARM_UP_STEPS
        self._window: deque[tuple[Any, float]] = deque(maxlen=_INTERVALS)
        self._interval: Any = 0.0
        self._sums: Any = np.zeros((session.info.world_size, 2 + len(self.parts)))
        self._hooks: dict[nn.Parameter, Any] = {}
        self._last: nn.Parameter | None = None
        self._waits_in_backward = not isinstance(model, AveragingDataParallel)
        if "backward" in self.parts and self._waits_in_backward:
            trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
            self._hooks = {each: each.register_hook(functools.partial(self._arrive, each)) for each in trained}

    # -- called in each step ---------------------------------------------------------------------------------------

    def start(self, part: str) -> None:
        """Start ``data``, ``forward`` or ``backward``; what was running ends."""
        self.stop()
        if part in self.parts:
            self._running = part, self._now(part)

    def stop(self) -> None:
        """End what is running."""
        if self._running is not None:
            part, started = self._running
            self._step.append((part, started, self._now(part)))
            self._running = None

    def end_backward(self) -> None:
        """The backward pass has returned: with DDP later than the last gradient, which has stopped the time."""
        if self._waits_in_backward:
            self._running = None  # the gradient did not come: this step is not counted
        else:
            self.stop()

    def end_step(self) -> None:
        """Keep the times of this step. Of all hooks on gradients only that on the last to come stays."""
        if self._warm_up:
            self._warm_up -= 1
            for parameter in [each for each in self._hooks if each is not self._last]:
                self._hooks.pop(parameter).remove()
        elif self._step and len(self._step) == self._calls:
            self._steps.append(self._step)
        self._step = []

    def _arrive(self, parameter: nn.Parameter, _gradient: torch.Tensor) -> None:
        self._last = parameter
        self.stop()

    def _now(self, part: str) -> Any:
        """A reading of the host's clock in seconds, or an event."""
        if self._event is None or part == "data":
            return time.perf_counter()
        event = self._event()
        event.record()
        return event

    # -- called at every reading of the losses ---------------------------------------------------------------------

    def read(self) -> list[float]:
        """This rank's figures since the last reading, for :meth:`compare`; call it after the losses have been read.

        Returns:
            The number of steps, the sum of their squared times, and the sum of each part, in seconds.
        """
        complete = [step for step in self._steps if isinstance(step[-1][2], float) or step[-1][2].query()]
        seconds = np.zeros((len(complete), len(self.parts)))
        for row, step in zip(seconds, complete):
            for part, start, end in step:
                seconds_of_part = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
                row[self.parts.index(part)] += seconds_of_part
        self._steps.clear()
        return [len(complete), float(np.square(seconds.sum(1)).sum()), *seconds.sum(0).tolist()]

    def compare(self, by_rank: Sequence[Sequence[float]], step_seconds: float, step: int) -> list[dict[str, Any]]:
        """Find ranks that have been slow for three intervals; each is reported once.

        A rank is slow if its own time was longer than the median rank's by 25 % in each interval, over all of them by
        three standard errors more than that, and by a tenth of a step. Of two ranks the faster one is the median.

        Args:
            by_rank: the results of :meth:`read`.
            step_seconds: mean time of a step in this interval.
            step: number of the step, for the report.
        """
        self._interval = self._interval + np.asarray(by_rank)
        if self._interval[:, 0].min() < _LEAST_STEPS or self._interval[:, 2:].sum(1).max() < _LEAST_SECONDS:
            return []
        self._window.append((self._interval, step_seconds))
        self._sums, self._interval = self._sums + self._interval, 0.0
        if len(self._window) < _INTERVALS:
            return []
        middle = (len(by_rank) - 1) // 2
        is_slow = np.ones(len(by_rank), dtype=bool)
        for rows, _ in self._window:
            busy = rows[:, 2:].sum(1) / rows[:, 0]
            is_slow &= busy > _SLOWER * np.sort(busy)[middle]
        pooled: Any = sum(rows for rows, _ in self._window)
        steps, parts = pooled[:, 0], pooled[:, 2:] / pooled[:, :1]
        busy, medians = parts.sum(1), np.sort(parts, axis=0)[middle]
        median = np.argsort(busy)[middle]
        errors = np.maximum(pooled[:, 1] / steps - busy**2, 0.0) / np.maximum(steps - 1, 1)  # squared
        is_slow &= busy - _SLOWER * busy[median] > _STANDARD_ERRORS * np.sqrt(errors + errors[median])
        is_slow &= busy - busy[median] > _LEAST_SHARE * np.mean([seconds for _, seconds in self._window])
        is_slow[[slow_rank["rank"] for slow_rank in self.slow]] = False
        slow_ranks: list[dict[str, Any]] = [
            {
                "rank": int(rank),
                "part": self.parts[int(np.argmax(parts[rank] - medians))],
                "step": step,
                "seconds": dict(zip(self.parts, parts[rank].tolist())),
                "median_seconds": dict(zip(self.parts, medians.tolist())),
            }
            for rank in np.flatnonzero(is_slow)
        ]
        self.slow += slow_ranks
        for slow in slow_ranks:
            device, part = self.session.devices[slow["rank"]], slow["part"]
            own_ms, median_ms = (1e3 * slow[key][part] for key in ("seconds", "median_seconds"))
            suspects = "its disk and its loader processes" if part == "data" else "its card and the load of its host"
            self.session.warn(
                f"rank {slow['rank']} ({device['device']}, {device['name']}, on {device['host']}) is slow, and the "
                f"others wait for it: {part} takes {own_ms:.3g} ms of a step, {median_ms:.3g} ms on the median rank; "
                f"look at {suspects}"
            )
        return slow_ranks

    def summary(self) -> dict[str, Any]:
        """For ``result.json``: mean seconds of each part in a step, by rank; why one is missing; the slow ranks."""
        means = (self._sums[:, 2:] / np.maximum(self._sums[:, :1], 1)).T.tolist()
        return {"seconds": dict(zip(self.parts, means)), "unmeasured": self.unmeasured, "slow": self.slow}


def _timed_events(module: Any) -> Callable[[], Any] | None:
    """Makes events of a card between which times can be read; None: ``torch.<device_type>`` has none."""
    try:
        make = functools.partial(module.Event, enable_timing=True)
        make().record()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
    return make


def _why_passes_wait(model: nn.Module) -> str | None:
    """Why forward and backward pass of a wrapped model include waiting for other ranks; None: they do not."""
    bare = unwrapped(model)
    if is_sharded(bare):
        return "with wrapper=fsdp ranks wait for each other within both passes"
    if has_own_step(bare):
        return "the model has a train_step of its own, which updates the weights between its passes"
    if any(isinstance(module, nn.SyncBatchNorm) for module in bare.modules()):
        return "synchronized batch norms wait for other ranks within both passes"
    if getattr(model, "broadcast_buffers", False) and any(True for _ in bare.buffers()):
        return "with wrapper.broadcast_buffers=true each forward pass waits for rank 0"
    return None
