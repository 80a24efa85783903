"""Counts operators that ran on the CPU because the device has no kernel for them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from exp.distributed import Distributed
    from exp.hardware.backend import Backend


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
