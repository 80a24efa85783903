"""Errors of forecasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch

from exp.errors import DataError
from exp.metrics import Metric, Table

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed

__all__ = ["ForecastMetrics"]


class ForecastMetrics(Metric):
    """Mean squared and absolute error over all windows, horizon steps and channels.

    ``mse`` and ``mae`` are of standardised values, as they are published; ``mse_file_units`` and ``mae_file_units`` are
    the same means over errors in the units of the file, a channel's multiplied by its standard deviation (squared). In
    a file whose channels have different units, the mean over channels mixes them: :meth:`tables` has each for itself.

    Each window's error is one float32 mean, computed on the device; windows are summed in float64 on the CPU, once, at
    the end. So the result is the same for any batch size and world size to the last digits that float32 kernels keep,
    and evaluation never waits for the device in between.

    Args:
        series: their names, to keep errors per series and per horizon step, too; None: only the totals.
        std: by which the series were divided, float64 (C,) on the CPU; None: the values are in the units of the file.
    """

    greater_is_better = False

    _nothing = (
        "there is no window with truth to measure errors of: the part has fewer rows than data.lookback + "
        "data.horizon; give more rows, or forecast with task=predict"
    )

    def __init__(self, series: Sequence[str] | None = None, std: torch.Tensor | None = None) -> None:
        self.series = series
        self.names = ("mse", "mae") if std is None else ("mse", "mae", "mse_file_units", "mae_file_units")
        self.std = std
        self.units = {} if std is None else {"mse": "standardised", "mae": "standardised"}
        # Relative to the largest, so that float32 carries the squares, too.
        self._largest = 1.0 if std is None else float(std.max())
        self._relative = None if std is None else (std / self._largest).float()
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
        means = [squared.mean(dim=(1, 2)), absolute.mean(dim=(1, 2))]
        if self._relative is not None:
            if self._relative.device != error.device:
                self._relative = self._relative.to(error.device)
            scaled = error * self._relative
            means += [scaled.square().mean(dim=(1, 2)), scaled.abs().mean(dim=(1, 2))]
        self._windows.append(torch.stack(means))
        if self.series is not None:
            self._positions.append(torch.stack([squared.sum(dim=0), absolute.sum(dim=0)]))

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """``{"mse", "mae"}``, and with ``std`` also ``"mse_file_units"`` and ``"mae_file_units"``, over all ranks.

        Raises:
            DataError: there was no window on any rank.
        """
        totals = torch.zeros(len(self.names) + 1, dtype=torch.float64)
        if self._windows:
            totals[:-1] = torch.cat(self._windows, dim=1).cpu().double().sum(dim=1)
            totals[-1] = self._count()
        distributed.sum(totals)
        count = totals[-1].item()
        if count == 0:
            raise DataError(self._nothing)
        if self.series is not None:
            self._compute_positions(distributed, count)
        scale = {"mse_file_units": self._largest**2, "mae_file_units": self._largest}
        return {name: total / count * scale.get(name, 1.0) for name, total in zip(self.names, totals.tolist())}

    def _count(self) -> float:
        """What the sums over this rank's windows are divided by, with those of the other ranks."""
        return sum(windows.shape[1] for windows in self._windows)

    def _compute_positions(self, distributed: Distributed, count: float) -> None:
        shape = tuple(self._positions[0].shape) if self._positions else None
        # A rank without a window still has to take part in the sum.
        shape = next(other for other in distributed.gather(shape) if other is not None)
        local = torch.zeros(shape, dtype=torch.float64)
        for part in self._positions:
            local += part.cpu().double()
        mean = distributed.sum(local) / count  # (2, H, C)
        self._add_tables(mean, "")
        if self.std is not None:
            self._add_tables(mean * torch.stack([self.std**2, self.std]).unsqueeze(1), "_file_units")

    def _add_tables(self, mean: torch.Tensor, ending: str) -> None:
        for index, name in enumerate(("mse", "mae")):
            self.channel[name + ending] = mean[index].mean(dim=0).tolist()
            self.step[name + ending] = mean[index].mean(dim=1).tolist()

    def tables(self) -> list[Table]:
        """Errors per series and per horizon step, where they were asked for; after :meth:`compute`."""
        if self.series is None:
            return []
        steps = [str(step + 1) for step in range(len(self.step["mse"]))]
        return [
            Table("per_channel", "channel", self.series, self.channel, self.units),
            Table("per_step", "step", steps, self.step, self.units),
        ]
