"""Running means of the losses, kept on the device until somebody asks."""

from __future__ import annotations

from typing import Mapping

import torch

__all__ = ["LossMeter"]


class LossMeter:
    """Sums the losses that each step returns, without reading them.

    Reading a loss makes the host wait for the device; at every step that costs more than the step's other overhead
    together. :meth:`read` waits once for all steps since the last reading.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0

    def add(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Add one micro-batch's losses (0-dim tensors on the device)."""
        for name, value in losses.items():
            known = self._sums.get(name)
            if known is None:
                self._sums[name] = value.detach().float().clone()
            else:
                known.add_(value.detach())
        self._count += 1

    def read(self) -> dict[str, float]:
        """Means since the last reading, and start anew. The one place where training waits for the device."""
        if not self._sums:
            return {}
        values = torch.stack(list(self._sums.values())).cpu().tolist()
        means = {name: value / self._count for name, value in zip(self._sums, values)}
        self._sums, self._count = {}, 0
        return means
