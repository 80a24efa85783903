"""Metrics that do not depend on how samples were batched or spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import torch

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed

__all__ = ["ForecastMetrics", "Table"]


class Table(NamedTuple):
    """Metrics in detail.

    Attributes:
        name: of the table, such as ``per_class``.
        key: what a row is, such as ``class``.
        rows: name of each row.
        columns: values by metric, one for each row.
    """

    name: str
    key: str
    rows: Sequence[str]
    columns: dict[str, list[float]]


class ForecastMetrics:
    """Mean squared and absolute error over all windows, horizon steps and channels (standardised units).

    Each window's error is one float32 mean, computed on the device; windows are summed in float64 on the CPU, once, at
    the end. So the result is the same for any batch size and world size to the last digits that float32 kernels keep,
    and evaluation never waits for the device in between.

    Args:
        names: of the series, to keep errors per series and per horizon step, too; None: only the totals.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self.names = names
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
        if self.names is not None:
            self._positions.append(torch.stack([squared.sum(dim=0), absolute.sum(dim=0)]))

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """``{"mse", "mae"}`` over all ranks."""
        totals = torch.zeros(3, dtype=torch.float64)
        if self._windows:
            windows = torch.cat(self._windows, dim=1).cpu().double()
            totals[:2], totals[2] = windows.sum(dim=1), windows.shape[1]
        distributed.sum(totals)
        count = totals[2].item()
        if self.names is not None:
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

    def tables(self) -> list[Table]:
        """Errors per series and per horizon step, where they were asked for; after :meth:`compute`."""
        if self.names is None:
            return []
        steps = [str(step + 1) for step in range(len(self.step["mse"]))]
        return [Table("per_channel", "channel", self.names, self.channel), Table("per_step", "step", steps, self.step)]
