"""Running means of the losses, kept on the device until somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

import torch

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed

__all__ = ["LossMeter", "mean_over_ranks"]


class LossMeter:
    """Sums the losses that each step returns, without reading them.

    Reading a loss makes the host wait for the device; at every step that costs more than the step's other overhead
    together. :meth:`read` waits once for all steps since the last reading.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Add one micro-batch's losses (0-dim tensors on the device)."""
        for name, value in losses.items():
            known = self._sums.get(name)
            if known is None:
                self._sums[name] = value.detach().float().clone()
            else:
                known.add_(value.detach())
            self._counts[name] = self._counts.get(name, 0) + 1

    def sums(self) -> dict[str, torch.Tensor]:
        """The sums since the last reading, on the device; they go on."""
        return dict(self._sums)

    def read(self) -> dict[str, float]:
        """Means since the last reading, of each loss over the micro-batches that had it, and start anew.

        The one place where training waits for the device.
        """
        if not self._sums:
            return {}
        values = torch.stack(list(self._sums.values())).cpu().tolist()
        means = {name: value / self._counts[name] for name, value in zip(self._sums, values)}
        self._sums, self._counts = {}, {}
        return means


def mean_over_ranks(
    own: Mapping[str, float], distributed: Distributed
) -> tuple[dict[str, float], list[Mapping[str, float]]]:
    """The mean of each loss over the ranks that have it. A collective: every rank has to call.

    Args:
        own: this rank's losses by name.
        distributed: the ranks.

    Returns:
        The means, the same on every rank, and each rank's own, by rank.
    """
    by_rank: list[Mapping[str, float]] = distributed.gather(dict(own))
    means = {}
    for name in dict.fromkeys(name for each in by_rank for name in each):
        values = [each[name] for each in by_rank if name in each]
        means[name] = sum(values) / len(values)
    return means, by_rank
