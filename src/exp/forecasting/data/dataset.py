"""A forecasting data set: a series on disk, standardised, split and cut into windows."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np
import torch

from exp.data.base import Data, Prediction, Sketch
from exp.data.fingerprint import of_file
from exp.data.places import shortened
from exp.errors import ConfigError, DataError
from exp.forecasting.data.preflight import check_task, locate
from exp.forecasting.data.rhythm import continued
from exp.forecasting.data.roles import Roles
from exp.forecasting.data.source import SeriesFile
from exp.forecasting.data.standardised_series import StandardisedSeries, series_contiguous
from exp.forecasting.data.timefeatures import NUM_TIME_FEATURES, time_features
from exp.forecasting.data.windows import WindowDataset

if TYPE_CHECKING:
    import pandas as pd

    from exp.data.fingerprint import Fingerprint
    from exp.forecasting.intervals.intervals import Intervals
    from exp.metrics import Metric
    from exp.session import Session

__all__ = ["ForecastingData"]


class ForecastingData(StandardisedSeries, Data):
    """A multivariate series for forecasting; the fields are those of :class:`exp.config.schema.ForecastingDataConfig`.

    :attr:`train`, :attr:`val` and :attr:`test` are views of the standardised series.

    Attributes:
        num_marks: number of time features (M).
        intervals: around forecasts (:meth:`calibrate`); None: none are asked for.
        tested_on: the part that metrics are of in the end.

    Args:
        name: of the data set.
        root: folder of the user's files; None: the sample data that come with exp.
        file: path below ``root``.
        archive_folder: see :func:`exp.forecasting.data.preflight.locate`.
        split: see :func:`exp.forecasting.data.splits.borders`.
        channels: number of series that are read (C).
        inputs: see :class:`exp.forecasting.data.roles.Roles`.
        targets: see there.
        covariates: see there.
        missing: ``refuse`` empty cells, or ``mask`` them: they are seen as the last value before them (the mean of the
            training rows where there is none), and left out of loss and metrics.
        lookback: rows that a forecast sees (L).
        horizon: rows that it forecasts (H).
        header: see :func:`exp.forecasting.data.series.read_series`.
        date_column: see there.
        date_format: see :func:`exp.forecasting.data.dates.parse_dates`.
        allow_gaps: whether rows may be at other distances in time than most.
        on_device: whether a card keeps the series and cuts the windows, so that only their numbers cross; ``auto``:
            where it is small beside the card's free memory. The same numbers either way.
        eval_batch_size: windows per rank and batch in evaluation; kept for who builds the loaders.
        num_workers: data-loader processes; kept for who builds the loaders.

    Raises:
        ConfigError: ``on_device`` is something else.
        DataError: the file is missing or malformed, or has gaps that are not allowed.
    """

    num_marks = NUM_TIME_FEATURES
    intervals: Intervals | None = None
    tested_on = "test"

    def __init__(
        self,
        name: str,
        file: str,
        channels: int,
        root: str | None = None,
        archive_folder: str | None = None,
        inputs: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        covariates: Sequence[str] | None = None,
        missing: str = "refuse",
        split: str = "ratio",
        lookback: int = 720,
        horizon: int = 96,
        header: bool = True,
        date_column: str | None = "date",
        date_format: str | None = None,
        allow_gaps: bool = True,
        on_device: bool | str = "auto",
        eval_batch_size: int = 128,
        num_workers: int = 0,
    ) -> None:
        if on_device not in (True, False, "auto"):
            raise ConfigError(f"data.on_device={on_device} must be auto, true or false")
        self._resident = None if on_device == "auto" else bool(on_device)
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        path = locate(root, file, name, header, archive_folder)
        roles = Roles.of(inputs, targets, covariates, missing)
        source = SeriesFile(path, header, channels, date_column, date_format, allow_gaps, roles)
        super().__init__(name, source, split, lookback, horizon)

    @classmethod
    def sketch(cls, **keys: Any) -> Sketch:
        """A window of a series that has as many rows as one window."""
        lookback, horizon, channels = (int(keys[key]) for key in ("lookback", "horizon", "channels"))
        rows = lookback + horizon
        values, marks = (series_contiguous(np.zeros((rows, width))) for width in (channels, cls.num_marks))
        roles = Roles.of_keys(keys)
        truth = values if roles.masks or roles.targets or roles.covariates else None
        ahead = len(roles.covariates or ()) + cls.num_marks
        future = None if roles.covariates is None else series_contiguous(np.zeros((rows, ahead)))
        window = WindowDataset(values, marks, range(rows), lookback, horizon, truth=truth, future=future)[[0]]
        return Sketch(window, window, {}, int(keys["eval_batch_size"]))

    def fingerprint(self) -> Fingerprint:
        """What the file holds, in short (:mod:`exp.data.fingerprint`)."""
        return of_file(self.path)

    def adopt(self, state: Mapping[str, Any]) -> None:
        """See :meth:`exp.forecasting.data.standardised_series.StandardisedSeries.adopt`."""
        super().adopt(state)
        for part in ("train", "val", "test"):
            self.__dict__.pop(part, None)  # windows of the former values

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

    def _windows(self, part: str) -> WindowDataset:
        if part not in self.rows:
            raise DataError(f"{self.path}: all its rows are new; it has no part for {part}")
        more = {"truth": self._truth, "future": self._future}
        rows = self.rows[part]
        return WindowDataset(self._values, self._marks, rows, self.lookback, self.horizon, self._resident, **more)

    def settle(self, session: Session) -> None:
        """Refuse, before the model is built, keys of the task that cannot be, and new rows that cannot be scored.

        Raises:
            ConfigError: see :func:`exp.forecasting.data.preflight.check_task`; or a model of exp's has a window that is
                not the data's.
            DataError: there is no window with truth, and the task is not to forecast what follows the rows.
        """
        task, model = session.config.task, session.config.model
        check_task(task)
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
        self.check_truth({"train": tuple(self.rows), "eval": ("test",)}.get(task.name, ()))
        if task.name != "predict" and list(self.rows) == ["test"] and not len(self.test):
            raise DataError(
                f"{self.path} has {self.num_rows} rows, and task={task.name} needs {self.lookback + self.horizon} "
                f"(data.lookback + data.horizon); give it more, or take task=predict, which forecasts what follows"
            )

    def calibrate(self, session: Session, model: Any) -> None:
        """Intervals around forecasts, where ``task.intervals`` asks for them (:mod:`exp.forecasting.intervals`)."""
        if session.config.task.get("intervals"):
            from exp.forecasting.intervals.calibrate import prepare

            self.intervals = prepare(session, self, model)

    def metrics(self, detailed: bool = False) -> Metric | list[Metric]:
        """A new accumulator of this data set's metrics: of standardised values, as they are published, and beside them
        in the units of the file; and of the intervals, once they are prepared.

        Args:
            detailed: also errors per series and per step of the horizon.
        """
        from exp.forecasting.metrics import ForecastMetrics

        names = self.names if detailed else None
        errors = ForecastMetrics(names, self.std, None if self._truth is None else self.scored)
        if self.intervals is None:
            return errors
        from exp.forecasting.intervals.metrics import AdaptiveMetrics, IntervalMetrics

        metrics: list[Metric] = [errors, IntervalMetrics(self.intervals, names, self.mean, self.std, self.scored)]
        return metrics + ([AdaptiveMetrics(self.intervals)] if self.intervals.adapts else [])

    def predict(self, session: Session, model: Any) -> Prediction:
        """Forecasts as files and pictures (:func:`exp.forecasting.predict.predict`)."""
        from exp.forecasting.predict import predict

        self.calibrate(session, model)
        return predict(session, self, model)

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Windows of each part, and how regular the dates are, for the result of a run.

        Args:
            gather: of :class:`exp.engine.distributed.Distributed`, for data that ranks know different things of.
        """
        content: dict[str, Any] = {part: len(self._windows(part)) for part in self.rows}
        if self._truth is not None:
            content["targets"] = self.target_names
            content["cells_without_truth"] = int(self._truth[:, self.scored].isnan().sum())
        if self.rhythm is not None:
            content["time_step"] = self.rhythm.step
            content["irregular_steps"] = self.rhythm.irregular
        if self.notes:
            content["notes"] = list(self.notes)
        if self.intervals is not None:
            content["intervals"] = self.intervals.record
        return content

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

    def past(self, begin: int) -> torch.Tensor:
        """L standardised rows of the file from a row on, (L, C): NaN where there is no truth, not what fills it."""
        rows = self._values if self._truth is None else self._truth
        return rows[begin : begin + self.lookback]

    @property
    def num_past(self) -> int:
        """Rows that are past (:class:`exp.forecasting.data.source.SeriesFile`).

        Raises:
            DataError: they are too few for a forecast.
        """
        self._require()
        rows = self._file.num_past
        if rows < self.lookback:
            raise DataError(
                f"{self.path}: only {rows} rows up to the last value of {shortened(self.target_names)}; a forecast "
                f"sees data.lookback={self.lookback}"
            )
        return rows

    def future_window(self) -> tuple[dict[str, torch.Tensor], pd.DatetimeIndex | None]:
        """What a forecast beyond the last row of the file sees, and the H dates that it is for.

        Where covariates are known ahead, ``future`` (1, H, K) has those of the rows after :attr:`num_past`; beyond the
        end of the file the last ones go on.

        Returns:
            ``{"x": (1, L, C), "marks": (1, L, M)}``, and the dates (None where the file has none, or only one): they
            continue the file's (:func:`exp.forecasting.data.rhythm.continued`).
        """
        end = self.num_past
        seen = slice(end - self.lookback, end)
        batch = {"x": self._values[seen].unsqueeze(0), "marks": self._marks[seen].unsqueeze(0)}
        dates = None
        if self.dates is not None:
            dates = self.dates[end : end + self.horizon]
            rest = self.horizon - len(dates)
            if rest:
                beyond = continued(self.dates, rest, self.lookback)
                dates = None if beyond is None else dates.append(beyond)
        if self._future is not None:
            rows = torch.arange(end, end + self.horizon).clamp_max(self.num_rows - 1)
            future = self._future[rows].clone()
            if dates is not None:
                future[:, -self.num_marks :] = series_contiguous(time_features(dates, self.horizon))
            batch["future"] = future.unsqueeze(0)
        return batch, dates
