"""Metrics of intervals: coverage, width, continuous ranked probability score, weighted quantile loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Sequence

import torch

from exp.forecasting.intervals.intervals import LEAST_STD, percent
from exp.forecasting.metrics import WindowMetric

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.forecasting.intervals.intervals import Intervals

__all__ = ["IntervalMetrics", "gaussian_crps"]


def gaussian_crps(error: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Continuous ranked probability score of a Gaussian (Gneiting and Raftery, JASA 102(477), 2007, eq. 21).

    Args:
        error: truth minus mean, any shape.
        std: same shape; raised to at least :data:`exp.forecasting.intervals.intervals.LEAST_STD`.

    Returns:
        The score of each element, same shape.
    """
    std = std.clamp_min(LEAST_STD)
    z = error / std
    density = torch.exp(-0.5 * z * z) * (2.0 / math.sqrt(2.0 * math.pi))
    return std * (z * torch.erf(z / math.sqrt(2.0)) + density - 1.0 / math.sqrt(math.pi))


class IntervalMetrics(WindowMetric):
    """Metrics of intervals and quantiles, over all windows, steps and channels whose truth is known.

    - ``coverage_80``: share of true values within the interval of 80 %, and ``width_80``: its mean width;
    - ``crps``: continuous ranked probability score (Gneiting and Raftery 2007), ``2 * integral of the pinball loss over
      quantile levels``: exact for a Gaussian, else by the trapezoidal rule over ``intervals.scored``, with 0 at levels
      0 and 1. With few levels, as a model's own quantiles may have, it is too small;
    - ``wql``: mean weighted quantile loss, as in GluonTS (Alexandrov et al., JMLR 21(116), 2020): the mean over
      the same levels of ``2 * sum of pinball losses / sum of |truth|``, in the units of the file.

    Args:
        intervals: the intervals that are measured.
        series: names of the C series, for tables per channel and step; None: only the totals.
        mean: of the series in the units of the file, float64 (C,).
        std: standard deviation of the series in the units of the file, float64 (C,).
        scored: positions of the series that are forecast, which the tables show; None: all.
    """

    def __init__(
        self,
        intervals: Intervals,
        series: Sequence[str] | None,
        mean: torch.Tensor,
        std: torch.Tensor,
        scored: Sequence[int] | None = None,
    ) -> None:
        self.intervals = intervals
        self.scored = list(range(len(std)) if scored is None else scored)
        self.series = series
        levels = [percent(level) for level in intervals.levels]
        self._of_level = [f"{what}_{level}" for level in levels for what in ("coverage", "width")]
        in_file = [f"width_{level}_file_units" for level in levels]
        self.names = [*self._of_level, *in_file, "crps", "crps_file_units", "wql"]
        self.units = dict.fromkeys(("crps", *(f"width_{level}" for level in levels)), "standardized")
        # Relative to the largest deviation: sums of large units would overflow float32.
        self._largest = float(std[self.scored].max())
        self._scale, self._shift = (std / self._largest).float(), (mean / self._largest).float()
        # Weights of the trapezoidal rule for twice the integral from 0 to 1; the losses are 0 at both ends.
        ends = [0.0, *(intervals.taus[number] for number in intervals.scored), 1.0]
        self._weights = {number: after - before for number, before, after in zip(intervals.scored, ends, ends[2:])}
        self.reset()

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in one batch.

        Args:
            outputs: forecasts (B, H, C), any floating dtype.
            batch: ``y`` (B, H, C) is the truth; NaN: not known.
        """
        forecast = outputs.float()
        self._scale, self._shift = self._scale.to(forecast.device), self._shift.to(forecast.device)
        given = batch["y"]
        known = (given == given).float()
        truth = torch.where(known > 0, given, forecast)
        spread = self.intervals.spread(batch)
        crps, losses, ends = torch.zeros_like(truth), torch.zeros_like(truth), {}
        for number, quantile in self.intervals.quantiles(forecast, spread):
            if number in self._weights:
                error, tau = truth - quantile, self.intervals.taus[number]
                loss = torch.maximum(tau * error, (tau - 1.0) * error)  # pinball
                crps, losses = crps + self._weights[number] * loss, losses + loss
            if self.intervals.is_end(number):
                ends[number] = quantile
        if self.intervals.gaussian and spread is not None:
            crps = gaussian_crps(truth - forecast, spread)
        of_level, in_file = [], []
        for band in self.intervals.bands(ends):
            inside = ((band.lower <= truth) & (truth <= band.upper)).float()
            width = band.upper - band.lower
            of_level += [inside * known, width * known]
            in_file.append(width * self._scale * known)
        crps, losses = crps * known, losses * known * self._scale
        size = (truth * self._scale + self._shift).abs() * known
        values = [known, size, *of_level, *in_file, crps, crps * self._scale, losses]
        self._add([value.mean(dim=(1, 2)) for value in values], [known, *of_level, crps])

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks."""
        known, size, *sums = self._totals(len(self.names) + 2, distributed)
        if self.series is not None:
            cells, *figures = self._of_cells(distributed)[..., self.scored]  # (H, scored) each
            series = [self.series[position] for position in self.scored]
            self._tabulate("intervals_", series, cells, dict(zip([*self._of_level, "crps"], figures)))
        found = {name: total / known if known else math.nan for name, total in zip(self.names, sums)}
        for name in found:
            if name.endswith("_file_units"):
                found[name] *= self._largest
        found["wql"] = 2.0 * sums[-1] / (len(self._weights) * size) if size else math.nan
        return found
