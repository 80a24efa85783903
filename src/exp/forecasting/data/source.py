"""The file of a series: names, dates and their rhythm are known once it is read; its values are read when needed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Sequence

import numpy as np

from exp.errors import DataError
from exp.forecasting.data.rhythm import find_rhythm, gap_notes
from exp.forecasting.data.roles import Roles
from exp.forecasting.data.series import AmbiguousDatesError, read_series

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from exp.forecasting.data.rhythm import Rhythm
    from exp.forecasting.data.series import Series

__all__ = ["SeriesFile"]


class SeriesFile:
    """A series on disk.

    One whose dates can be read in several formats has names and values all the same; :meth:`read_as` settles it.

    Attributes:
        path: of the file.
        roles: what its series are for.
        names: of the C series.
        num_rows: of the file.
        num_past: rows that are past: all; where covariates are known ahead and cells may be empty, those up to the last
            one with a value that is to be forecast.
        dates: of the rows; None where the file has none, or as long as they are ambiguous.
        date_format: that they are read in.
        rhythm: how far apart they are; None where that is not known.
        notes: what the user should be told of the file, a line each.
        ambiguous: why the dates cannot be read; None: they can.

    Args:
        path: of the file.
        header: see :func:`exp.forecasting.data.series.read_series`.
        channels: number of series expected (C).
        date_column: see there.
        date_format: see :func:`exp.forecasting.data.dates.parse_dates`.
        allow_gaps: whether rows may be at other distances in time than most.
        roles: see :func:`exp.forecasting.data.series.read_series`.

    Raises:
        DataError: the file is malformed, or has gaps that are not allowed.
    """

    def __init__(
        self,
        path: Path,
        header: bool,
        channels: int,
        date_column: str | None,
        date_format: str | None,
        allow_gaps: bool,
        roles: Roles | None = None,
    ) -> None:
        self.path = path
        self._read = partial(read_series, path, header, channels, date_column, roles=roles)
        self.roles = roles or Roles()
        self._allow_gaps = allow_gaps
        self.dates: pd.DatetimeIndex | None = None
        self.date_format: str | None = None
        self.rhythm: Rhythm | None = None
        self.notes: list[str] = []
        self.ambiguous: AmbiguousDatesError | None = None
        try:
            series = self._read(date_format)
            self._take_dates(series)
        except AmbiguousDatesError as error:
            self.ambiguous = error
            series = self._read_as_one_of(error)
        self.names = list(series.names)
        self.num_rows = len(series.values)
        self.num_past = self._count_past(series)
        self._first: Series | None = series

    def read(self) -> Series:
        """All of it; the first time what the constructor has read."""
        series, self._first = self._first, None
        return series or self._read(self.date_format)

    def read_as(self, date_format: str | None) -> None:
        """Take ambiguous dates for those of a format; others stay as they are.

        Raises:
            DataError: the format is none that they can be read in.
        """
        if self.ambiguous is None:
            return
        if date_format not in self.ambiguous.formats:
            raise DataError(str(self.ambiguous))
        self._first = self._read(date_format)
        self._take_dates(self._first)
        self.ambiguous = None

    def select(self, names: Sequence[str]) -> None:
        """Read its series in the order of ``names``."""
        self.roles = replace(self.roles, inputs=tuple(names))
        self._read = partial(self._read, roles=self.roles)
        self.names, self._first = list(names), None

    def _count_past(self, series: Series) -> int:
        if self.roles.covariates is None or not self.roles.masks:
            return len(series.values)
        known = ~np.isnan(series.values[:, self.roles.scored(series.names)]).all(axis=1)
        return len(known) - int(known[::-1].argmax()) if known.any() else 0

    def _take_dates(self, series: Series) -> None:
        self.dates, self.date_format = series.dates, series.date_format
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
