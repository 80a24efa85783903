"""A forecasting data set: a series on disk, standardized, split and cut into windows."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np
import torch

from exp.data.base import Data, Prediction, Sketch
from exp.data.fingerprint import of_file
from exp.data.places import shortened
from exp.errors import ConfigError, DataError
from exp.forecasting.config import ForecastingDataConfig
from exp.forecasting.data import calendar, values
from exp.forecasting.data.contract import Contract, NeedsContractError
from exp.forecasting.data.preflight import locate
from exp.forecasting.data.series import read_series
from exp.forecasting.data.splits import TooFewRowsError, borders
from exp.forecasting.data.windows import WindowDataset
from exp.forecasting.metrics import Baselines, ForecastMetrics

if TYPE_CHECKING:
    import pandas as pd

    from exp.data.fingerprint import Fingerprint
    from exp.forecasting.data.series import Series
    from exp.forecasting.intervals.intervals import Intervals
    from exp.metrics import Metric
    from exp.session import Session

__all__ = ["ForecastingData"]


class ForecastingData(Data):
    """A multivariate series for forecasting, standardized in float64 with the training rows' mean and deviation.

    A file that is too short for its split, that has no training rows (``split=new``) or whose dates are ambiguous is
    taken, too: it can be used once :meth:`adopt` brings the contract of weights. If it is too short, all of its rows
    are for testing then.

    Attributes:
        train, val, test: windows of each split, views of one series.
        num_marks: number of time features (M).
        intervals: around forecasts (:meth:`calibrate`); None: none are asked for.
        config: the keys of ``data``.
        path: of the file.
        names: of the C series.
        scored: positions in ``names`` of the series that are forecast.
        num_rows: of the file.
        dates: of the rows; None where the file has none.
        frequency: how far apart they are (:class:`exp.forecasting.data.calendar.Frequency`); None: not known.

    Args:
        **keys: of :class:`exp.forecasting.config.ForecastingDataConfig`.

    Raises:
        DataError: a key is out of range; the file is missing or malformed, or has gaps that are not allowed; or float32
            does not carry its values.
    """

    num_marks = calendar.NUM_TIME_FEATURES
    intervals: Intervals | None = None
    notes: list[str]
    _contract: Contract
    _problem: DataError | None = None
    _rows: dict[str, range]
    _series: dict[str, Any]  # float32 (T, ...) by the argument of WindowDataset; None: there is none

    def __init__(self, **keys: Any) -> None:
        self.config = config = ForecastingDataConfig(**keys)
        self.name, self.lookback, self.horizon = config.name, config.lookback, config.horizon
        self.eval_batch_size, self.num_workers = config.eval_batch_size, config.num_workers
        self.path = locate(config)
        try:
            self._load()
        except NeedsContractError as error:
            self._problem = error

    def _load(self, contract: Contract | None = None) -> None:
        """Read the file; standardize it by its own training rows, or as the contract says.

        Raises:
            NeedsContractError: it does not do by itself.
        """
        series = read_series(self.path, self.config, contract.date_format if contract else None)
        self.names, self.scored = series.columns.names, series.columns.scored
        self.num_rows, dates = len(series.values), series.dates
        self.dates: pd.DatetimeIndex | None = dates.index if dates else None
        self.frequency = dates.frequency if dates else None
        self.notes = list(dates.warnings) if dates else []
        self._num_past = self._count_past(series)
        # What is known ahead of the last truth is no part to measure errors in.
        past = self.num_rows if self.config.split == "new" else self._num_past
        try:
            self._rows = borders(self.config.split, past, self.lookback, self.horizon)
            if contract is None and "train" not in self._rows:
                raise TooFewRowsError("data.split=new has no rows for training, and so no standardization")
        except TooFewRowsError as error:
            if contract is None or self.num_rows < self.lookback:
                raise NeedsContractError(
                    f"{self.path}: {error}. With the weights of a run, data.lookback={self.lookback} rows suffice: "
                    f"task=predict init_from=<run folder> task.input={self.path}"
                ) from error
            self._rows = {"test": range(self.num_rows)}
        seconds = self.frequency.seconds if self.frequency else None
        if contract is not None:
            contract.check_spacing(self.path, seconds)
        else:
            train = len(self._rows["train"])
            mean, std = values.statistics(series, train)
            season = self.frequency.season if self.frequency and self.frequency.season < train else 1
            scale = values.seasonal_difference((series.values[:train] - mean) / std, season)
            figures = zip(("mean", "std", "low", "high", "missing"), (mean, std, *values.ranges(series.values[:train])))
            lists = {name: figure.tolist() for name, figure in (*figures, ("scale", scale))}
            contract = Contract(self.name, self.names, season=season, **lists)
            self.notes += values.warn_of_constants(series, train)
        date_format = dates.date_format if dates else None
        self._contract = replace(contract, name=self.name, date_format=date_format, seconds=seconds)
        self._unlike = contract.unlike(series, self._rows["test"])
        self._standardize(series)
        self._problem = None

    def _count_past(self, series: Series) -> int:
        """All rows; with covariates and empty cells, those up to the last one with a value that is forecast."""
        if self.config.covariates is None or self.config.missing != "mask":
            return self.num_rows
        known = ~np.isnan(series.values[:, self.scored]).all(axis=1)
        return self.num_rows - int(known[::-1].argmax()) if known.any() else 0

    def _standardize(self, series: Series) -> None:
        season, scale = self._contract.season, self._contract.scale
        scales = None if scale is None else torch.tensor(scale, dtype=torch.float64)
        self._baselines = Baselines(season, 1 < season <= self.lookback, scales)
        standardized = (series.values - np.array(self._contract.mean)) / np.array(self._contract.std)
        self.notes += values.warn_of_outliers(series)
        seen, marks = values.filled(standardized), calendar.time_features(self.dates, self.num_rows)
        truth = future = None
        if self.config.missing == "mask" or len(self.scored) < len(self.names):
            truth = np.full_like(standardized, np.nan)
            truth[:, self.scored] = standardized[:, self.scored]
        if series.columns.ahead is not None:
            future = np.concatenate([seen[:, series.columns.ahead], marks], axis=1)
        each = {"values": seen, "marks": marks, "truth": truth, "future": future}
        self._series = {name: None if rows is None else _series_contiguous(rows) for name, rows in each.items()}
        self._truth: torch.Tensor | None = self._series["truth"]
        for split in ("train", "val", "test"):
            self.__dict__.pop(split, None)  # windows of the former values

    @property
    def rows(self) -> dict[str, range]:
        """The rows of each split, by name.

        Raises:
            DataError: the data cannot be used without the contract of weights.
        """
        if self._problem is not None:
            raise self._problem
        return self._rows

    @property
    def mean(self) -> torch.Tensor:
        """Of the training rows in original units, float64 (C,)."""
        return torch.tensor(self._contract.mean, dtype=torch.float64)

    @property
    def std(self) -> torch.Tensor:
        """Population standard deviation, as :attr:`mean`; 1 where a series is constant."""
        return torch.tensor(self._contract.std, dtype=torch.float64)

    @property
    def target_names(self) -> list[str]:
        """Of the series that are forecast."""
        return [self.names[position] for position in self.scored]

    @cached_property
    def train(self) -> WindowDataset:
        """Windows of the training split."""
        return self._windows("train")

    @cached_property
    def val(self) -> WindowDataset:
        """Windows of the validation split."""
        return self._windows("val")

    @cached_property
    def test(self) -> WindowDataset:
        """Windows of the test split."""
        return self._windows("test")

    def _windows(self, split: str) -> WindowDataset:
        if split not in self.rows:
            raise DataError(f"{self.path}: all its rows are new; it has no split {split}")
        resident = None if self.config.on_device == "auto" else bool(self.config.on_device)
        return WindowDataset(
            **self._series, rows=self.rows[split], lookback=self.lookback, horizon=self.horizon, resident=resident
        )

    @classmethod
    def sketch(cls, **keys: Any) -> Sketch:
        """A window of a series that has as many rows as one window."""
        config = ForecastingDataConfig(**keys)
        rows = config.lookback + config.horizon
        widths = {"values": config.channels, "marks": cls.num_marks}
        if config.missing == "mask" or config.targets or config.covariates:
            widths["truth"] = config.channels
        if config.covariates is not None:
            widths["future"] = len(config.covariates) + cls.num_marks
        series: dict[str, Any] = {name: _series_contiguous(np.zeros((rows, width))) for name, width in widths.items()}
        window = WindowDataset(**series, rows=range(rows), lookback=config.lookback, horizon=config.horizon)[[0]]
        return Sketch(window, window, {}, config.eval_batch_size)

    def fingerprint(self) -> Fingerprint:
        """What the file holds, in short (:mod:`exp.data.fingerprint`)."""
        return of_file(self.path)

    def state(self) -> dict[str, Any]:
        """The fields of the :class:`Contract` that goes with weights which are trained on these data."""
        return asdict(self._contract)

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Standardize as the data were that weights have been trained on.

        A data set of another name that has rows for training keeps its own standardization, in which the figures for it
        are published; that is noted. Where the file is too short for its split, all of its rows are for testing from
        now on. Ambiguous dates are read as those of the other data. Series in another order are matched by name.

        Args:
            state: of :meth:`state`.

        Raises:
            DataError: the series have other names; rows are at another distance in time; there are not even
                ``lookback`` rows; a value is so far from the mean that float32 cannot carry the difference; or dates
                are still ambiguous.
        """
        contract = Contract(**state)
        own = self._problem is None
        if not own or contract.names != self.names:
            self.config = replace(self.config, inputs=contract.names)
            self._load(None if own else contract)
        if own and contract.name != self.name:
            self.notes = [
                *self.notes,
                f"{self.name} is standardized by its own training rows, not by those of {contract.name}, which the "
                f"weights were trained on; data.name={contract.name} says that these are rows of the same series",
            ]
            return
        if (self._contract.mean, self._contract.std) != (contract.mean, contract.std):
            self._load(contract)
        self.notes = [*self.notes, *self._unlike]

    def settle(self, session: Session) -> None:
        """Refuse, before the model is built, new rows that cannot be scored.

        Raises:
            ConfigError: a model of exp's has a window that is not the data's.
            DataError: there is no window with truth, and the task is not to forecast what follows the rows.
        """
        task, model = session.config.task, session.config.model
        for key in ("lookback", "horizon") if str(model.get("_target_")).startswith("exp.") else ():
            if model.get(key, getattr(self, key)) != getattr(self, key):
                raise ConfigError(
                    f"model.{key}={model[key]} and data.{key}={getattr(self, key)} must be the same; set data.{key}, "
                    f"which model.{key} follows"
                )
        period = model.get("period") if "timebridge" in str(model.get("_target_")) else None
        if period and self.lookback % period and period < self.lookback:
            patches = self.lookback // period
            session.say(
                f"model.period={period} does not divide data.lookback={self.lookback}: as in the authors' code, "
                f"{patches} patches have {self.lookback // patches} time steps each"
            )
        self.check_truth({"train": list(self.rows), "eval": ["test"]}.get(task.name, []))
        if task.name != "predict" and list(self.rows) == ["test"] and not len(self.test):
            raise DataError(
                f"{self.path} has {self.num_rows} rows, and task={task.name} needs {self.lookback + self.horizon} "
                f"(data.lookback + data.horizon); give it more, or take task=predict, which forecasts what follows"
            )

    def check_truth(self, splits: Sequence[str]) -> None:
        """Refuse a split in which nothing that is forecast has a value; name the series that have none.

        Args:
            splits: those that something will be measured in.

        Raises:
            DataError: names the split and the series.
        """
        if self._truth is None:
            return
        for split in splits:
            first, stop = self.rows[split].start + self.lookback, self.rows[split].stop
            empty = self._truth[first:stop, self.scored].isnan().all(dim=0).tolist()
            lacking = [name for name, is_empty in zip(self.target_names, empty) if is_empty]
            where = f"no value of {shortened(lacking)} where the {split} split is forecast"
            if all(empty):
                raise DataError(
                    f"{self.path}: {where} (rows {first + 1} to {stop} of {self.num_rows} below the header), so that "
                    "there is nothing to measure errors of; give values, or another data.split"
                )
            if lacking:
                self.notes.append(f"{self.path}: {where}: what is measured there is of the other series")

    def calibrate(self, session: Session, model: Any) -> None:
        """Intervals around forecasts, where ``task.intervals`` asks for them (:mod:`exp.forecasting.intervals`)."""
        if session.config.task.get("intervals"):
            from exp.forecasting.intervals.calibrate import prepare

            self.intervals = prepare(session, self, model)

    def metrics(self, detailed: bool = False) -> Metric | list[Metric]:
        """A new accumulator of this data set's metrics: of standardized values, as they are published, and beside them
        in the units of the file; and of the intervals, once they are prepared.

        Args:
            detailed: also errors per series and per step of the horizon.
        """
        names = self.names if detailed else None
        errors = ForecastMetrics(names, self.std, None if self._truth is None else self.scored, self._baselines)
        if self.intervals is None:
            return errors
        from exp.forecasting.intervals.metrics import IntervalMetrics

        return [errors, IntervalMetrics(self.intervals, names, self.mean, self.std, self.scored)]

    def predict(self, session: Session, model: Any) -> Prediction:
        """Forecasts as files and pictures (:func:`exp.forecasting.predict.predict`)."""
        from exp.forecasting.predict import predict

        self.calibrate(session, model)
        return predict(session, self, model)

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Windows of each split, and how regular the dates are, for the result of a run.

        Args:
            gather: of :class:`exp.engine.distributed.Distributed`, for data that ranks know different things of.
        """
        content: dict[str, Any] = {split: len(getattr(self, split)) for split in self.rows}
        if self._truth is not None:
            content["targets"] = self.target_names
            content["cells_without_truth"] = int(self._truth[:, self.scored].isnan().sum())
        if self.frequency is not None:
            content["time_step"] = self.frequency.step
            content["irregular_steps"] = self.frequency.irregular
        if self.notes:
            content["notes"] = list(self.notes)
        if self._baselines.verdict is not None:
            content["warnings"] = [self._baselines.verdict]
        if self.intervals is not None:
            content["intervals"] = self.intervals.record
        return content

    def to_original_units(self, values: torch.Tensor) -> torch.Tensor:
        """Undo the standardization.

        Args:
            values: standardized, (..., C), any floating dtype and device.

        Returns:
            The same shape, dtype and device.
        """
        # The dtype first: not every device takes float64.
        mean, std = (stat.to(values.dtype).to(values.device) for stat in (self.mean, self.std))
        return values * std + mean

    def past(self, begin: int) -> torch.Tensor:
        """L standardized rows of the file from a row on, (L, C): NaN where there is no truth, not what fills it."""
        rows: torch.Tensor = self._series["values"] if self._truth is None else self._truth
        return rows[begin : begin + self.lookback]

    @property
    def num_past(self) -> int:
        """Rows that are past: all, or with covariates and empty cells, those up to the last one with a target's value.

        Raises:
            DataError: they are too few for a forecast.
        """
        if self._num_past < self.lookback:
            raise DataError(
                f"{self.path}: only {self._num_past} rows up to the last value of {shortened(self.target_names)}; a "
                f"forecast sees data.lookback={self.lookback}"
            )
        return self._num_past

    def future_window(self) -> tuple[dict[str, torch.Tensor], pd.DatetimeIndex | None]:
        """What a forecast beyond the last row of the file sees, and the H dates that it is for.

        Where covariates are known ahead, ``future`` (1, H, K) has those of the rows after :attr:`num_past`; beyond the
        end of the file the last ones go on.

        Returns:
            ``{"x": (1, L, C), "marks": (1, L, M)}``, and the dates (None where the file has none, or only one): they
            continue the file's (:func:`exp.forecasting.data.calendar.continued`).
        """
        end = self.num_past
        seen = slice(end - self.lookback, end)
        series = self._series
        batch = {"x": series["values"][seen].unsqueeze(0), "marks": series["marks"][seen].unsqueeze(0)}
        dates = None
        if self.dates is not None:
            dates = self.dates[end : end + self.horizon]
            rest = self.horizon - len(dates)
            if rest:
                beyond = calendar.continued(self.dates, rest, self.lookback)
                dates = None if beyond is None else dates.append(beyond)
        if series["future"] is not None:
            rows = torch.arange(end, end + self.horizon).clamp_max(self.num_rows - 1)
            future = series["future"][rows].clone()
            if dates is not None:
                future[:, -self.num_marks :] = _series_contiguous(calendar.time_features(dates, self.horizon))
            batch["future"] = future.unsqueeze(0)
        return batch, dates


def _series_contiguous(values: np.ndarray) -> torch.Tensor:
    """float32 (T, C) with strides (1, T)."""
    return torch.from_numpy(np.ascontiguousarray(values.T, dtype=np.float32)).t()
