"""Metrics of quantiles and intervals of forecasts: coverage, width, CRPS, WQL, SQL and MSIS."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Sequence

import torch

from exp.forecasting.intervals import Intervals, percent
from exp.forecasting.metrics import UNBOUNDED, Bounds, SeriesIds, WindowMetric

if TYPE_CHECKING:
    from exp.distributed import Distributed


class IntervalMetrics(WindowMetric):
    """Metrics of intervals and quantiles, over all windows, steps and channels whose truth is known.

    - ``coverage_80``: share of true values within the interval of 80 %, and ``width_80``: its mean width;
    - ``msis_80``: mean scaled interval score (Gneiting and Raftery, JASA 102(477), 2007; scaled as in M4, Makridakis et
      al., Int. J. Forecasting 36(1), 2020): the mean of ``(width + 2 / (1 - level) * distance of a truth outside) /
      scale``, with the scale of MASE;
    - ``crps``: continuous ranked probability score (Gneiting and Raftery), ``2 * integral of the pinball loss over
      quantile levels``, by the trapezoidal rule over the 19 levels of
      :data:`exp.forecasting.intervals.SCORED_LEVELS` and the median, with 0 at levels 0 and 1;
    - ``wql``: mean weighted quantile loss, as in GluonTS (Alexandrov et al., JMLR 21(116), 2020): the mean over
      the same levels of ``2 * sum of pinball losses / sum of |truth|``, in the units of the file;
    - ``sql``: scaled quantile loss (Shchur et al., AutoML 2023): the mean of ``2 * pinball loss / scale`` over the same
      levels, with the scale of MASE;
    - ``crps_own_levels``, ``wql_own_levels`` and ``sql_own_levels`` instead, if the model knows no other quantiles: the
      same over its own levels. They are other quantities (over 5 levels the CRPS of a Gaussian is 12 % smaller).

    Figures with a scale are means over the cells of series that have one; of many series, means of the series' means,
    like MASE.

    Args:
        intervals: the intervals that are measured.
        series: names of the C series, for tables per channel and step; None: only the totals.
        mean: of the series in the units of the file, float64 (C,), of many series (S, C).
        std: standard deviation of the series in the units of the file, likewise.
        scored: positions of the series that are forecast, which the tables show; None: all.
        many: the series of a table; None: there is one.
        scale: of MASE, standardized, likewise (:class:`exp.forecasting.metrics.Baselines`); None: not known.
        bounds: of forecasts and ends.
    """

    def __init__(
        self,
        intervals: Intervals,
        series: Sequence[str] | None,
        mean: torch.Tensor,
        std: torch.Tensor,
        scored: Sequence[int] | None = None,
        many: SeriesIds | None = None,
        scale: torch.Tensor | None = None,
        bounds: Bounds = UNBOUNDED,
    ) -> None:
        self.intervals, self.many, self.bounds = intervals, many, bounds
        self.scored = list(range(std.shape[-1]) if scored is None else scored)
        self.series = series
        levels = [percent(level) for level in intervals.levels]
        self._level_names = [f"{what}_{level}" for level in levels for what in ("coverage", "width")]
        in_file = [f"width_{level}_file_units" for level in levels]
        ending = "" if intervals.output.levels is None else "_own_levels"
        self._crps, self._wql = f"crps{ending}", f"wql{ending}"
        self._weights = scaled = None
        if scale is not None and bool((scale[..., self.scored] > 0).any()):
            self._weights = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale)).float()
            scaled = [f"msis_{level}" for level in levels] + [f"sql{ending}"]
        self._scaled_names = scaled or []
        self._summed = [*self._level_names, *in_file, self._crps, f"{self._crps}_file_units", *self._scaled_names]
        self.names = [*self._summed, self._wql]
        self.units = dict.fromkeys((self._crps, *(f"width_{level}" for level in levels)), "standardized")
        # Relative to the largest deviation: sums of large units would overflow float32.
        self._largest = float(std[..., self.scored].max())
        self._scale, self._shift = (std / self._largest).float(), (mean / self._largest).float()
        # Weights of the trapezoidal rule for twice the integral from 0 to 1; the losses are 0 at both ends.
        ends = [0.0, *(intervals.taus[number] for number in intervals.scored), 1.0]
        self._areas = {number: after - before for number, before, after in zip(intervals.scored, ends, ends[2:])}
        self.reset()

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in one batch.

        Args:
            outputs: what the model predicts, (B, H, C) or (B, H, C, D), any floating dtype.
            batch: ``y`` (B, H, C) is the truth; NaN: not known.
        """
        scale, shift = (self._of_windows(values, batch) for values in (self._scale, self._shift))
        target, points = batch["y"], outputs if outputs.dim() == 3 else outputs[..., 0]
        observed = (target == target).float()
        truth = torch.where(observed > 0, target, points.float())
        crps, losses, ends = torch.zeros_like(truth), torch.zeros_like(truth), {}
        for number, quantile in self.intervals.quantiles(outputs.float(), lambda values: self._clip(values, batch)):
            if number in self._areas:
                error, tau = truth - quantile, self.intervals.taus[number]
                loss = torch.maximum(tau * error, (tau - 1.0) * error)  # pinball
                crps, losses = crps + self._areas[number] * loss, losses + loss
            if number in self.intervals.ends:
                ends[number] = quantile
        per_level, in_file, interval_scores = [], [], []
        for interval in self.intervals.central(ends):
            inside = ((interval.lower <= truth) & (truth <= interval.upper)).float()
            width = interval.upper - interval.lower
            outside = torch.maximum(interval.lower - truth, truth - interval.upper).clamp_min(0.0)
            per_level += [inside * observed, width * observed]
            in_file.append(width * scale * observed)
            interval_scores.append((width + 2.0 / (1.0 - interval.level) * outside) * observed)
        crps, losses = crps * observed, losses * observed
        scaled = []
        if self._weights is not None:
            weights = self._of_windows(self._weights, batch)
            means = [*interval_scores, losses * (2.0 / len(self._areas))]
            scaled = [*(value * weights for value in means), observed * (weights > 0)]
        size = (truth * scale + shift).abs() * observed
        values = [observed, size, losses * scale, *per_level, *in_file, crps, crps * scale, *scaled]
        self._add([value.mean(dim=(1, 2)) for value in values], [observed, *per_level, crps], batch)

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks."""
        count = 3 + len(self._summed) + bool(self._scaled_names)
        num_observed, size, losses, *sums = self._totals(count, distributed)
        if self.series is not None:
            cells, *cell_sums = self._cell_sums(distributed)[..., self.scored]  # (H, scored) each
            series = [self.series[position] for position in self.scored]
            self._tabulate("intervals_", series, cells, dict(zip([*self._level_names, self._crps], cell_sums)))
        metrics = {name: total / num_observed if num_observed else math.nan for name, total in zip(self._summed, sums)}
        for name in metrics:
            if name.endswith("_file_units"):
                metrics[name] *= self._largest
        if self._scaled_names:
            metrics.update(self._scaled(sums[-1 - len(self._scaled_names) :], count, distributed))
        metrics[self._wql] = 2.0 * losses / (len(self._areas) * size) if size else math.nan
        return metrics

    def _scaled(self, sums: Sequence[float], count: int, distributed: Distributed) -> dict[str, float]:
        """The figures with a scale; ``sums``: of each over all cells, and the number of these."""
        if self.many is None:
            return {name: total / sums[-1] if sums[-1] else math.nan for name, total in zip(self._scaled_names, sums)}
        *totals, cells = self._series_totals(count, distributed)[-1 - len(self._scaled_names) :]
        has_scale = cells > 0
        return {
            name: float((total[has_scale] / cells[has_scale]).mean()) for name, total in zip(self._scaled_names, totals)
        }
