"""Errors of forecasts, over the cells that have a truth: not every column is forecast, and some cells are empty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence

import numpy as np
import torch

from exp.errors import DataError
from exp.forecasting.baselines import repeat_last
from exp.forecasting.losses import masked_difference
from exp.metrics import Metric, Table

if TYPE_CHECKING:
    from exp.distributed import Distributed


class SeriesIds(NamedTuple):
    """The series of a table.

    Attributes:
        names: of the S series.
        of_row: the number of the series of each row of the table, int32 (T,); ``index`` of a batch has first rows.
    """

    names: Sequence[str]
    of_row: torch.Tensor


class Bounds(NamedTuple):
    """``data.lower`` and ``data.upper``, standardized, float64 (C,), of many series (S, C); None: there is none."""

    lower: torch.Tensor | None = None
    upper: torch.Tensor | None = None


UNBOUNDED = Bounds()


@dataclass
class Baselines:
    """The naive forecasts that a model is compared with.

    Attributes:
        season: length of a season in rows; 1: not known.
        seasonal: whether the lookback has a whole season, so that it can be repeated.
        scale: mean absolute difference of training rows a season apart, standardized, float64 (C,), of many series
            (S, C); 0: the series is left out of MASE; None: not known.
        zero: what is 0 in the file, standardized, likewise, if all series that are forecast are counts; else None.
        verdict: after :meth:`ForecastMetrics.compute`: a sentence that names the better baselines; None: none is
            better.
    """

    season: int
    seasonal: bool
    scale: torch.Tensor | None
    zero: torch.Tensor | None = None
    verdict: str | None = None


class WindowMetric(Metric):
    """Base class: figures of each window and, per series and step, sums over windows.

    A window's figures are float32 numbers, computed on the device; windows are summed in float64 on the CPU, once, at
    the end. The result is therefore the same for any batch size and world size, up to the rounding of float32 kernels,
    and evaluation does not synchronize with the device before the end.
    """

    greater_is_better = False
    series: Sequence[str] | None
    """Names of columns, to keep sums per column and step, too; None: only the totals."""
    many: SeriesIds | None = None
    """The series of the windows; None: there is one."""
    bounds: Bounds = UNBOUNDED
    _of_row: torch.Tensor | None = None  # on the device

    def reset(self) -> None:
        """Start a new evaluation."""
        self._windows: list[torch.Tensor] = []
        self._cell_batches: list[torch.Tensor] = []
        self._indices: list[torch.Tensor] = []
        self._tables: list[Table] = []

    def tables(self) -> list[Table]:
        """Figures per series and per step of the horizon, if there are ``series``; call after ``compute``."""
        return self._tables

    def _add(self, windows: Sequence[torch.Tensor], cells: Sequence[torch.Tensor], batch: Mapping[str, Any]) -> None:
        """Add a batch: figures of windows, (B,) each, and of cells, (B, H, C) each."""
        self._windows.append(torch.stack(list(windows)))
        if self.many is not None:
            self._indices.append(batch["index"])
        if self.series is not None:
            self._cell_batches.append(torch.stack([values.sum(dim=0) for values in cells]))

    def _of_windows(self, values: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """Values that belong to series, on the device: of the only one, (C,), or of each window's, (B, 1, C)."""
        values = values.to(batch["y"].device)
        if self.many is None:
            return values
        if self._of_row is None or self._of_row.device != values.device:
            self._of_row = self.many.of_row.to(values.device)
        return values.index_select(0, self._of_row.index_select(0, batch["index"])).unsqueeze(1)

    def _clip(self, forecast: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """Forecasts (B, H, C) within the bounds."""
        for bound, outer in zip(self.bounds, (torch.maximum, torch.minimum)):
            if bound is not None:
                forecast = outer(forecast, self._of_windows(bound.float(), batch))
        return forecast

    def _totals(self, count: int, distributed: Distributed) -> list[float]:
        """Sums of ``count`` figures over all windows of all ranks."""
        totals = torch.zeros(count, dtype=torch.float64)
        if self._windows:
            totals += torch.cat(self._windows, dim=1).cpu().double().sum(dim=1)
        sums: list[float] = distributed.sum(totals).tolist()
        return sums

    def _series_totals(self, count: int, distributed: Distributed) -> torch.Tensor:
        """Sums of ``count`` figures over the windows of each series, of all ranks, float64 (count, S)."""
        assert self.many is not None
        sums = torch.zeros(count, len(self.many.names), dtype=torch.float64)
        if self._windows:
            series = self.many.of_row[torch.cat(self._indices).cpu()].long()
            sums.index_add_(1, series, torch.cat(self._windows, dim=1).cpu().double())
        return distributed.sum(sums)

    def _cell_sums(self, distributed: Distributed) -> torch.Tensor:
        """Sums of the cells' figures over all windows of all ranks, float64; a rank may have no window."""
        shape = tuple(self._cell_batches[0].shape) if self._cell_batches else None
        shape = next(other for other in distributed.gather(shape) if other is not None)
        total = torch.zeros(shape, dtype=torch.float64)
        for part in self._cell_batches:
            total += part.cpu().double()
        return distributed.sum(total)

    def _tabulate(self, name: str, series: Sequence[str], cells: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        """Keep means per series and per step; NaN where no cell has a truth.

        Args:
            name: prefix of the tables' names.
            series: names of C series.
            cells: number of cells with a truth, (H, C).
            sums: sum of each figure over these cells, (H, C), by name.
        """
        steps = [str(step + 1) for step in range(len(cells))]
        for table, key, rows, dim in (("per_channel", "channel", series, 0), ("per_step", "step", steps, 1)):
            columns = {metric: (total.sum(dim) / cells.sum(dim)).tolist() for metric, total in sums.items()}
            self._tables.append(Table(name + table, key, rows, columns, self.units))


class ForecastMetrics(WindowMetric):
    """Mean squared and absolute error over all windows, horizon steps and channels.

    ``mse`` and ``mae`` are of standardized values, as they are published; ``mse_file_units`` and ``mae_file_units`` are
    the same means of errors in the units of the file: each channel's error times its standard deviation (squared for
    the MSE). If channels have different units, these means mix them; :meth:`tables` has the error of each channel.

    ``mse_naive`` and ``mae_naive`` are the errors of repeating the last value in the same windows;
    ``mse_seasonal_naive`` and ``mae_seasonal_naive`` those of repeating the last season, if the lookback has one.
    ``mase`` is the mean of absolute errors divided by each series' ``scale`` (Hyndman and Koehler, Int. J. Forecasting
    22(4), 2006), over the cells with a truth of the series that have a scale; of many series, it is the mean of the
    series' values, as in utilsforecast. The verdict of ``baselines`` also
    compares with the mean of the lookback, and with zero for counts.

    Args:
        series: names of the C series, to keep errors per series and per horizon step, too; None: only the totals.
        std: by which the series were divided, float64 (C,), of many series (S, C), on the CPU; None: the values are in
            the units of the file.
        scored: positions of the series that are forecast, if some cells have no truth. Means are then over the cells
            that have one, so a window counts in proportion to them. None: every cell has a truth.
        baselines: the naive forecasts to compare with; None: no comparison.
        many: the series of a table, whose errors are then also kept one by one; None: there is one.
        bounds: of the forecasts.
        num_values: of each forecast (:attr:`exp.forecasting.outputs.Output.num_values`); None: outputs are points.
    """

    def __init__(
        self,
        series: Sequence[str] | None = None,
        std: torch.Tensor | None = None,
        scored: Sequence[int] | None = None,
        baselines: Baselines | None = None,
        many: SeriesIds | None = None,
        bounds: Bounds = UNBOUNDED,
        num_values: int | None = None,
    ) -> None:
        self.many, self.bounds, self.num_values = many, bounds, num_values
        scale = None if baselines is None else baselines.scale
        if scored is not None:
            series = None if series is None else [series[position] for position in scored]
            std, scale = (None if values is None else values[..., torch.tensor(scored)] for values in (std, scale))
        self.series, self.std, self.baselines = series, std, baselines
        self.scored = None if scored is None else torch.tensor(scored)
        names = ["mse", "mae"] if std is None else ["mse", "mae", "mse_file_units", "mae_file_units"]
        self._weights = None
        if scale is not None and bool((scale > 0).any()):
            self._weights = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale)).float()
            names.append("mase")
        if baselines is not None:
            names += ["mse_naive", "mae_naive"]
            names += ["mse_seasonal_naive", "mae_seasonal_naive"] if baselines.seasonal else []
        self.names = names
        self.baseline_of = {name: name.partition("_")[0] for name in names if name.endswith("naive")}
        # Beside the names: the cells of series with a scale, and squared errors that only the verdict shows.
        others = [] if baselines is None else ["the mean of the lookback", *["zero"] * (baselines.zero is not None)]
        self._other_names = ["scaled"] * (self._weights is not None) + others
        self.units = {} if std is None else {"mse": "standardized", "mae": "standardized"}
        # Relative to the largest deviation: the squares of large units would overflow float32.
        self._largest = 1.0 if std is None else float(std.max())
        self._relative = None if std is None else (std / self._largest).float()
        self.reset()

    def expected_shape(self, batch: Mapping[str, Any]) -> Sequence[int]:
        """That of the truth, (B, H, C), or (B, H, C, D) with ``num_values``."""
        shape: Sequence[int] = batch["y"].shape
        return shape if self.num_values is None else (*shape, self.num_values)

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in one batch.

        Args:
            outputs: forecasts (B, H, C), or (B, H, C, D) with the points first; any floating dtype.
            batch: ``y`` (B, H, C) is the truth; with ``scored``, ``observed`` (B, H, C) is 1 where ``y`` has a truth;
                with ``baselines``, ``x`` (B, L, C) is the lookback.
        """
        points = outputs if outputs.dim() == 3 else outputs[..., 0]
        error, observed = self._error(self._clip(points.float(), batch), batch)
        values = [error.square(), error.abs()]
        if self._relative is not None:
            scaled = error * self._of_windows(self._relative, batch)
            values += [scaled.square(), scaled.abs()]
        weights = None if self._weights is None else self._of_windows(self._weights, batch)
        if weights is not None:
            values.append(values[1] * weights)
        for forecast in self._naive_forecasts(batch):
            other, _ = self._error(forecast, batch)
            values += [other.square(), other.abs()]
        if weights is not None:
            values.append(observed * (weights > 0))
        values += [self._error(forecast, batch)[0].square() for forecast in self._flat_forecasts(batch)]
        of_window = torch.Tensor.mean if self.scored is None else torch.Tensor.sum
        self._add([of_window(value, dim=(1, 2)) for value in [*values, observed]], [*values[:2], observed], batch)

    def _error(self, forecast: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """For the scored series: the difference to the truth, and 1 where there is a truth, (B, H, scored) each."""
        if self.scored is None:
            error = forecast - batch["y"]
            return error, torch.ones_like(error)
        self.scored = self.scored.to(forecast.device)
        error = masked_difference(forecast, batch["y"], batch["observed"])
        return error.index_select(2, self.scored), batch["observed"].index_select(2, self.scored)

    def _naive_forecasts(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """The forecasts that repeat the last value and the last season, (B, H, C) each."""
        if self.baselines is None:
            return []
        lengths = [1, self.baselines.season] if self.baselines.seasonal else [1]
        return [repeat_last(batch["x"], batch["y"].shape[1], length) for length in lengths]

    def _flat_forecasts(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """The forecasts that do not change over the horizon: the mean of the lookback and, for counts, 0."""
        if self.baselines is None:
            return []
        x, zero = batch["x"], self.baselines.zero
        levels = [x.mean(dim=1, keepdim=True)]
        levels += [] if zero is None else [self._of_windows(zero.float(), batch).expand_as(levels[0])]
        return [level.expand_as(batch["y"]) for level in levels]

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks.

        Raises:
            DataError: there was no window on any rank.
        """
        *sums, count = self._totals(len(self.names) + len(self._other_names) + 1, distributed)
        if count == 0:
            raise DataError(
                "there is no window with a truth to measure errors of: too few rows (data.lookback + data.horizon), or "
                "the columns that are forecast are empty there; give more rows, or forecast with task=predict"
            )
        if self.series is not None:
            squared, absolute, cells = self._cell_sums(distributed)
            errors = {"mse": squared, "mae": absolute}
            if self.std is not None and self.many is None:
                errors.update(mse_file_units=squared * self.std**2, mae_file_units=absolute * self.std)
            self._tabulate("", self.series, cells, errors)
        scale = {"mse_file_units": self._largest**2, "mae_file_units": self._largest}
        metrics = {name: total / count * scale.get(name, 1.0) for name, total in zip(self.names, sums)}
        others = {name: total / count for name, total in zip(self._other_names, sums[len(self.names) :])}
        if "mase" in metrics:  # no cell of a series with a scale may have a truth
            scaled = others.pop("scaled")
            metrics["mase"] = metrics["mase"] / scaled if scaled else math.nan
        if self.many is not None:
            by_series = self._by_series(distributed)
            if "mase" in metrics:
                values = by_series["mase"]
                metrics["mase"] = float(values[values == values].mean())
            if self.series is not None:
                columns = {name: values.tolist() for name, values in by_series.items()}
                self._tables.append(Table("per_series", "series", list(self.many.names), columns, self.units))
        if self.baselines is not None:
            self.baselines.verdict = _verdict(metrics, self.baselines.season, others)
        return metrics

    def sample_sums(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Errors of each window, weighted by its cells with a truth: those of the model, and of the naive forecasts."""
        if not self._windows:
            return {name: torch.empty(0) for name in ("mse", "mae", *self.baseline_of)}, torch.empty(0)
        windows = torch.cat(self._windows, dim=1).cpu()
        return {name: windows[self.names.index(name)] for name in ("mse", "mae", *self.baseline_of)}, windows[-1]

    def window_errors(self) -> dict[str, np.ndarray]:
        """``mse``, ``mae`` and, if scales are known, ``mase`` of each window of this rank, float64 (N,), in the order
        of the updates; NaN where a window has no truth, or its series no scale.
        """
        sums = torch.cat(self._windows, dim=1).cpu().double().numpy()
        counts = {"mse": sums[-1], "mae": sums[-1]}
        if "mase" in self.names:
            counts["mase"] = sums[len(self.names)]
        with np.errstate(invalid="ignore"):
            return {name: sums[self.names.index(name)] / count for name, count in counts.items()}

    def _by_series(self, distributed: Distributed) -> dict[str, torch.Tensor]:
        """The errors of each series, float64 (S,); NaN where it has no window with a truth, or no scale."""
        sums = self._series_totals(len(self.names) + len(self._other_names) + 1, distributed)
        cells, factors = sums[-1], {"mse_file_units": self._largest**2, "mae_file_units": self._largest}
        shown = [name for name in self.names if not name.endswith("naive")]
        result = {name: sums[self.names.index(name)] / cells * factors.get(name, 1.0) for name in shown}
        if "mase" in result:
            result["mase"] = sums[self.names.index("mase")] / sums[len(self.names)]
        return result


def _verdict(metrics: dict[str, float], season: int, others: Mapping[str, float]) -> str | None:
    mse, repeated = metrics["mse"], {"mse_naive": "the last value", "mse_seasonal_naive": f"the last {season} rows"}
    naive = {f"repeating {text}": metrics[name] for name, text in repeated.items() if name in metrics}
    better = [f"{text} ({value:.4g})" for text, value in {**naive, **others}.items() if mse > value * (1 + 1e-6)]
    return f"worse than {' and '.join(better)}: MSE {mse:.4g}" if better else None
