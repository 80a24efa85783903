"""Errors of forecasts, also where not every cell has a truth: some columns are not forecast, some cells are empty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch

from exp.errors import DataError
from exp.forecasting.known import known_difference
from exp.metrics import Metric, Table

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed

__all__ = ["ForecastMetrics", "sum_over_ranks"]


class ForecastMetrics(Metric):
    """Mean squared and absolute error over all windows, horizon steps and channels.

    ``mse`` and ``mae`` are of standardized values, as they are published; ``mse_file_units`` and ``mae_file_units`` are
    the same means over errors in the units of the file, a channel's multiplied by its standard deviation (squared). In
    a file whose channels have different units, the mean over channels mixes them: :meth:`tables` has each for itself.

    Each window's error is one float32 number, computed on the device; windows are summed in float64 on the CPU, once,
    at the end. So the result is the same for any batch size and world size to the last digits that float32 kernels
    keep, and evaluation never waits for the device in between.

    Args:
        series: names of the C series, to keep errors per series and per horizon step, too; None: only the totals.
        std: by which the series were divided, float64 (C,) on the CPU; None: the values are in the units of the file.
        scored: positions of the series that are forecast, where not every cell has a truth: then means are over the
            cells with one, and a window with few of them weighs little. None: every cell has a truth.
    """

    greater_is_better = False

    def __init__(
        self, series: Sequence[str] | None = None, std: torch.Tensor | None = None, scored: Sequence[int] | None = None
    ) -> None:
        if scored is not None:
            series = None if series is None else [series[position] for position in scored]
            std = None if std is None else std[torch.tensor(scored)]
        self.series, self.std = series, std
        self.scored = None if scored is None else torch.tensor(scored)
        self.names = ("mse", "mae") if std is None else ("mse", "mae", "mse_file_units", "mae_file_units")
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
            batch: its ``y`` (B, H, C) is the truth; with ``scored``, ``known`` (B, H, C) is 1 where there is one.
        """
        if self.scored is None:
            error = outputs.float() - batch["y"]
            known = torch.ones_like(error)
        else:
            self.scored = self.scored.to(outputs.device)
            error = known_difference(outputs.float(), batch["y"], batch["known"]).index_select(2, self.scored)
            known = batch["known"].index_select(2, self.scored)
        values = [error.square(), error.abs()]
        if self._relative is not None:
            self._relative = self._relative.to(error.device)
            scaled = error * self._relative
            values += [scaled.square(), scaled.abs()]
        of_window = torch.Tensor.mean if self.scored is None else torch.Tensor.sum
        self._windows.append(torch.stack([of_window(value, dim=(1, 2)) for value in [*values, known]]))
        if self.series is not None:
            self._positions.append(torch.stack([value.sum(dim=0) for value in (*values[:2], known)]))

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """``{"mse", "mae"}``, and with ``std`` also ``"mse_file_units"`` and ``"mae_file_units"``, over all ranks.

        Raises:
            DataError: there was no window on any rank.
        """
        totals = torch.zeros(len(self.names) + 1, dtype=torch.float64)
        if self._windows:
            totals += torch.cat(self._windows, dim=1).cpu().double().sum(dim=1)
        *sums, count = distributed.sum(totals).tolist()
        if count == 0:
            raise DataError(
                "there is no window with a truth to measure errors of: too few rows (data.lookback + data.horizon), or "
                "the columns that are forecast are empty there; give more rows, or forecast with task=predict"
            )
        if self.series is not None:
            self._compute_positions(distributed)
        scale = {"mse_file_units": self._largest**2, "mae_file_units": self._largest}
        return {name: total / count * scale.get(name, 1.0) for name, total in zip(self.names, sums)}

    def _compute_positions(self, distributed: Distributed) -> None:
        squared, absolute, cells = sum_over_ranks(self._positions, distributed)
        figures = {"mse": squared, "mae": absolute}
        if self.std is not None:
            figures.update(mse_file_units=squared * self.std**2, mae_file_units=absolute * self.std)
        for name, errors in figures.items():
            # Where no cell has a truth, 0 / 0 is nan: there is no such error.
            self.channel[name] = (errors.sum(dim=0) / cells.sum(dim=0)).tolist()
            self.step[name] = (errors.sum(dim=1) / cells.sum(dim=1)).tolist()

    def tables(self) -> list[Table]:
        """Errors per series and per horizon step, where they were asked for; after :meth:`compute`."""
        if self.series is None:
            return []
        steps = [str(step + 1) for step in range(len(self.step["mse"]))]
        return [
            Table("per_channel", "channel", self.series, self.channel, self.units),
            Table("per_step", "step", steps, self.step, self.units),
        ]


def sum_over_ranks(parts: Sequence[torch.Tensor], distributed: Distributed) -> torch.Tensor:
    """The sum of tensors of one shape over all ranks, float64; a rank may have none."""
    shape = tuple(parts[0].shape) if parts else None
    shape = next(other for other in distributed.gather(shape) if other is not None)
    total = torch.zeros(shape, dtype=torch.float64)
    for part in parts:
        total += part.cpu().double()
    return distributed.sum(total)
