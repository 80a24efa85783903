"""CPU fallbacks of training steps: operators that leave the device, and bytes, where the backend can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.hardware.backend import Backend

__all__ = ["LeftDevice"]


class LeftDevice:
    """Counts operators and bytes that have left the device of this rank, in training steps alone.

    Args:
        backend: counts them (:meth:`exp.hardware.backend.Backend.fallbacks`).
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._since: Mapping[str, tuple[int, int]] | None = None
        self._interval: dict[str, tuple[int, int]] = {}
        self._total: dict[str, tuple[int, int]] = {}
        self._steps = 0

    def begin(self) -> None:
        """Training begins, or continues after something else."""
        self._since = self._backend.fallbacks()

    def pause(self) -> None:
        """Training is interrupted, by a validation."""
        now = self._backend.fallbacks()
        if now is not None and self._since is not None:
            for name, counts in now.items():
                before = self._since.get(name, (0, 0))
                _add(self._interval, name, counts[0] - before[0], counts[1] - before[1])
            self._since = now

    def read(self, steps: int) -> dict[str, float | None]:
        """Figures of this rank for ``metrics.jsonl``, over the ``steps`` steps since the last reading.

        Returns:
            Calls and bytes per step; None for bytes that are not counted. Empty if nothing is.
        """
        self.pause()
        if self._since is None:
            return {}
        interval, self._interval = self._interval, {}
        for name, counts in interval.items():
            _add(self._total, name, *counts)
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
        ordered = sorted(totals[rank].items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
        operators = {name: _per_step({name: counts}, self._steps) for name, counts in ordered}
        return {"rank": rank, **sums[rank], "operators": operators}


def _add(counts: dict[str, tuple[int, int]], name: str, calls: int, size: int) -> None:
    if calls:
        before = counts.get(name, (0, 0))
        counts[name] = (before[0] + calls, before[1] + size)


def _per_step(counts: Mapping[str, tuple[int, int]], steps: int) -> dict[str, Any]:
    """Calls and bytes; None for bytes if there are calls only."""
    calls, size = sum(each[0] for each in counts.values()), sum(each[1] for each in counts.values())
    return {"calls_per_step": calls / steps, "bytes_per_step": None if calls and not size else size / steps}
