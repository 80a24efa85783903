"""A forecasting data set: a series on disk, standardized, split and cut into windows."""

from __future__ import annotations

import functools
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from exp.data.base import Data, ExampleBatch, Prediction
from exp.data.extensions import DataExtensions, Units
from exp.data.fingerprint import file_fingerprint, shortened
from exp.errors import ConfigError, DataError
from exp.forecasting.calibration import build_intervals
from exp.forecasting.data.calendar import TIME_FEATURES, same_spacing, time_features
from exp.forecasting.data.files import find_file
from exp.forecasting.data.series import (
    TrainingStatistics,
    add_derived_columns,
    compute_statistics,
    outlier_warnings,
    read_series,
)
from exp.forecasting.data.splits import split_rows
from exp.forecasting.data.windows import WindowDataset
from exp.forecasting.interval_metrics import IntervalMetrics
from exp.forecasting.keys import ForecastingDataConfig
from exp.forecasting.metrics import Baselines, Bounds, ForecastMetrics, SeriesIds
from exp.forecasting.model import Contract
from exp.forecasting.outputs import Points

if TYPE_CHECKING:
    from exp.data.fingerprint import Fingerprint
    from exp.forecasting.data.series import Series
    from exp.forecasting.intervals import Intervals
    from exp.metrics import Metric
    from exp.session import Session


class ForecastingData(Data):
    """A multivariate series for forecasting, standardized in float64 with the training rows' mean and deviation.

    The file is read when something of it is first asked for, or by :meth:`load_state_dict`: with the
    :class:`TrainingStatistics` of weights, a file can be used that is too short for its split, that has no training
    rows (``split=test_only``), or whose dates are ambiguous. If it is too short, all of its rows are then for testing.

    Attributes:
        train, val, test: windows of each split, views of one series.
        rows: the first row of each split and the one after the last, of each series, int64 (S, 2), by name.
        ids: names of the S series of a table; None: it is one series.
        starts: the first row of each series, and the number of all rows, int64 (S + 1,).
        observed_stops: the row after the last one with a target's value, of each series, int64 (S,); its end unless
            covariates may run ahead.
        num_marks: number of time features (M).
        intervals: intervals around forecasts (:meth:`calibrate`); None: there are none.
        lower, upper: bounds of forecasts in the units of the file; None: there is none.
        config: the keys of ``data``.
        path: of the file.
        names: of the C series.
        scored: positions in ``names`` of the series that are forecast.
        target_names: names of these.
        mean: of the training rows in the units of the file, float64 (C,); of many series (S, C).
        std: population standard deviation of the training rows, likewise; 1 where a series is constant.
        num_rows: number of rows of the file (T).
        dates: of the rows; None: the file has no dates.
        calendar: when rows come (:class:`exp.forecasting.data.calendar.Calendar`); None: not known.
        baselines: the naive forecasts that models are compared with.
        notes: warnings about the data.

    Args:
        **keys: of :class:`exp.forecasting.keys.ForecastingDataConfig`.

    Raises:
        DataError: there is no such file.
    """

    raw_arguments = ("derived_columns",)
    num_marks = len(TIME_FEATURES)
    intervals: Intervals | None = None
    rows: dict[str, np.ndarray]
    _uses_future = True  # until the model is built
    _tensors: dict[str, torch.Tensor]  # the arguments of WindowDataset

    def __init__(self, **keys: Any) -> None:
        self.config = config = ForecastingDataConfig(**keys)
        self.name, self.lookback, self.horizon = config.name, config.lookback, config.horizon
        self.eval_batch_size, self.num_workers = config.eval_batch_size, config.num_workers
        self.lower, self.upper = config.lower, config.upper
        self.path = find_file(config)

    def __getattr__(self, name: str) -> Any:
        """An attribute that is not set yet: read the file.

        Raises:
            DataError: see :meth:`_load`; or all rows are for testing, and ``name`` is another split.
        """
        if name.startswith("__"):  # of pickle and copy
            raise AttributeError(name)
        if "rows" not in vars(self):
            self._load()
            return getattr(self, name)
        if name in ("train", "val", "test"):
            raise DataError(f"{self.path}: all its rows are for testing; it has no split {name}")
        raise AttributeError(name)

    def _load(self, saved: TrainingStatistics | None = None) -> None:
        """Read the file; standardize it by its own training rows, or by the statistics of weights.

        Args:
            saved: of the weights; None: there are none.

        Raises:
            DataError: the file is malformed, has gaps although ``allow_gaps`` is false, has values that float32 cannot
                represent, or cannot be used without the statistics of weights.
        """
        if saved is not None:
            self.config = replace(self.config, inputs=saved.names)
        series = read_series(self.path, self.config, saved)
        self.names, self.scored = series.columns.names, series.columns.scored
        self.target_names = [self.names[position] for position in self.scored]
        self.num_rows, self.dates, self.calendar = len(series.values), series.dates.index, series.dates.calendar
        self.ids, self.starts = series.layout.ids, series.layout.starts
        first, lengths = self.starts[:-1], np.diff(self.starts)
        self._series_of_row = torch.from_numpy(series.layout.series_of_row)
        observed = lengths
        if self.config.future_covariates is not None and self.config.missing == "mask":  # covariates may run ahead
            has_target = ~np.isnan(series.values[:, self.scored]).all(axis=1)
            after = np.arange(1, self.num_rows + 1) - np.repeat(first, lengths)
            observed = np.maximum.reduceat(np.where(has_target, after, 0), first)
        self.observed_stops = first + observed
        # Rows after the last truth have covariates only: no error can be measured there.
        num_rows = lengths if self.config.split == "test_only" else observed
        try:
            parts = split_rows(self.config, num_rows, functools.partial(series.dates.rows_before, self.starts))
            if saved is None and "train" not in parts:
                raise DataError("data.split=test_only has no rows for training, and so no standardization")
        except DataError as error:
            if saved is None or lengths.max() < self.lookback:
                raise DataError(
                    f"{self.path}: {error}. With the weights of a run, data.lookback={self.lookback} rows suffice: "
                    f"task=predict init_from=<run folder> task.input={self.path}"
                ) from error
            parts = {"test": np.stack([np.zeros_like(lengths), lengths], axis=1)}
        seconds, grid = (self.calendar.seconds, self.calendar.state_dict()) if self.calendar else (None, None)
        statistics, notes = saved, [*series.dates.warnings]
        takes_saved = saved is not None and ("train" not in parts or saved.name == self.name)
        if "train" in parts or self.ids is not None:
            train = parts["train"][:, 1] if "train" in parts else np.zeros_like(lengths)
            if self.ids is not None:  # a series that is new has at least the rows that its first window sees
                train = np.maximum(train, np.minimum(observed, self.lookback))
            saved_season = saved.season if saved is not None and takes_saved else None
            computed, warning = compute_statistics(self.config, series, train, saved_season)
            num_new = 0
            if saved is not None and takes_saved:
                statistics, num_new = saved.matched(computed)
            else:
                statistics = computed
            notes += [warning] * bool(warning and (self.ids is None or not takes_saved))
            if num_new:
                notes.append(f"{num_new} of {len(lengths)} series are new: standardized by their own first rows")
        assert statistics is not None
        notes += outlier_warnings(series)
        if saved is not None and takes_saved:
            if seconds and saved.seconds and not same_spacing(seconds, saved.seconds):
                raise DataError(
                    f"{self.path}: its rows are {timedelta(seconds=seconds)} apart, and those that the weights were "
                    f"trained on {timedelta(seconds=saved.seconds)}; give rows of that distance"
                )
            notes += saved.drift_warnings(series, range(*parts["test"][0].tolist()))
        elif saved is not None:
            notes.append(
                f"{self.name} is standardized by its own training rows, not by those of {saved.name}, which the "
                f"weights were trained on; data.name={saved.name} says that these are rows of the same series"
            )
        if self.config.season not in (None, statistics.season):  # that of the weights, which the scale belongs to
            statistics = replace(statistics, season=self.config.season, scale=None)
        date_format = series.dates.date_format
        self._statistics = replace(statistics, name=self.name, date_format=date_format, seconds=seconds, calendar=grid)
        if self.ids is not None:
            short = int((observed < self.lookback + self.horizon).sum())
            needed = f"data.lookback + data.horizon = {self.lookback + self.horizon} rows"
            notes += [f"{short} of {len(lengths)} series have fewer than {needed}, and so no window"] * bool(short)
            known = np.arange(self.num_rows) < np.repeat(first + train, lengths)
            known &= ~np.isnan(series.values[:, self.scored]).all(axis=1)
            has_value = np.logical_or.reduceat(known, first)
            num_empty = int((~has_value).sum())
            notes += [
                f"{num_empty} of {len(lengths)} series have no value in their training rows, and so no window"
            ] * (num_empty > 0)
            parts = {name: np.where(has_value[:, None], part, 0) for name, part in parts.items()}
        self._standardize(series)
        self.rows = {name: part + first[:, None] for name, part in parts.items()}
        for split, rows in self.rows.items():
            setattr(self, split, self._windows(rows, self.config.sampling == "series" and split == "train"))
        self.notes = notes

    def _windows(self, rows: np.ndarray, per_series: bool = False) -> WindowDataset:
        keep_on_device = None if self.config.device_cache == "auto" else bool(self.config.device_cache)
        sizes = self.lookback, self.horizon
        return WindowDataset(self._tensors, rows, *sizes, keep_on_device, per_series, self._static)

    def all_windows(self, stops: np.ndarray | None = None) -> WindowDataset:
        """The windows of all rows up to :attr:`observed_stops`, or up to earlier ``stops`` of each series, (S,)."""
        rows = np.stack([self.starts[:-1], self.observed_stops if stops is None else stops], axis=1)
        return self._windows(rows, self.config.sampling == "series")

    def _standardize(self, series: Series) -> None:
        statistics, of_row = self._statistics, self._series_of_row.numpy()
        scale = None if statistics.scale is None else torch.as_tensor(statistics.scale, dtype=torch.float64)
        self.mean = torch.as_tensor(statistics.mean, dtype=torch.float64)
        self.std = torch.as_tensor(statistics.std, dtype=torch.float64)
        targets = series.values[:, self.scored]
        targets = targets[~np.isnan(targets)]
        zero = -self.mean / self.std if ((targets >= 0) & (targets == np.floor(targets))).all() else None  # of counts
        self.baselines = Baselines(statistics.season, 1 < statistics.season <= self.lookback, scale, zero)
        mean, std = self.mean.numpy(), self.std.numpy()
        standardized = (series.values - mean) / std if self.ids is None else series.values - mean[of_row]
        if self.ids is not None:
            standardized /= std[of_row]
        filled = _fill_cells(standardized, self.starts)
        arrays = {"x": filled, "marks": self._marks(series)}
        if self.config.missing == "mask" or len(self.scored) < len(self.names):
            arrays["y"] = np.full_like(standardized, np.nan)
            arrays["y"][:, self.scored] = standardized[:, self.scored]
        if series.columns.covariates is not None:
            arrays["future"] = np.concatenate([filled[:, series.columns.covariates], arrays["marks"]], axis=1)
            self._raw = series
        self._tensors = {name: _series_contiguous(rows) for name, rows in arrays.items()}
        self._truth = self._tensors.get("y")
        self._static = None
        if series.static is not None:
            moments = statistics.static
            if moments is None:
                cells = torch.from_numpy(series.static)
                known = torch.where(cells == cells, cells, torch.zeros_like(cells))
                deviation = known.std(0, unbiased=False)
                moments = torch.stack(
                    [known.mean(0), torch.where(deviation > 0, deviation, torch.ones_like(deviation))]
                )
                self._statistics = replace(statistics, static=moments, categories=series.categories)
            values = ((torch.from_numpy(series.static) - moments[0]) / moments[1]).float()
            self._static = torch.where(values == values, values, torch.zeros_like(values)), self._series_of_row

    def _marks(self, series: Series) -> np.ndarray:
        if self.ids is None or self.dates is None:
            return time_features(self.dates, self.num_rows)
        codes, distinct = pd.factorize(series.dates.index)  # of many rows with the same dates
        return time_features(pd.DatetimeIndex(distinct), len(distinct))[codes]

    def series_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The number of the series of each row of the table, int64; None: it is one series."""
        return None if self.ids is None else self._series_of_row[rows].long()

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch:
        """A window of a series that has as many rows as one window."""
        config = ForecastingDataConfig(**keys)
        rows = config.lookback + config.horizon
        widths = {"x": config.channels, "marks": cls.num_marks}
        if config.missing == "mask" or config.targets or config.future_covariates:
            widths["y"] = config.channels
        if config.future_covariates is not None:
            widths["future"] = len(config.future_covariates) + cls.num_marks
        series = {name: _series_contiguous(np.zeros((rows, width))) for name, width in widths.items()}
        static = None
        if config.static:  # as if all were numbers
            static = torch.zeros(1, len(config.static)), torch.zeros(rows, dtype=torch.int32)
        window = WindowDataset(series, range(rows), config.lookback, config.horizon, static=static)[[0]]
        return ExampleBatch(window, window, {}, config.eval_batch_size)

    def fingerprint(self) -> Fingerprint:
        """A digest of the file (:mod:`exp.data.fingerprint`)."""
        return file_fingerprint(self.path)

    def state_dict(self) -> dict[str, Any]:
        """The fields of the :class:`TrainingStatistics` that is saved with weights trained on these data."""
        return asdict(self._statistics)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Standardize like the data that the weights were trained on.

        A data set of another name that has training rows keeps its own standardization, since published figures use it;
        a warning says so. If the file is too short for its split, all of its rows are for testing from now on.
        Ambiguous dates are read in the format of the training data. Series are matched by name, not by position.

        Args:
            state: the :meth:`state_dict` of the training data.

        Raises:
            DataError: the series have other names; the time between rows is another one; there are fewer than
                ``lookback`` rows; a value is so far from the mean that float32 cannot represent the difference; or
                dates are still ambiguous.
        """
        self._load(TrainingStatistics(**state))

    def setup(self, session: Session) -> None:
        """Check data, model keys and task against each other before the model is built.

        Raises:
            DataError: see :meth:`check_truth`; ``task=predict`` needs no truth.
        """
        session.extensions = DataExtensions(
            self.fingerprint, self.record, lambda model, _: self._pictures(session, model), units=self.units
        )
        task = session.config.task
        session.print(f"{self.path}: {self._season_text()}")
        session.on_model(functools.partial(self._check_model, session))
        if "intervals" in task:  # the tasks that forecast
            session.on_model(functools.partial(self.calibrate, session))
        self.check_truth({"train": list(self.rows), "eval": ["test"], "backtest": ["test"]}.get(task.name, []))

    def _season_text(self) -> str:
        """The calendar and the season, in one sentence."""
        season, inferred = self._statistics.season, self.calendar.season if self.calendar else 1
        text = self.calendar.text if self.calendar else "there are no dates"
        if self.config.season is not None:
            return f"{text}; a season has {season} rows by data.season"
        if season == inferred:
            return text
        reason = "too few training rows for a season" if season < inferred else "the weights have another season"
        return f"{text}; {reason}"

    def _check_model(self, session: Session, model: torch.nn.Module) -> None:
        """Compare with the model's contract; report its messages, and future values that it does not use."""
        contract = Contract.of(model)
        contract.check(self.example_batch(**vars(self.config)).train, len(self.scored))
        if contract.output.is_count:
            self._check_counts(type(contract.output).__name__)
        messages, covariates = [*contract.messages], self.config.future_covariates
        self._uses_future = contract.uses("future")
        if covariates is not None and not self._uses_future:
            messages.append(
                f"{type(model).__name__} does not use the future of data.future_covariates "
                f"({shortened([*covariates, 'the time features'])}): they are inputs over the lookback only"
            )
        if self.config.static and not contract.uses("static"):
            messages.append(f"{type(model).__name__} does not use data.static ({shortened(self.config.static)})")
        for message in messages:
            session.print(message)
        self.notes = [*self.notes, *messages]

    def _check_counts(self, output: str) -> None:
        """Refuse a distribution of counts for what are none.

        Raises:
            ConfigError: the series are standardized.
            DataError: a value is negative or no whole number.
        """
        if self.config.scaling != "none":
            raise ConfigError(
                f"model.output: {output} is of counts, in the units of the file; set data.scaling=none, and "
                "model.instance_norm=true for a model that does not standardize each lookback by itself"
            )
        if self.baselines.zero is None:
            raise DataError(
                f"{self.path}: {output} is of counts, and {shortened(self.target_names)} have values that are negative "
                "or no whole numbers; take another model/output"
            )
        self.lower = 0.0 if self.lower is None else self.lower  # also of what a correction has moved

    def check_truth(self, splits: Sequence[str]) -> None:
        """Refuse a split without a window, or in which no target has a value.

        Args:
            splits: the splits in which errors will be measured.

        Raises:
            DataError: there is nothing to measure; the message names file, split and series.
        """
        for split in splits:
            begins, stops = (self.rows[split] + [self.lookback, 0]).T
            first, stop = int(begins[0]), int(stops[-1])
            if not len(getattr(self, split)):
                raise DataError(
                    f"{self.path} has {self.num_rows} rows, and a window with truth needs "
                    f"{self.lookback + self.horizon} (data.lookback + data.horizon); give it more, or take "
                    "task=predict, which forecasts what follows"
                )
            if self._truth is None:
                continue
            counts = np.append(0, np.cumsum(~self._truth[:, self.scored].isnan().all(dim=1).numpy()))
            if not (counts[stops] - counts[np.minimum(begins, stops)]).any():
                raise DataError(
                    f"{self.path}: no value of {shortened(self.target_names)} where the {split} split is forecast "
                    f"(rows {first + 1} to {stop} of {self.num_rows} below the header), so that there is nothing to "
                    "measure errors of; give values, or another data.split"
                )

    def calibrate(self, session: Session, model: Any) -> None:
        """Prepare the intervals of ``task.intervals`` (:mod:`exp.forecasting.intervals`)."""
        self.intervals = build_intervals(session, self, model)

    def metrics(self, detailed: bool = False) -> Metric | list[Metric]:
        """New metrics: errors of forecasts and, after :meth:`calibrate`, metrics of the intervals.

        Args:
            detailed: also errors per series and per step of the horizon.
        """
        names = self.names if detailed else None
        many = None if self.ids is None else SeriesIds(self.ids, self._series_of_row)
        scored = None if self._truth is None else self.scored
        intervals, bounds = self.intervals, Bounds(*self.standardized_bounds())
        width = None if intervals is None or isinstance(intervals.output, Points) else intervals.output.num_values
        errors = ForecastMetrics(names, self.std, scored, self.baselines, many, bounds, width)
        if intervals is None:
            return errors
        about = self.mean, self.std, self.scored, many, self.baselines.scale, bounds
        return [errors, IntervalMetrics(intervals, names, *about)]

    def standardized_bounds(self) -> list[torch.Tensor | None]:
        """``data.lower`` and ``data.upper``, standardized, float64 (C,), of many series (S, C); None: there is none."""
        return [None if end is None else (end - self.mean) / self.std for end in (self.lower, self.upper)]

    @property
    def calibration(self) -> Mapping[str, Any] | None:
        """The corrections of intervals that came with the weights (:mod:`exp.forecasting.calibration`)."""
        return self._statistics.calibration

    def _pictures(self, session: Session, model: Any) -> dict[str, Any]:
        from exp.forecasting.predict import draw_representative

        return draw_representative(session, self, model)

    def predict(self, session: Session, model: Any) -> Prediction:
        """Forecasts as files and pictures (:func:`exp.forecasting.predict.predict`)."""
        from exp.forecasting.predict import predict

        return predict(session, self, model)

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Entries for the result of a run: windows per split, cells without truth, regularity of the dates, warnings.

        Args:
            gather: of :class:`exp.distributed.Distributed`; not needed, since every rank knows the same.
        """
        content: dict[str, Any] = {split: len(getattr(self, split)) for split in self.rows}
        if self.ids is not None:
            content["series"] = len(self.ids)
        if self._truth is not None:
            content["targets"] = self.target_names
            content["cells_without_truth"] = int(self._truth[:, self.scored].isnan().sum())
        content["season"] = self._statistics.season
        if self.calendar is not None:
            content["time_step"] = self.calendar.step
            content["irregular_steps"] = self.calendar.irregular
            content["calendar"] = self.calendar.text
        if self.notes:
            content["notes"] = list(self.notes)
        if self.baselines.verdict is not None:
            content["warnings"] = [self.baselines.verdict]
        if self.intervals is not None:
            content["intervals"] = self.intervals.record
        return content

    def units(self) -> dict[str, Units]:
        """The units of the file and of its dates, and the names of columns (``task=export``).

        Values of many series stay standardized, each series by its own mean and deviation.
        """
        forecast = [name if position in self.scored else None for position, name in enumerate(self.names)]
        lowest, highest = torch.tensor([*TIME_FEATURES.values()], dtype=torch.float64).t()
        offset, scale, parts = (lowest + highest) / 2, highest - lowest, [*TIME_FEATURES]
        if self.dates is None:  # the features are 0
            offset, scale, parts = torch.zeros_like(offset), torch.ones_like(scale), ["zero"] * self.num_marks
        mean, std, about = self.mean, self.std, {}
        if self.ids is not None:
            mean, std, about = torch.zeros_like(mean[0]), torch.ones_like(std[0]), {"standardized": "by series"}
        units = {
            "x": Units(mean, std, about={"columns": list(self.names), **about}),
            "marks": Units(offset, scale, about={"columns": parts}),
            "output": Units(mean, std, about={"columns": forecast, **about}),
        }
        if "future" in self._tensors:
            covariates = self._raw.columns.covariates or []
            offset = torch.cat([mean[covariates], offset])
            scale = torch.cat([std[covariates], scale])
            columns = [*(self.names[position] for position in covariates), *parts]
            units["future"] = Units(offset, scale, about={"columns": columns})
        return units

    def to_original_units(self, values: torch.Tensor, series: torch.Tensor | None = None) -> torch.Tensor:
        """Undo the standardization.

        Args:
            values: standardized, (..., C), any floating dtype and device; of many series (B, ..., C).
            series: of many, the number of each one, int64 (B,).

        Returns:
            The same shape, dtype and device.
        """
        # Convert the dtype first: not every device supports float64.
        mean, std = (stat.to(values.dtype).to(values.device) for stat in (self.mean, self.std))
        if series is not None:
            mean, std = (stat[series].reshape(len(series), *[1] * (values.dim() - 2), -1) for stat in (mean, std))
        return values * std + mean

    def lookback_rows(self, begin: int) -> torch.Tensor:
        """The L standardized rows of the file from ``begin`` on, (L, C); NaN where a cell has no truth."""
        return self._tensors.get("y", self._tensors["x"])[begin : begin + self.lookback]

    def future_windows(self, series: Sequence[int] = (0,)) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """The batch for a forecast of the H rows after the last observed row of some series, and their dates.

        Args:
            series: numbers of B series with at least ``lookback`` observed rows.

        Returns:
            ``{"x": (B, L, C), "marks": (B, L, M)}``, with ``data.future_covariates`` also ``"future"`` (B, H, K); and
            the dates of each, which continue the file's
            (:meth:`exp.forecasting.data.calendar.Calendar.future_dates`), or None if it has no dates or only one.
            Beyond the end of the file, covariates of ``data.derived_columns`` are computed; for a model that does not
            use ``future``, others have their last values.

        Raises:
            DataError: too few rows have values of targets, or a covariate has no value in one of the H rows; the
                message names rows and columns.
        """
        ends, stops = self.observed_stops[list(series)], self.starts[1:][list(series)]
        if (ends - self.starts[:-1][list(series)]).min() < self.lookback:
            raise DataError(
                f"{self.path}: only {ends[0]} rows up to the last value of {shortened(self.target_names)}; a forecast "
                f"sees data.lookback={self.lookback}"
            )
        begins = torch.from_numpy(ends - self.lookback)
        batch = {
            name: self._tensors[name].unfold(0, self.lookback, 1).index_select(0, begins).transpose(1, 2)
            for name in ("x", "marks")
        }
        if self._static is not None:
            batch["static"] = self._static[0][list(series)]
        dates: list[Any] = [None] * len(ends)
        for number, (end, stop) in enumerate(zip(ends.tolist(), stops.tolist())):
            missing = max(end + self.horizon - stop, 0)
            if self.dates is not None and (self.calendar or not missing):
                dates[number] = self.dates[end : min(end + self.horizon, stop)]
                if missing and self.calendar:
                    dates[number] = dates[number].append(self._dates_after(self.dates[stop - 1 : stop])[:missing])
        if "future" in self._tensors:
            parts = [
                np.concatenate([self._future_covariates(number, when), time_features(when, self.horizon)], axis=1)
                for number, when in zip(series, dates)
            ]
            batch["future"] = torch.stack([_series_contiguous(part) for part in parts])
        return batch, dates

    def _dates_after(self, last: pd.DatetimeIndex) -> pd.DatetimeIndex:
        """The H dates after one; many series end together."""
        known = vars(self).setdefault("_later_dates", {})
        if last[0] not in known:
            assert self.calendar is not None
            known[last[0]] = self.calendar.future_dates(last, self.horizon)
        dates: pd.DatetimeIndex = known[last[0]]
        return dates

    def _future_covariates(self, number: int, dates: pd.DatetimeIndex | None) -> np.ndarray:
        """The standardized covariates of the H rows after the last observed one of a series, (H, K).

        Raises:
            DataError: see :meth:`future_windows`.
        """
        series, config = self._raw, self.config
        begin, end, stop = (int(bound[number]) for bound in (self.starts, self.observed_stops, self.starts[1:]))
        num_missing = max(end + self.horizon - stop, 0)
        columns = [self.names[position] for position in series.columns.covariates or ()]
        values = np.concatenate([series.values[begin:stop], np.full((num_missing, len(self.names)), np.nan)])
        if num_missing and series.cells is not None:
            cells = series.cells.iloc[begin:stop]
            index = pd.RangeIndex(len(values)) if dates is None else cells.index.append(dates[-num_missing:])
            table = add_derived_columns(cells.reindex(index), config)
            for name in set(columns) & set(config.derived_columns):
                values[-num_missing:, self.names.index(name)] = table[name].to_numpy()[-num_missing:]
        ahead = slice(end - begin, end - begin + self.horizon)
        empty = np.isnan(values[ahead, series.columns.covariates])
        if empty.any() and self._uses_future:
            first = end + 1 + (series.header.begin if series.header else 0)
            rows = [f"row {first + row}" + ("" if dates is None else f" ({dates[row]})") for row in range(self.horizon)]
            cells_of = {name: [rows[row] for row in np.flatnonzero(lacks)] for name, lacks in zip(columns, empty.T)}
            missing = "; nor of ".join(f"{name} in {shortened(rows)}" for name, rows in cells_of.items() if rows)
            which = "" if self.ids is None else f" of series {self.ids[number]!r}"
            raise DataError(
                f"{self.path}: the forecast{which} takes data.future_covariates as known, and there is no value of "
                f"{missing}; give these rows, with the targets empty (data.missing=mask), or compute "
                "the column (data.derived_columns)"
            )
        mean, std = ((stat if self.ids is None else stat[number]).numpy() for stat in (self.mean, self.std))
        return _fill_cells((values - mean) / std, np.array([0, len(values)]))[ahead, series.columns.covariates]


def _fill_cells(standardized: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Give each empty cell the last value of its series before it, or 0, the mean of the training rows; (T, C)."""
    filled = standardized.copy()
    first = filled[starts[:-1]]
    filled[starts[:-1]] = np.where(np.isnan(first), 0.0, first)
    return pd.DataFrame(filled).ffill().to_numpy(dtype=np.float64)


def _series_contiguous(values: np.ndarray) -> torch.Tensor:
    """Convert to float32 (T, C) with strides (1, T): each series is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(values.T, dtype=np.float32)).t()
