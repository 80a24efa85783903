"""Read a multivariate series from disk; errors name the row and column of the file."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd  # here, so that the fork server imports it once, not each worker

from exp.errors import DataError
from exp.forecasting.data.columns import Columns, choose
from exp.forecasting.data.dates import Dates, read_dates
from exp.forecasting.data.header import Header, layout, numbered_rows, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from exp.forecasting.config import ForecastingDataConfig

__all__ = ["Series", "read_series"]

_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, eq=False)
class Series:
    """A multivariate series.

    Attributes:
        path: of the file.
        header: of the file; None for ``.npz``.
        columns: the C columns that are read.
        values: float64 (T, C), oldest row first; within the range of float32, or NaN for an empty cell that is allowed.
        dates: of the rows; None: the file has no dates.
    """

    path: Path
    header: Header | None
    columns: Columns
    values: np.ndarray
    dates: Dates | None = None

    def place(self, row: int, channel: int) -> str:
        """``<path> row 7, column load: '3.5'``: a cell by its position in :attr:`values`, from 0."""
        name = self.columns.names[channel]
        if self.header is None:
            return f"{self.path} data[{row}, {name}]: {self.values[row, channel]:.6g}"
        return self.header.place(row, self.header.names.index(name))


def read_series(path: Path, config: ForecastingDataConfig, usual_format: str | None = None) -> Series:
    """Read a file.

    Args:
        path: comma-separated UTF-8 text, plain or ``.gz``, one row per time step; or ``.npz`` with an array ``data`` of
            shape (rows, series) or (rows, series, measures), the format of PEMS. Only the first measure is read (the
            traffic flow, as in the loaders of SCINet, arXiv 2106.09305, and iTransformer, arXiv 2310.06625).
        config: the keys of ``data``.
        usual_format: format of the dates if several fit; see :func:`exp.forecasting.data.dates.parse_dates`.

    Raises:
        DataError: the file is unreadable, empty or ragged; its first row does not fit (see
            :func:`exp.forecasting.data.header.read_header`); a cell is not a date, or not a finite number that float32
            can represent; dates are not strictly increasing. Messages number rows as lines of the file, from 1.
        AmbiguousDatesError: dates can be read in several formats.
    """
    if path.suffix == ".npz":
        values = _read_array(path, config)
        columns = choose(path, [str(number) for number in range(values.shape[1])], config)
        series = Series(path, None, columns, values[:, [int(name) for name in columns.names]])
        _refuse(series, ~(np.abs(series.values) <= _LARGEST), "is not a finite number that float32 carries; correct it")
        return series
    header = read_header(path, config)
    table = _read_table(path, header)
    columns = choose(path, header.series, config)
    dates = read_dates(table, header, config, usual_format)
    chosen = [header.names.index(name) for name in columns.names]
    values, empty = _to_numbers(table[chosen])
    series = Series(path, header, columns, values, dates)
    do = "write it with digits and a point"
    bad = ~(np.abs(values) <= _LARGEST)
    if config.missing == "mask":
        bad &= ~empty
    elif bad.any() and empty.flat[int(bad.argmax())]:
        do = "fill the gap, leave the row out, or allow empty cells (data.missing=mask)"
    _refuse(series, bad, f"is not a finite number that float32 carries; {do}")
    return series


def _read_table(path: Path, header: Header) -> pd.DataFrame:
    """All rows below the header; the columns are named by their positions."""
    width = len(header.names)
    list(islice(numbered_rows(path), 2))  # raises if the first row is too long: pandas would read its cells as labels
    try:
        table = pd.read_csv(
            path,
            header=None,
            skiprows=header.begin,
            names=list(range(width)),
            skip_blank_lines=width > 1,
            # Dates as text: plain numbers would later be read as nanoseconds since 1970.
            dtype=None if header.date is None else {header.date: str},
            low_memory=False,
        )
    except (pd.errors.ParserError, UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        for _ in numbered_rows(path):  # raises an error that names the row
            pass
        raise DataError(f"{path} cannot be read as comma-separated UTF-8: {error}; write it anew") from error
    except pd.errors.EmptyDataError:
        table = pd.DataFrame()
    if width == 1 and len(table):  # blank lines at the end are no rows
        there = table[0].notna() & (table[0].astype(str).str.strip() != "")
        table = table[: len(table) - int(there[::-1].argmax())]
    if not len(table):
        raise DataError(f"{path} is empty below its header; expected one row per time step")
    if table[width - 1].isna().any():  # a row may be too short: pandas fills it up
        for _ in numbered_rows(path):
            pass
    return table


def _to_numbers(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """float64 (T, C), NaN where a cell is no number; and bool (T, C), where it is empty."""
    empty = np.array(table.isna())
    numbers = {}
    for place, column in enumerate(table.columns):
        numbers[place] = table[column]
        if numbers[place].dtype.kind not in "iuf":
            cells = table[column].astype(str).str.strip()
            empty[:, place] |= cells.str.lower().isin(["", "nan"]).to_numpy()
            numbers[place] = pd.to_numeric(cells, errors="coerce")
    return pd.DataFrame(numbers).to_numpy(dtype=np.float64), empty


def _refuse(series: Series, bad: np.ndarray, problem: str) -> None:
    """Raise a DataError for the first cell that is ``bad``, bool (T, C)."""
    if bad.any():
        row, channel = divmod(int(bad.argmax()), bad.shape[1])
        if bad[:, channel].all() and len(bad) > 1:
            problem += "; so is the whole column: leave it out if it is no series (data.inputs)"
        raise DataError(f"{series.place(row, channel)} {problem}")


def _read_array(path: Path, config: ForecastingDataConfig) -> np.ndarray:
    """The array ``data`` of an ``.npz`` file, float64 (T, C)."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            values: np.ndarray = archive["data"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; expected: {layout(config)}") from error
    if values.ndim not in (2, 3) or not values.size or values.dtype.kind not in "fiu":
        raise DataError(f"{path}: its array `data` is {values.shape}, {values.dtype}; expected: {layout(config)}")
    return (values if values.ndim == 2 else values[..., 0]).astype(np.float64)
