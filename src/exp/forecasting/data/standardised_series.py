"""A series that is split, and standardised by its own training rows or as another one was."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np
import torch

from exp.data.places import shortened
from exp.errors import DataError
from exp.forecasting.data.rhythm import same_spacing, spacing
from exp.forecasting.data.splits import TooFewRowsError, borders
from exp.forecasting.data.standardise import filled, standardised, statistics
from exp.forecasting.data.timefeatures import time_features
from exp.forecasting.data.value_notes import (
    notes_on_constants,
    notes_on_extremes,
    notes_on_range,
    without_truth,
)

if TYPE_CHECKING:
    from exp.forecasting.data.series import Series
    from exp.forecasting.data.source import SeriesFile

__all__ = ["StandardisedSeries", "series_contiguous"]


class StandardisedSeries:
    """A multivariate series, standardised with mean and population standard deviation of the training rows.

    That is done in float64, and kept once, as float32.

    A file that is too short for its split, that has no training rows (``split="new"``) or whose dates are ambiguous is
    taken, too: it can be used once :meth:`adopt` has told how the data were read and standardised that weights have
    been trained on. If it is too short, all of its rows are for testing then.

    Attributes:
        name: of the data set.
        path: of the file.
        names: of the C series.
        num_rows: of the file.
        dates: of the rows; None where the file has none.
        rhythm: how far apart they are (:class:`exp.forecasting.data.rhythm.Rhythm`); None where that is not known.
        notes: what the user should be told of the file, a line each.
        lookback: rows that a forecast sees (L).
        horizon: rows that it forecasts (H).
        scored: positions of the series that are forecast, among ``names``.

    Args:
        name: of the data set.
        file: that it is read from.
        split: see :func:`exp.forecasting.data.splits.borders`.
        lookback: rows that a forecast sees (L).
        horizon: rows that it forecasts (H).

    Raises:
        DataError: float32 does not carry the standardised values.
    """

    notes: Sequence[str]
    _truth: torch.Tensor | None
    _future: torch.Tensor | None

    def __init__(self, name: str, file: SeriesFile, split: str, lookback: int, horizon: int) -> None:
        self.name, self.lookback, self.horizon = name, lookback, horizon
        self._file = file
        self.path, self.names, self.num_rows = file.path, file.names, file.num_rows
        self.scored = file.roles.scored(file.names)
        self._notes_on_values: list[str] = []
        self._take_dates()
        self._scaled = False
        self._range: tuple[Any, Any] = (None, None)  # of the training rows
        self._lacking: dict[str, list[str]] = {}
        self._too_few: DataError | None = None
        self._rows: dict[str, range] = {}
        try:
            # What is known ahead of the last truth is no part to measure errors in.
            self._rows = borders(split, self.num_rows if split == "new" else file.num_past, lookback, horizon)
        except TooFewRowsError as error:
            hint = (
                f". To forecast with trained weights, data.lookback={lookback} rows suffice: task=predict "
                f"init_from=<run folder> task.input={self.path}"
            )
            self._too_few = DataError(f"{self.path}: {error}{hint * (self.num_rows >= lookback)}")
        self._standardise_by_own_rows()

    def _standardise_by_own_rows(self) -> None:
        if not self._trains:
            return
        series, train = self._file.read(), len(self._rows["train"])
        rows = series.values[:train]
        try:
            mean, std = statistics(rows, self.names)
        except DataError as error:
            raise DataError(f"{self.path}, {error}") from error
        self._range = np.fmin.reduce(rows, axis=0).tolist(), np.fmax.reduce(rows, axis=0).tolist()
        self._standardise(series, mean, std, notes_on_constants(series, train, std))

    @property
    def _trains(self) -> bool:
        """Whether there are rows for training, with dates that are known."""
        return "train" in self._rows and self._file.ambiguous is None

    def _take_dates(self) -> None:
        self.dates, self.rhythm = self._file.dates, self._file.rhythm
        self.notes = [*self._file.notes, *self._notes_on_values]

    def notes_on_foreign_weights(self) -> list[str]:
        """What to know where weights do not tell the series that they were trained on."""
        if "OT" not in self.names[:-1]:
            return []
        return [
            f"{self.path}: the column OT is not the last one. The authors' code moves it to the end, and these weights "
            "do not tell the order of their series; where it matters, write the columns in that order"
        ]

    def state(self) -> dict[str, Any]:
        """What belongs to weights that were trained on these data.

        ``name`` is that of the data set; ``names``, ``mean``, ``std``, ``low`` and ``high`` (the range) have an element
        for each series, of the training rows and in the units of the file; ``date_format`` and ``seconds``, how far
        apart rows are, are None where there are no dates.
        """
        return {
            "name": self.name,
            "names": list(self.names),
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "low": self._range[0],
            "high": self._range[1],
            "date_format": self._file.date_format,
            "seconds": spacing(self.dates),
        }

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Standardise as the data were that weights have been trained on.

        A data set of another name that has rows for training keeps its own standardisation, in which the figures for it
        are published; that is noted. Where the file is too short for its split, all of its rows are for testing from
        now on. Where its dates are ambiguous, they are read as those of the other data. Series in another order are
        matched by name.

        Args:
            state: of :meth:`state`.

        Raises:
            DataError: the series have other names; rows are at another distance in time; there are not even
                ``lookback`` rows; a value is so far from the mean that float32 cannot carry the difference; or dates
                are still ambiguous.
        """
        names = list(state["names"])
        if sorted(names) != sorted(self.names):
            raise DataError(
                f"{self.path}: its series are not those that the weights were trained on; name the columns as there\n"
                f"  here:  {', '.join(self.names)}\n  there: {', '.join(names)}"
            )
        if names != self.names:
            self._file.select(names)
            self.names, self.scored = self._file.names, self._file.roles.scored(names)
            self._scaled = False
            self._standardise_by_own_rows()
        if state.get("name", self.name) != self.name and self._trains:
            self.notes = [
                *self.notes,
                f"{self.name} is standardised by its own training rows, not by those of {state['name']}, which the "
                f"weights were trained on; data.name={state['name']} says that these are rows of the same series",
            ]
            return
        self._file.read_as(state.get("date_format"))
        self._take_dates()
        mine, theirs = spacing(self.dates), state.get("seconds")
        if mine and theirs and not same_spacing(mine, theirs):
            raise DataError(
                f"{self.path}: its rows are {timedelta(seconds=mine)} apart, and those that the weights were trained "
                f"on {timedelta(seconds=theirs)}; give rows of that distance"
            )
        mean, std = (np.asarray(state[key], dtype=np.float64) for key in ("mean", "std"))
        if self._scaled and np.array_equal(mean, self.mean) and np.array_equal(std, self.std):
            return
        rows = self._rows
        if self._too_few is not None:
            try:
                rows = borders("new", self.num_rows, self.lookback, self.horizon)
            except TooFewRowsError as error:
                raise DataError(f"{self.path}: {error}") from error
        self._rows, self._too_few = rows, None
        self._range = state.get("low"), state.get("high")
        series = self._file.read()
        self._standardise(series, mean, std, notes_on_range(series, *self._range))

    def _standardise(self, series: Series, mean: np.ndarray, std: np.ndarray, notes: Sequence[str] = ()) -> None:
        values = standardised(series, mean, std)
        self._notes_on_values = [*notes, *notes_on_extremes(series, values)]
        self._mean, self._std = torch.from_numpy(mean), torch.from_numpy(std)
        seen = filled(values)
        marks = time_features(series.dates, len(values))
        self._values, self._marks = series_contiguous(seen), series_contiguous(marks)
        self._truth = self._future = None
        self._lacking = {}
        roles = self._file.roles
        if roles.hides(self.names):
            truth = np.full_like(values, np.nan)
            truth[:, self.scored] = values[:, self.scored]
            self._truth = series_contiguous(truth)
            self._lacking = without_truth(self._truth[:, self.scored], self.target_names, self._rows, self.lookback)
            self._notes_on_values += [
                f"{self.path}: no value of {shortened(names)} where the {part} part is forecast: what is measured "
                "there is of the other series"
                for part, names in self._lacking.items()
                if len(names) < len(self.scored)
            ]
        if roles.covariates is not None:
            self._future = series_contiguous(np.concatenate([seen[:, roles.ahead(self.names)], marks], axis=1))
        self._scaled = True
        self._take_dates()

    def check_truth(self, parts: Sequence[str]) -> None:
        """Refuse a part in which nothing that is forecast has a value.

        Args:
            parts: those that something will be measured in.

        Raises:
            DataError: names the part and the series.
        """
        for part in parts:
            if len(self._lacking.get(part, ())) == len(self.scored):
                raise DataError(
                    f"{self.path}: {shortened(self.target_names)} has no value where the {part} part is forecast (rows "
                    f"{self.rows[part].start + self.lookback + 1} to {self.rows[part].stop} of {self.num_rows} below "
                    "the header), so that there is nothing to measure errors of; give values, or another data.split"
                )

    @property
    def target_names(self) -> list[str]:
        """Of the series that are forecast."""
        return [self.names[position] for position in self.scored]

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
        if self._file.ambiguous is not None:
            raise DataError(str(self._file.ambiguous))
        if self._too_few is not None:
            raise self._too_few
        if not self._scaled:
            raise DataError(
                f"{self.path}: data.split=new has no rows for training, and so no standardisation; it is for "
                "task=predict and task=eval with the weights of a run (init_from=<run folder>)"
            )

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


def series_contiguous(values: np.ndarray) -> torch.Tensor:
    """float32 (T, C) with strides (1, T)."""
    return torch.from_numpy(np.ascontiguousarray(values.T, dtype=np.float32)).t()
