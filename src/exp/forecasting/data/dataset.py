"""A forecasting data set: a series on disk, standardised, split and cut into windows."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Callable, Mapping

import numpy as np
import torch

from exp.data.base import Data, Prediction, Sketch
from exp.data.fingerprint import of_file
from exp.errors import ConfigError, DataError
from exp.forecasting.data.preflight import locate
from exp.forecasting.data.rhythm import continued, find_rhythm, gap_notes
from exp.forecasting.data.series import AmbiguousDatesError, read_series
from exp.forecasting.data.splits import TooFewRowsError, borders
from exp.forecasting.data.standardise import standardised, statistics
from exp.forecasting.data.timefeatures import NUM_TIME_FEATURES, time_features
from exp.forecasting.data.windows import WindowDataset

if TYPE_CHECKING:
    import pandas as pd

    from exp.data.fingerprint import Fingerprint
    from exp.forecasting.data.series import Series
    from exp.forecasting.metrics import ForecastMetrics
    from exp.session import Session

__all__ = ["ForecastingData"]


class ForecastingData(Data):
    """A multivariate series for forecasting; the fields are those of :class:`exp.config.schema.ForecastingDataConfig`.

    The series is standardised with mean and population standard deviation of the training rows, in float64, and then
    kept once, as float32; :attr:`train`, :attr:`val` and :attr:`test` are views of it.

    A file that is too short for its split, that has no training rows (``split="new"``) or whose dates are ambiguous is
    read, too: it can be used once :meth:`adopt` has told how the data were read and standardised that weights have
    been trained on. If it is too short, all of its rows are for testing then.

    Attributes:
        name: of the data set.
        path: of the file.
        names: of the C series.
        num_rows: of the file.
        dates: of the rows; None where the file has none.
        rhythm: how far apart they are (:class:`exp.forecasting.data.rhythm.Rhythm`); None where that is not known.
        notes: what the user should be told of the file, a line each.
        num_marks: number of time features (M).
        tested_on: the part that metrics are of in the end.

    Args:
        name: of the data set.
        root: folder of the user's files; None: the sample data that come with exp.
        file: path below ``root``.
        split: see :func:`exp.forecasting.data.splits.borders`.
        channels: number of series expected (C).
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
        self.name = name
        self.lookback = lookback
        self.horizon = horizon
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.path = locate(root, file, name, header)
        self._read = partial(read_series, self.path, header, channels, date_column)
        self._allow_gaps = allow_gaps
        self.notes: list[str] = []
        self._ambiguous: AmbiguousDatesError | None = None
        self._too_few: DataError | None = None
        try:
            series = self._read(date_format)
            self._take_dates(series)
        except AmbiguousDatesError as error:
            self._ambiguous = error
            series = self._read_as_one_of(error)
        self.names = list(series.names)
        self.num_rows = len(series.values)
        self._waiting: Series | None = series  # until mean and standard deviation are known
        self._rows: dict[str, range] = {}
        try:
            self._rows = borders(split, self.num_rows, lookback, horizon)
        except TooFewRowsError as error:
            hint = (
                f". To forecast with trained weights, data.lookback={lookback} rows suffice: task=predict "
                f"init_from=<run folder> task.input={self.path}"
            )
            self._too_few = DataError(f"{self.path}: {error}{hint * (self.num_rows >= lookback)}")
        if "train" in self._rows and self._ambiguous is None:
            self._standardise(series, *statistics(series.values[: len(self._rows["train"])]))

    @classmethod
    def sketch(cls, **keys: Any) -> Sketch:
        """A window of a series that has as many rows as one window."""
        lookback, horizon, channels = (int(keys[key]) for key in ("lookback", "horizon", "channels"))
        rows = lookback + horizon
        values, marks = (_series_contiguous(np.zeros((rows, width))) for width in (channels, cls.num_marks))
        window = WindowDataset(values, marks, range(rows), lookback, horizon)[[0]]
        return Sketch(window, window, {}, int(keys["eval_batch_size"]))

    def notes_on_foreign_weights(self) -> list[str]:
        """What to know where weights do not tell the series that they were trained on."""
        if "OT" not in self.names[:-1]:
            return []
        return [
            f"{self.path}: the column OT is not the last one. The authors' code moves it to the end, and these weights "
            "do not tell the order of their series; where it matters, write the columns in that order"
        ]

    def _take_dates(self, series: Series) -> None:
        self.dates, self._date_format = series.dates, series.date_format
        self.rhythm = None if series.dates is None else find_rhythm(series.dates)
        self.notes = gap_notes(series, self.rhythm, self._allow_gaps)

    def _read_as_one_of(self, ambiguous: AmbiguousDatesError) -> Series:
        """Names and values, with dates that may be wrong ones."""
        for date_format in ambiguous.formats:
            try:
                return self._read(date_format)
            except DataError as error:
                problem = error
        raise problem

    def state(self) -> dict[str, Any]:
        """What belongs to weights that were trained on these data: ``{"name", "names", "mean", "std", "date_format"}``.

        ``name`` is that of the data set; the next three have an element for each series; mean and standard deviation
        are those of the training rows, in the units of the file. The format of the dates is None where there are none.
        """
        return {
            "name": self.name,
            "names": list(self.names),
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "date_format": self._date_format,
        }

    def fingerprint(self) -> Fingerprint:
        """What the file holds, in short (:mod:`exp.data.fingerprint`)."""
        return of_file(self.path)

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Standardise as the data were that weights have been trained on.

        A data set of another name that has rows for training keeps its own standardisation, in which the figures for it
        are published; that is noted. Where the file is too short for its split, all of its rows are for testing from
        now on. Where its dates are ambiguous, they are read as those of the other data.

        Args:
            state: of :meth:`state`.

        Raises:
            DataError: the series have other names, or another order; there are not even ``lookback`` rows; a value is
                so far from the mean that float32 cannot carry the difference; or dates are still ambiguous.
        """
        names = list(state["names"])
        if names != self.names:
            same = ", only their order is another one" if sorted(names) == sorted(self.names) else ""
            raise DataError(
                f"{self.path}: its series are not those that the weights were trained on{same}; name and order the "
                f"columns as there\n  here:  {', '.join(self.names)}\n  there: {', '.join(names)}"
            )
        if state.get("name", self.name) != self.name and "train" in self._rows and self._ambiguous is None:
            self.notes.append(
                f"{self.name} is standardised by its own training rows, not by those of {state['name']}, which the "
                f"weights were trained on; data.name={state['name']} says that these are rows of the same series"
            )
            return
        if self._ambiguous is not None:
            if state.get("date_format") not in self._ambiguous.formats:
                raise DataError(str(self._ambiguous))
            self._waiting = self._read(state["date_format"])
            self._take_dates(self._waiting)
            self._ambiguous = None
        mean, std = (np.asarray(state[key], dtype=np.float64) for key in ("mean", "std"))
        if self._waiting is None and np.array_equal(mean, self.mean) and np.array_equal(std, self.std):
            return
        rows = self._rows
        if self._too_few is not None:
            try:
                rows = borders("new", self.num_rows, self.lookback, self.horizon)
            except TooFewRowsError as error:
                raise DataError(f"{self.path}: {error}") from error
        self._standardise(self._waiting or self._read(self._date_format), mean, std)
        self._rows, self._too_few = rows, None
        for part in ("train", "val", "test"):
            self.__dict__.pop(part, None)  # the windows of the old values

    def _standardise(self, series: Series, mean: np.ndarray, std: np.ndarray) -> None:
        values = standardised(series, mean, std)
        self._mean, self._std = torch.from_numpy(mean), torch.from_numpy(std)
        self._values = _series_contiguous(values)
        self._marks = _series_contiguous(time_features(series.dates, len(values)))
        self._waiting = None

    @property
    def mean(self) -> torch.Tensor:
        """Of the training rows in original units, float64 (C,)."""
        self._require()
        return self._mean

    @property
    def std(self) -> torch.Tensor:
        """Population standard deviation, as :attr:`mean`; 1 where a series is constant."""
        self._require()
        return self._std

    @property
    def rows(self) -> dict[str, range]:
        """The rows of each part, by name."""
        self._require()
        return self._rows

    def _require(self) -> None:
        """Raise unless there are dates, a standardisation and a split."""
        if self._ambiguous is not None:
            raise DataError(str(self._ambiguous))
        if self._too_few is not None:
            raise self._too_few
        if self._waiting is not None:
            raise DataError(
                f"{self.path}: data.split=new has no rows for training, and so no standardisation; it is for "
                "task=predict and task=eval with the weights of a run (init_from=<run folder>)"
            )

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
        return WindowDataset(self._values, self._marks, self.rows[part], self.lookback, self.horizon, self._resident)

    def metrics(self, detailed: bool = False) -> ForecastMetrics:
        """A new accumulator of this data set's metrics: of standardised values, as they are published, and beside them
        in the units of the file.

        Args:
            detailed: also errors per series and per step of the horizon.
        """
        from exp.forecasting.metrics import ForecastMetrics

        return ForecastMetrics(self.names if detailed else None, self.std)

    def predict(self, session: Session, model: Any) -> Prediction:
        """Forecasts as files and pictures (:func:`exp.forecasting.predict.predict`)."""
        from exp.forecasting.predict import predict

        return predict(session, self, model)

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Windows of each part, and how regular the dates are, for the result of a run.

        Args:
            gather: of :class:`exp.engine.distributed.Distributed`, for data that ranks know different things of.
        """
        content: dict[str, Any] = {part: len(self._windows(part)) for part in self.rows}
        if self.rhythm is not None:
            content["time_step"] = self.rhythm.step
            content["irregular_steps"] = self.rhythm.irregular
            if self.rhythm.irregular:
                content["notes"] = self.notes
        return content

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
            ``{"x": (1, L, C), "marks": (1, L, M)}``, and the dates (None where the file has none, or only one): they
            continue the calendar rhythm of the last L rows, or else their most frequent distance.
        """
        self._require()
        batch = {"x": self._values[-self.lookback :].unsqueeze(0), "marks": self._marks[-self.lookback :].unsqueeze(0)}
        dates = None if self.dates is None else continued(self.dates[-max(self.lookback, 3) :], self.horizon)
        return batch, dates


def _series_contiguous(values: np.ndarray) -> torch.Tensor:
    """float32 (T, C) with strides (1, T)."""
    return torch.from_numpy(np.ascontiguousarray(values.T, dtype=np.float32)).t()
