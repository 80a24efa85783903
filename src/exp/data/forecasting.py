"""A forecasting data set: a series on disk, standardised, split and cut into windows."""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import torch

from exp.data.preflight import locate
from exp.data.series import read_series
from exp.data.splits import borders
from exp.data.timefeatures import NUM_TIME_FEATURES, time_features
from exp.data.windows import WindowDataset

if TYPE_CHECKING:
    import pandas as pd

    from exp.engine.metrics import ForecastMetrics

__all__ = ["ForecastingData"]


class ForecastingData:
    """A multivariate series for forecasting; the fields are those of :class:`exp.config.schema.ForecastingDataConfig`.

    The series is standardised with mean and population standard deviation of the training rows, in float64, and then
    kept once, as float32; :attr:`train`, :attr:`val` and :attr:`test` are views of it.

    Attributes:
        name: of the data set.
        names: of the C series.
        mean, std: of the training rows in original units, float64 (C,). ``std`` is 1 where a series is constant.
        num_marks: number of time features (M).
        metric_name: the metric by which the best model is chosen and sweeps are judged.
        greater_is_better: whether larger values of it are better.
        predictor: the module that predicts for task=predict.
        tested_on: the part that metrics are of in the end.

    Args:
        name: of the data set.
        root: folder of the user's files; None: the sample data that come with exp.
        file: path below ``root``.
        split: see :func:`exp.data.splits.borders`.
        channels: number of series expected (C).
        lookback: rows that a forecast sees (L).
        horizon: rows that it forecasts (H).
        header: see :func:`exp.data.series.read_series`.
        eval_batch_size: windows per rank and batch in evaluation; kept for who builds the loaders.
        num_workers: data-loader processes; kept for who builds the loaders.

    Raises:
        DataError: the file is missing or malformed, or has too few rows.
    """

    metric_name = "mse"
    greater_is_better = False
    predictor = "exp.predict.forecasts"
    num_marks = NUM_TIME_FEATURES
    tested_on = "test"

    def __init__(
        self,
        name: str,
        file: str,
        channels: int,
        root: str | None = None,
        split: str = "ratio",
        lookback: int = 720,
        horizon: int = 96,
        header: bool = True,
        eval_batch_size: int = 128,
        num_workers: int = 0,
    ) -> None:
        self.name = name
        self.lookback = lookback
        self.horizon = horizon
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        series = read_series(locate(root, file, name, header), header, channels)
        self.names = list(series.names)
        self.dates = series.dates
        self.rows = borders(split, len(series.values), lookback, horizon)
        mean, std = _statistics(series.values[: len(self.rows["train"])])
        self.mean, self.std = torch.from_numpy(mean), torch.from_numpy(std)
        self._values = _series_contiguous((series.values - mean) / std)
        self._marks = _series_contiguous(time_features(series.dates, len(series.values)))

    @cached_property
    def train(self) -> WindowDataset:
        """Windows of the training part."""
        return self._windows("train")

    @cached_property
    def val(self) -> WindowDataset:
        """Windows of the validation part."""
        return self._windows("val")

    @cached_property
    def test(self) -> WindowDataset:
        """Windows of the test part."""
        return self._windows("test")

    def _windows(self, part: str) -> WindowDataset:
        return WindowDataset(self._values, self._marks, self.rows[part], self.lookback, self.horizon)

    def metrics(self, detailed: bool = False) -> ForecastMetrics:
        """A new accumulator of this data set's metrics, in standardised units as they are published.

        Args:
            detailed: also errors per series and per step of the horizon.
        """
        from exp.engine.metrics import ForecastMetrics

        return ForecastMetrics(self.names if detailed else None)

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, int]:
        """Windows of each part, for the result of a run.

        Args:
            gather: of :class:`exp.engine.distributed.Distributed`, for data that ranks know different things of.
        """
        return {part: len(self._windows(part)) for part in self.rows}

    def to_original_units(self, values: torch.Tensor) -> torch.Tensor:
        """Undo the standardisation.

        Args:
            values: standardised, (..., C), any floating dtype and device.

        Returns:
            The same shape, dtype and device.
        """
        # The dtype first: not every device takes float64.
        mean, std = (stat.to(values.dtype).to(values.device) for stat in (self.mean, self.std))
        return values * std + mean

    def dates_of(self, part: str, index: int) -> pd.DatetimeIndex | None:
        """Dates of the H rows that a window forecasts; None where the file has none.

        Args:
            part: ``train``, ``val`` or ``test``.
            index: number of the window in that part.

        Raises:
            IndexError: the part has no such window.
        """
        count = len(self._windows(part))
        if not 0 <= index < count:
            raise IndexError(f"part {part} has {count} windows; there is no window {index}")
        if self.dates is None:
            return None
        begin = self.rows[part].start + index + self.lookback
        return self.dates[begin : begin + self.horizon]

    def future_window(self) -> tuple[dict[str, torch.Tensor], pd.DatetimeIndex | None]:
        """What a forecast beyond the last row of the file sees, and the H dates that it is for.

        Returns:
            ``{"x": (1, L, C), "marks": (1, L, M)}``, and the dates (None where the file has none): they continue the
            calendar rhythm of the last L rows, or else their most frequent distance.
        """
        batch = {"x": self._values[-self.lookback :].unsqueeze(0), "marks": self._marks[-self.lookback :].unsqueeze(0)}
        return batch, None if self.dates is None else _continued(self.dates[-max(self.lookback, 3) :], self.horizon)


def _statistics(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation, float64 (C,) (the convention of sklearn's StandardScaler)."""
    std = rows.std(axis=0)
    # By extremes: rounding gives a constant series a tiny standard deviation, not zero.
    std[rows.max(axis=0) == rows.min(axis=0)] = 1.0
    return rows.mean(axis=0), std


def _series_contiguous(values: np.ndarray) -> torch.Tensor:
    """float32 (T, C) with strides (1, T)."""
    return torch.from_numpy(np.ascontiguousarray(values.T, dtype=np.float32)).t()


def _continued(dates: pd.DatetimeIndex, count: int) -> pd.DatetimeIndex:
    """The ``count`` dates after ``dates``, of which there are at least three."""
    import pandas as pd

    with warnings.catch_warnings():
        # pandas 3 announces that a later version returns an object, not a string; date_range takes both.
        warnings.filterwarnings("ignore", message="A future version of pandas will return a BaseOffset")
        rhythm = pd.infer_freq(dates)
    if rhythm is None:
        rhythm = pd.Series(dates[1:] - dates[:-1]).mode()[0]
    return pd.date_range(dates[-1], periods=count + 1, freq=rhythm)[1:]
