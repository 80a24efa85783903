"""What training steps send from the device to the CPU and back, operator by operator, where the backend can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.hardware.backend import Backend

__all__ = ["LeftDevice"]


class LeftDevice:
    """Counts operators and bytes that have left the device of this rank, in training steps alone.

    Args:
        backend: is asked by :meth:`exp.hardware.backend.Backend.fallbacks`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._since: Mapping[str, tuple[int, int]] | None = None
        self._interval: dict[str, tuple[int, int]] = {}
        self._total: dict[str, tuple[int, int]] = {}
        self._steps = 0

    def begin(self) -> None:
        """Training begins, or goes on after something else."""
        self._since = self._backend.fallbacks()

    def pause(self) -> None:
        """Training is interrupted, by a validation."""
        now = self._backend.fallbacks()
        if now is None or self._since is None:
            return
        for name, counts in now.items():
            before = self._since.get(name, (0, 0))
            _add(self._interval, name, counts[0] - before[0], counts[1] - before[1])
        self._since = now

    def read(self, steps: int) -> dict[str, float | None]:
        """Figures of this rank for ``metrics.jsonl``, over the ``steps`` steps since the last reading.

        Returns:
            Calls and bytes per step; None for bytes that are not counted. Empty where nothing is.
        """
        self.pause()
        if self._since is None:
            return {}
        interval, self._interval = self._interval, {}
        for name, counts in interval.items():
            _add(self._total, name, *counts)
        self._steps += steps
        calls, size = _per_step(interval, steps)
        return {"left_device_calls_per_step": calls, "left_device_bytes_per_step": size}

    def summary(self, distributed: Distributed) -> dict[str, Any] | None:
        """Figures for ``result.json``, of the rank that sends most: the others wait for it. A collective.

        Returns:
            ``rank``, ``calls_per_step``, ``bytes_per_step``, and the same two by name in ``operators``, most bytes
            first; None where a rank cannot tell, or nothing was trained.
        """
        known = self._total if self._since is not None and self._steps else None
        by_rank: list[dict[str, tuple[int, int]] | None] = distributed.gather(known)
        totals = [total for total in by_rank if total is not None]
        if len(totals) < len(by_rank):
            return None
        sums = [_per_step(total, self._steps) for total in totals]
        rank = max(range(len(sums)), key=lambda number: (sums[number][1] or 0, sums[number][0]))
        calls, size = sums[rank]
        operators = {
            name: dict(zip(("calls_per_step", "bytes_per_step"), _per_step({name: counts}, self._steps)))
            for name, counts in sorted(totals[rank].items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
        }
        return {"rank": rank, "calls_per_step": calls, "bytes_per_step": size, "operators": operators}


def _add(counts: dict[str, tuple[int, int]], name: str, calls: int, size: int) -> None:
    if calls:
        before = counts.get(name, (0, 0))
        counts[name] = (before[0] + calls, before[1] + size)


def _per_step(counts: Mapping[str, tuple[int, int]], steps: int) -> tuple[float, float | None]:
    """Calls and bytes; None for bytes where there are calls only."""
    calls, size = sum(each[0] for each in counts.values()), sum(each[1] for each in counts.values())
    return calls / steps, None if calls and not size else size / steps
