"""A forecasting data set: a series on disk, standardized, split and cut into windows."""

from __future__ import annotations

import functools
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from exp.data.base import Data, ExampleBatch, Prediction
from exp.data.extensions import DataExtensions, Units
from exp.data.fingerprint import file_fingerprint, shortened
from exp.errors import DataError
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
from exp.forecasting.intervals import IntervalMetrics, Intervals, build_intervals
from exp.forecasting.keys import ForecastingDataConfig
from exp.forecasting.metrics import Baselines, ForecastMetrics
from exp.forecasting.model import Contract

if TYPE_CHECKING:
    from exp.data.fingerprint import Fingerprint
    from exp.forecasting.data.series import Series
    from exp.metrics import Metric
    from exp.session import Session

__all__ = ["ForecastingData", "WindowDataset"]


class ForecastingData(Data):
    """A multivariate series for forecasting, standardized in float64 with the training rows' mean and deviation.

    The file is read when something of it is first asked for, or by :meth:`load_state_dict`: with the
    :class:`TrainingStatistics` of weights, a file can be used that is too short for its split, that has no training
    rows (``split=test_only``), or whose dates are ambiguous. If it is too short, all of its rows are then for testing.

    Attributes:
        train, val, test: windows of each split, views of one series.
        rows: the rows of each split, by name.
        num_marks: number of time features (M).
        intervals: intervals around forecasts (:meth:`calibrate`); None: there are none.
        config: the keys of ``data``.
        path: of the file.
        names: of the C series.
        scored: positions in ``names`` of the series that are forecast.
        target_names: names of these.
        mean: of the training rows in the units of the file, float64 (C,).
        std: population standard deviation of the training rows, float64 (C,); 1 where a series is constant.
        num_rows: number of rows of the file (T).
        num_observed_rows: number of rows up to the last one with a target's value; all rows unless covariates may run
            ahead.
        dates: of the rows; None: the file has no dates.
        calendar: when rows come (:class:`exp.forecasting.data.calendar.Calendar`); None: not known.
        notes: warnings about the data.

    Args:
        **keys: of :class:`exp.forecasting.keys.ForecastingDataConfig`.

    Raises:
        DataError: there is no such file.
    """

    raw_arguments = ("derived_columns",)
    num_marks = len(TIME_FEATURES)
    intervals: Intervals | None = None
    rows: dict[str, range]
    _uses_future = True  # until the model is built
    _tensors: dict[str, torch.Tensor]  # the arguments of WindowDataset

    def __init__(self, **keys: Any) -> None:
        self.config = config = ForecastingDataConfig(**keys)
        self.name, self.lookback, self.horizon = config.name, config.lookback, config.horizon
        self.eval_batch_size, self.num_workers = config.eval_batch_size, config.num_workers
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
        self.num_observed_rows = self.num_rows
        if self.config.future_covariates is not None and self.config.missing == "mask":  # covariates may run ahead
            has_target = ~np.isnan(series.values[:, self.scored]).all(axis=1)
            self.num_observed_rows -= int(has_target[::-1].argmax()) if has_target.any() else self.num_rows
        # Rows after the last truth have covariates only: no error can be measured there.
        num_rows = self.num_rows if self.config.split == "test_only" else self.num_observed_rows
        try:
            parts = split_rows(self.config, np.array([num_rows]), series.dates.rows_before)
            rows = {split: range(*part[0].tolist()) for split, part in parts.items()}
            if saved is None and "train" not in rows:
                raise DataError("data.split=test_only has no rows for training, and so no standardization")
        except DataError as error:
            if saved is None or self.num_rows < self.lookback:
                raise DataError(
                    f"{self.path}: {error}. With the weights of a run, data.lookback={self.lookback} rows suffice: "
                    f"task=predict init_from=<run folder> task.input={self.path}"
                ) from error
            rows = {"test": range(self.num_rows)}
        seconds, grid = (self.calendar.seconds, self.calendar.state_dict()) if self.calendar else (None, None)
        statistics, notes = saved, [*series.dates.warnings]
        if "train" in rows:
            computed, warning = compute_statistics(self.config, series, len(rows["train"]))
            statistics = computed if saved is None or saved.name != self.name else saved
            notes += [warning] * bool(warning)
        assert statistics is not None
        notes += outlier_warnings(series)
        if statistics is saved:
            if seconds and saved.seconds and not same_spacing(seconds, saved.seconds):
                raise DataError(
                    f"{self.path}: its rows are {timedelta(seconds=seconds)} apart, and those that the weights were "
                    f"trained on {timedelta(seconds=saved.seconds)}; give rows of that distance"
                )
            notes += saved.drift_warnings(series, rows["test"])
        elif saved is not None:
            notes.append(
                f"{self.name} is standardized by its own training rows, not by those of {saved.name}, which the "
                f"weights were trained on; data.name={saved.name} says that these are rows of the same series"
            )
        if self.config.season not in (None, statistics.season):  # that of the weights, which the scale belongs to
            statistics = replace(statistics, season=self.config.season, scale=None)
        date_format = series.dates.date_format
        self._statistics = replace(statistics, name=self.name, date_format=date_format, seconds=seconds, calendar=grid)
        self._standardize(series)
        for split, part in rows.items():
            setattr(self, split, self._windows(part))
        self.notes, self.rows = notes, rows

    def _windows(self, rows: range) -> WindowDataset:
        keep_on_device = None if self.config.device_cache == "auto" else bool(self.config.device_cache)
        return WindowDataset(self._tensors, rows, self.lookback, self.horizon, keep_on_device)

    def all_windows(self) -> WindowDataset:
        """The windows of all rows up to :attr:`num_observed_rows`."""
        return self._windows(range(self.num_observed_rows))

    def _standardize(self, series: Series) -> None:
        statistics = self._statistics
        scale = None if statistics.scale is None else torch.tensor(statistics.scale, dtype=torch.float64)
        self.mean = torch.tensor(statistics.mean, dtype=torch.float64)
        self.std = torch.tensor(statistics.std, dtype=torch.float64)
        targets = series.values[:, self.scored]
        targets = targets[~np.isnan(targets)]
        zero = -self.mean / self.std if ((targets >= 0) & (targets == np.floor(targets))).all() else None  # of counts
        self._baselines = Baselines(statistics.season, 1 < statistics.season <= self.lookback, scale, zero)
        standardized = (series.values - self.mean.numpy()) / self.std.numpy()
        filled = _fill_cells(standardized)
        arrays = {"x": filled, "marks": time_features(self.dates, self.num_rows)}
        if self.config.missing == "mask" or len(self.scored) < len(self.names):
            arrays["y"] = np.full_like(standardized, np.nan)
            arrays["y"][:, self.scored] = standardized[:, self.scored]
        if series.columns.covariates is not None:
            arrays["future"] = np.concatenate([filled[:, series.columns.covariates], arrays["marks"]], axis=1)
            self._raw = series
        self._tensors = {name: _series_contiguous(rows) for name, rows in arrays.items()}
        self._truth = self._tensors.get("y")

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
        window = WindowDataset(series, range(rows), config.lookback, config.horizon)[[0]]
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
        session.extensions = DataExtensions(self.fingerprint, self.record, units=self.units)
        task = session.config.task
        session.print(f"{self.path}: {self._season_text()}")
        session.on_model(functools.partial(self._check_model, session))
        if task.get("intervals"):
            session.on_model(functools.partial(self.calibrate, session))
        self.check_truth({"train": list(self.rows), "eval": ["test"]}.get(task.name, []))

    def _season_text(self) -> str:
        """The calendar and the season, in one sentence."""
        season, inferred = self._statistics.season, self.calendar.season if self.calendar else 1
        text = self.calendar.text if self.calendar else "there are no dates"
        if self.config.season is not None:
            return f"{text}; a season has {season} rows by data.season"
        reason = "too few training rows for a season" if season < inferred else "data.season sets another season"
        return f"{text}; {reason}"

    def _check_model(self, session: Session, model: torch.nn.Module) -> None:
        """Compare with the model's contract; report its messages, and future values that it does not use."""
        contract = Contract.of(model)
        contract.check(self.example_batch(**vars(self.config)).train, len(self.scored))
        messages, covariates = [*contract.messages], self.config.future_covariates
        self._uses_future = contract.uses("future")
        if covariates is not None and not self._uses_future:
            messages.append(
                f"{type(model).__name__} does not use the future of data.future_covariates "
                f"({shortened([*covariates, 'the time features'])}): they are inputs over the lookback only"
            )
        for message in messages:
            session.print(message)
        self.notes = [*self.notes, *messages]

    def check_truth(self, splits: Sequence[str]) -> None:
        """Refuse a split without a window, or in which no target has a value.

        Args:
            splits: the splits in which errors will be measured.

        Raises:
            DataError: there is nothing to measure; the message names file, split and series.
        """
        for split in splits:
            first, stop = self.rows[split].start + self.lookback, self.rows[split].stop
            if stop - first < self.horizon:
                raise DataError(
                    f"{self.path} has {self.num_rows} rows, and a window with truth needs "
                    f"{self.lookback + self.horizon} (data.lookback + data.horizon); give it more, or take "
                    "task=predict, which forecasts what follows"
                )
            if self._truth is not None and self._truth[first:stop, self.scored].isnan().all():
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
        errors = ForecastMetrics(names, self.std, None if self._truth is None else self.scored, self._baselines)
        if self.intervals is None:
            return errors
        return [errors, IntervalMetrics(self.intervals, names, self.mean, self.std, self.scored)]

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
        if self._baselines.verdict is not None:
            content["warnings"] = [self._baselines.verdict]
        if self.intervals is not None:
            content["intervals"] = self.intervals.record
        return content

    def units(self) -> dict[str, Units]:
        """The units of the file and of its dates, and the names of columns (``task=export``)."""
        forecast = [name if position in self.scored else None for position, name in enumerate(self.names)]
        lowest, highest = torch.tensor([*TIME_FEATURES.values()], dtype=torch.float64).t()
        offset, scale, parts = (lowest + highest) / 2, highest - lowest, [*TIME_FEATURES]
        if self.dates is None:  # the features are 0
            offset, scale, parts = torch.zeros_like(offset), torch.ones_like(scale), ["zero"] * self.num_marks
        units = {
            "x": Units(self.mean, self.std, about={"columns": list(self.names)}),
            "marks": Units(offset, scale, about={"columns": parts}),
            "output": Units(self.mean, self.std, about={"columns": forecast}),
        }
        if "future" in self._tensors:
            covariates = self._raw.columns.covariates or []
            offset = torch.cat([self.mean[covariates], offset])
            scale = torch.cat([self.std[covariates], scale])
            columns = [*(self.names[position] for position in covariates), *parts]
            units["future"] = Units(offset, scale, about={"columns": columns})
        return units

    def to_original_units(self, values: torch.Tensor) -> torch.Tensor:
        """Undo the standardization.

        Args:
            values: standardized, (..., C), any floating dtype and device.

        Returns:
            The same shape, dtype and device.
        """
        # Convert the dtype first: not every device supports float64.
        mean, std = (stat.to(values.dtype).to(values.device) for stat in (self.mean, self.std))
        return values * std + mean

    def lookback_rows(self, begin: int) -> torch.Tensor:
        """The L standardized rows of the file from ``begin`` on, (L, C); NaN where a cell has no truth."""
        return self._tensors.get("y", self._tensors["x"])[begin : begin + self.lookback]

    def future_window(self) -> tuple[dict[str, torch.Tensor], pd.DatetimeIndex | None]:
        """The batch for a forecast of the H rows after :attr:`num_observed_rows`, and their dates.

        Returns:
            ``{"x": (1, L, C), "marks": (1, L, M)}``, with ``data.future_covariates`` also ``"future"`` (1, H, K); and
            the dates, which continue the file's (:meth:`exp.forecasting.data.calendar.Calendar.future_dates`), or None
            if it has no dates or only one. Beyond the end of the file, covariates of ``data.derived_columns`` are
            computed; for a model that does not use ``future``, others have their last values.

        Raises:
            DataError: too few rows have values of targets, or a covariate has no value in one of the H rows; the
                message names rows and columns.
        """
        end = self.num_observed_rows
        if end < self.lookback:
            raise DataError(
                f"{self.path}: only {end} rows up to the last value of {shortened(self.target_names)}; a forecast sees "
                f"data.lookback={self.lookback}"
            )
        lookback = slice(end - self.lookback, end)
        batch = {name: self._tensors[name][lookback].unsqueeze(0) for name in ("x", "marks")}
        dates = None
        num_missing = max(end + self.horizon - self.num_rows, 0)
        if self.dates is not None and (self.calendar or not num_missing):
            dates = self.dates[end : end + self.horizon]
            if num_missing and self.calendar:
                dates = dates.append(self.calendar.future_dates(self.dates, num_missing))
        if "future" in self._tensors:
            covariates = self._future_covariates(dates, num_missing)
            future = np.concatenate([covariates, time_features(dates, self.horizon)], axis=1)
            batch["future"] = _series_contiguous(future).unsqueeze(0)
        return batch, dates

    def _future_covariates(self, dates: pd.DatetimeIndex | None, num_missing: int) -> np.ndarray:
        """The standardized covariates of the H rows after :attr:`num_observed_rows`, (H, K); the file lacks the last
        ``num_missing``.

        Raises:
            DataError: see :meth:`future_window`.
        """
        series, config = self._raw, self.config
        columns = [self.names[position] for position in series.columns.covariates or ()]
        values = np.concatenate([series.values, np.full((num_missing, len(self.names)), np.nan)])
        if num_missing and series.cells is not None:
            index = pd.RangeIndex(len(values)) if dates is None else series.cells.index.append(dates[-num_missing:])
            table = add_derived_columns(series.cells.reindex(index), config)
            for name in set(columns) & set(config.derived_columns):
                values[-num_missing:, self.names.index(name)] = table[name].to_numpy()[-num_missing:]
        empty = np.isnan(values[self.num_observed_rows :][: self.horizon, series.columns.covariates])
        if empty.any() and self._uses_future:
            first = self.num_observed_rows + 1 + (series.header.begin if series.header else 0)
            rows = [f"row {first + row}" + ("" if dates is None else f" ({dates[row]})") for row in range(self.horizon)]
            cells = {name: [rows[row] for row in np.flatnonzero(lacks)] for name, lacks in zip(columns, empty.T)}
            missing = "; nor of ".join(f"{name} in {shortened(rows)}" for name, rows in cells.items() if rows)
            raise DataError(
                f"{self.path}: the forecast takes data.future_covariates as known, and there is no value of "
                f"{missing}; give these rows, with the targets empty (data.missing=mask), or compute "
                "the column (data.derived_columns)"
            )
        filled = _fill_cells((values - self.mean.numpy()) / self.std.numpy())
        return filled[self.num_observed_rows :][: self.horizon, series.columns.covariates]


def _fill_cells(standardized: np.ndarray) -> np.ndarray:
    """Give each empty cell the last value before it, or 0, the mean of the training rows; (T, C)."""
    return pd.DataFrame(standardized).ffill().fillna(0.0).to_numpy(dtype=np.float64)


def _series_contiguous(values: np.ndarray) -> torch.Tensor:
    """Convert to float32 (T, C) with strides (1, T): each series is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(values.T, dtype=np.float32)).t()


# Most memory that a series may take on a device: a share of its free memory, or bytes if that is not known.
_DEVICE_FRACTION, _DEVICE_BYTES = 1 / 16, 2**28


class WindowDataset(Dataset):
    """The windows of some rows of a series, stride 1; indexed by a whole batch.

    Holds views only: all splits of a series, and all data-loader workers, share its memory.

    Args:
        series: float32 each: ``x`` (T, C), the series; ``marks`` (T, M), time features; optionally ``y`` (T, C), the
            truth if it is not ``x``, NaN where there is none; and ``future`` (T, K), values that are known over the
            horizon. Fastest if each column is contiguous (strides (1, T)): a window is then C contiguous pieces,
            and batches are contiguous as (B, C, L), the layout that the models use.
        rows: the rows that windows are cut from; fewer than ``lookback + horizon`` give no window.
        lookback: input rows of a window (L).
        horizon: forecast rows of a window (H).
        keep_on_device: whether a card keeps the rows and cuts the windows; None: if they are small compared with its
            free memory.
    """

    is_batched = yields_tensors = True

    def __init__(
        self,
        series: Mapping[str, torch.Tensor],
        rows: range,
        lookback: int,
        horizon: int,
        keep_on_device: bool | None = None,
    ) -> None:
        # One tensor per storage, cut into windows on access: torch 1.10 cannot send two views of one storage to a new
        # process.
        self._tensors = {name: tensor[rows.start : rows.stop] for name, tensor in series.items()}
        self.rows, self.lookback, self.horizon, self.keep_on_device = rows, lookback, horizon, keep_on_device

    def __len__(self) -> int:
        return max(len(self.rows) - self.lookback - self.horizon + 1, 0)

    def __getitem__(self, indices: torch.Tensor | Sequence[int]) -> dict[str, torch.Tensor]:
        """Cut a batch.

        Args:
            indices: window numbers, int64 (B,) or a list.

        Returns:
            ``{"x": (B, L, C), "marks": (B, L, M), "y": (B, H, C)}``, float32, transposed views of contiguous (B, C, L);
            and ``"index"``: the window numbers, (B,). With ``y`` also ``"observed"`` (B, H, C): 1 where it has a value,
            else 0; with ``future`` also ``"future"`` (B, H, K).

        Raises:
            IndexError: a number is negative or not below ``len(self)``.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        # unfold: (rows, C) -> (windows, C, size), without copying.
        length = self.lookback + self.horizon
        windows = {name: tensor.unfold(0, length, 1) for name, tensor in self._tensors.items()}
        # index_select copies contiguous pieces; view[index] copies element by element, 3 to 30 times slower on torch
        # 2.13.
        return self._batch(index, lambda name, rows: windows[name][..., rows].index_select(0, index))

    def _batch(self, index: torch.Tensor, cut: Callable[[str, slice], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Assemble a batch; ``cut`` returns some rows of each window of a tensor, contiguous as (B, C, rows)."""
        lookback, horizon = slice(self.lookback), slice(self.lookback, None)
        batch = {name: cut(name, lookback).transpose(1, 2) for name in ("x", "marks")}
        batch["y"] = cut("y" if "y" in self._tensors else "x", horizon).transpose(1, 2)
        if "future" in self._tensors:
            batch["future"] = cut("future", horizon).transpose(1, 2)
        if "y" in self._tensors:
            batch["observed"] = (batch["y"] == batch["y"]).to(torch.float32)  # only NaN differs from itself
        return {**batch, "index": index}

    def sample_ids(self, keys: torch.Tensor) -> torch.Tensor:
        """The keys of the sampler, which are window numbers already."""
        return keys

    def device_builder(self, device: torch.device, free: int | None) -> Callable[[torch.Tensor], dict[str, Any]] | None:
        """Copy the rows to a device, and return a function that cuts batches there.

        Args:
            device: a card.
            free: free bytes of its memory; None: not known.

        Returns:
            A function of window numbers on the device, int64 (B,); its batches equal those of :meth:`__getitem__`,
            strides included. None: batches are to be cut on the host.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())
        fits = size <= (_DEVICE_BYTES if free is None else free * _DEVICE_FRACTION)
        if not (fits if self.keep_on_device is None else self.keep_on_device):
            return None
        columns = {name: tensor.t().contiguous().to(device) for name, tensor in self._tensors.items()}
        window = torch.arange(self.lookback + self.horizon, dtype=torch.int32).to(device)

        def cut(index: torch.Tensor) -> dict[str, Any]:
            # Not by strided views, as on the host: some devices copy the whole view (all windows) before they select.
            # The arithmetic is in int32, which every card supports.
            rows = (index.to(torch.int32).unsqueeze(1) + window).reshape(-1)
            windows = {
                name: series.index_select(1, rows).view(len(series), len(index), len(window)).transpose(0, 1)
                for name, series in columns.items()
            }
            return self._batch(index, lambda name, part: windows[name][..., part].contiguous())

        return cut
