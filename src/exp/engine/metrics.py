"""Metrics that do not depend on how samples were batched or spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed

__all__ = ["ForecastMetrics"]


class ForecastMetrics:
    """Mean squared and absolute error over all windows, horizon steps and channels (standardised units).

    Each window's error is one float32 mean, computed on the device; windows are summed in float64 on the CPU, once, at
    the end. So the result is the same for any batch size and world size to the last digits that float32 kernels keep,
    and evaluation never waits for the device in between.

    Args:
        per_position: also keep errors per channel and per horizon step.
    """

    def __init__(self, per_position: bool = False) -> None:
        self.per_position = per_position
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._windows: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []
        self.channel: dict[str, list[float]] = {}
        self.step: dict[str, list[float]] = {}

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in one batch.

        Args:
            outputs: forecasts (B, H, C), any floating dtype.
            batch: its ``y`` (B, H, C) is the truth.
        """
        error = outputs.float() - batch["y"]
        squared, absolute = error.square(), error.abs()
        self._windows.append(torch.stack([squared.mean(dim=(1, 2)), absolute.mean(dim=(1, 2))]))
        if self.per_position:
            self._positions.append(torch.stack([squared.sum(dim=0), absolute.sum(dim=0)]))

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """``{"mse", "mae"}`` over all ranks; fills :attr:`channel` and :attr:`step` where they were asked for."""
        totals = torch.zeros(3, dtype=torch.float64)
        if self._windows:
            windows = torch.cat(self._windows, dim=1).cpu().double()
            totals[:2], totals[2] = windows.sum(dim=1), windows.shape[1]
        distributed.sum(totals)
        count = totals[2].item()
        if self.per_position:
            self._compute_positions(distributed, count)
        return {"mse": totals[0].item() / count, "mae": totals[1].item() / count}

    def _compute_positions(self, distributed: Distributed, count: float) -> None:
        shape = tuple(self._positions[0].shape) if self._positions else None
        # A rank without a window still has to take part in the sum.
        shape = next(other for other in distributed.gather(shape) if other is not None)
        local = torch.zeros(shape, dtype=torch.float64)
        for part in self._positions:
            local += part.cpu().double()
        mean = distributed.sum(local) / count  # (2, H, C)
        for index, name in enumerate(("mse", "mae")):
            self.channel[name] = mean[index].mean(dim=0).tolist()
            self.step[name] = mean[index].mean(dim=1).tolist()
