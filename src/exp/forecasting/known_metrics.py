"""Errors of forecasts where not every cell has a truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch

from exp.forecasting.known import known_difference
from exp.forecasting.metrics import ForecastMetrics

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed

__all__ = ["KnownForecastMetrics"]


class KnownForecastMetrics(ForecastMetrics):
    """The same means as :class:`ForecastMetrics`, over the cells that are forecast and have a truth; no other counts.

    They are sums over such cells, divided by the number of them, over all windows of all ranks: a window with few of
    them weighs little.

    Args:
        scored: positions of the series that are forecast.
        series: of all series that the model gives; see :class:`ForecastMetrics`.
        std: of all series.
    """

    _nothing = (
        "there is no cell with a truth to measure errors of: too few rows for a window (data.lookback + data.horizon), "
        "or the columns that are forecast are empty there; give more rows, or task=predict"
    )

    def __init__(
        self, scored: Sequence[int], series: Sequence[str] | None = None, std: torch.Tensor | None = None
    ) -> None:
        self.scored = torch.tensor(scored)
        names = None if series is None else [series[position] for position in scored]
        super().__init__(names, None if std is None else std[self.scored])

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._counts: list[torch.Tensor] = []
        self._position_counts: list[torch.Tensor] = []

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in one batch.

        Args:
            outputs: forecasts (B, H, C), any floating dtype.
            batch: its ``y`` (B, H, C) is the truth, and ``known`` (B, H, C) is 1 where there is one.
        """
        if self.scored.device != outputs.device:
            self.scored = self.scored.to(outputs.device)
        given, truth, known = (
            each.index_select(2, self.scored) for each in (outputs.float(), batch["y"], batch["known"])
        )
        error = known_difference(given, truth, known)
        squared, absolute = error.square(), error.abs()
        sums = [squared.sum(dim=(1, 2)), absolute.sum(dim=(1, 2))]
        if self._relative is not None:
            if self._relative.device != error.device:
                self._relative = self._relative.to(error.device)
            scaled = error * self._relative
            sums += [scaled.square().sum(dim=(1, 2)), scaled.abs().sum(dim=(1, 2))]
        self._windows.append(torch.stack(sums))
        self._counts.append(known.sum(dim=(1, 2)))
        if self.series is not None:
            self._positions.append(torch.stack([squared.sum(dim=0), absolute.sum(dim=0)]))
            self._position_counts.append(known.sum(dim=0))

    def _count(self) -> float:
        return float(torch.cat(self._counts).cpu().double().sum())

    def _compute_positions(self, distributed: Distributed, count: float) -> None:
        del count  # each series and step has its own
        shape = tuple(self._positions[0].shape) if self._positions else None
        shape = next(other for other in distributed.gather(shape) if other is not None)
        sums = torch.zeros((3, *shape[1:]), dtype=torch.float64)  # squared, absolute, cells; (3, H, series)
        for errors, cells in zip(self._positions, self._position_counts):
            sums[:2] += errors.cpu().double()
            sums[2] += cells.cpu().double()
        distributed.sum(sums)
        factors = [1.0, 1.0] if self.std is None else [self.std**2, self.std]
        endings = ("",) if self.std is None else ("", "_file_units")
        for ending in endings:
            for index, name in enumerate(("mse", "mae")):
                errors = sums[index] * (factors[index] if ending else 1.0)
                # Where no cell has a truth, 0 / 0 is nan: there is no such error.
                self.channel[name + ending] = (errors.sum(dim=0) / sums[2].sum(dim=0)).tolist()
                self.step[name + ending] = (errors.sum(dim=1) / sums[2].sum(dim=1)).tolist()
