"""Read a multivariate series from disk, or say what is wrong with the file, in which row and column."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, Sequence

import numpy as np
import pandas as pd  # once in the fork server, not in each worker

from exp.errors import DataError
from exp.forecasting.data.dates import DateError, parse_dates
from exp.forecasting.data.header import check_columns, long_table
from exp.forecasting.data.npz import check_array, is_archive, read_array
from exp.forecasting.data.roles import Roles
from exp.forecasting.data.rows import numbered_rows

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["AmbiguousDatesError", "Series", "read_series"]

_EMPTY = ("", "nan")  # in any letters, beside what pandas takes for an empty cell
_FLOAT32 = np.finfo(np.float32)


class AmbiguousDatesError(DataError):
    """The column of dates can be read in several formats.

    Args:
        message: which cell shows it, and what to do.
        formats: of strftime.
    """

    def __init__(self, message: str, formats: Sequence[str]) -> None:
        super().__init__(message)
        self.formats = tuple(formats)


@dataclass(frozen=True, eq=False)
class Series:
    """A multivariate series.

    Attributes:
        values: float64 (T, C), oldest row first; finite, or NaN where a cell may be and is empty; all of them 0 or
            within the range of normal float32 numbers.
        names: of the C series.
        dates: strictly increasing, T of them; None where the file has none.
        path: where it was read.
        header: whether its first line has names.
        date_index: position of the column of dates in the file; None: there is none.
        date_format: in which they are written; None: there are none.
        columns: position of each series in the file.
    """

    values: np.ndarray
    names: tuple[str, ...]
    dates: pd.DatetimeIndex | None
    path: Path
    header: bool
    date_index: int | None
    date_format: str | None
    columns: Sequence[int]

    def place(self, row: int, channel: int | None = None) -> str:
        """``<path> row 7, column load: '3.5'``: a cell by its position in :attr:`values`, from 0; None: its date."""
        if is_archive(self.path):
            assert channel is not None
            return _place_in_array(self.path, row, self.columns[channel], self.values[row, channel])
        column = self.date_index if channel is None else self.columns[channel]
        assert column is not None
        return _place(self.path, row, column, self.header)


def read_series(
    path: Path,
    header: bool = True,
    channels: int | None = None,
    date_column: str | None = "date",
    date_format: str | None = None,
    roles: Roles | None = None,
) -> Series:
    """Read a CSV file.

    Args:
        path: comma-separated UTF-8 text, plain or ``.gz``, one row per time step; or an archive of numpy
            (:mod:`exp.forecasting.data.npz`), whose series are named 0, 1, ..., and which has no dates.
        header: True: the first line has the names of the columns (the form of ETT and of the other data sets of the
            Time-Series-Library). False: numbers only; the series are then named 0, 1, ...
        channels: number of series expected (C); None: any.
        date_column: name of the column of dates, in letters of either case; None: there is none.
        date_format: see :func:`exp.forecasting.data.dates.parse_dates`.
        roles: which series are read, and whether cells may be empty; None: all, and no.

    Raises:
        DataError: the file is unreadable, empty or ragged; its header does not fit (see
            :func:`exp.forecasting.data.header.check_columns`); a cell is not a finite number that float32 can carry, or
            not a date; dates are not strictly increasing. Rows are numbered as lines of the file, from 1.
        AmbiguousDatesError: dates can be read in several formats.
    """
    roles = roles or Roles()
    in_file = channels if roles.inputs is None else None
    if is_archive(path):
        check_array(path, in_file)
        table = pd.DataFrame(read_array(path))
        columns = roles.selected(path, [str(name) for name in table.columns], channels)
        values = _to_numbers(path, table[columns], False, roles.masks)
        return Series(values, tuple(map(str, columns)), None, path, False, None, None, columns)
    rows = list(islice(numbered_rows(path, header), 2))
    if not rows:
        raise DataError(f"{path} is empty; expected one row per time step")
    first = rows[0][1]
    date_index = check_columns(path, first, header, in_file, date_column)
    for line, cells in rows[1:]:
        # Where the first row is longer than the header, pandas takes the first cell of every row for a label.
        _check_length(path, line, cells, first)
    table = _read_table(path, header, len(first), date_index)
    if len(table) == 0:
        raise DataError(f"{path} is empty below its header; expected one row per time step")
    if table[len(first) - 1].isna().any():  # pandas fills short rows up
        for line, cells in numbered_rows(path, header):
            _check_length(path, line, cells, first)
    dates = None
    names = [cell.strip() if header else str(index) for index, cell in enumerate(first)]
    if date_index is not None:
        dates, date_format = _to_dates(path, table, names, date_index, date_format)
    series = [index for index in range(len(first)) if index != date_index]
    columns = [series[position] for position in roles.selected(path, [names[index] for index in series], channels)]
    values = _to_numbers(path, table[columns], header, roles.masks)
    date_format = None if dates is None else date_format
    chosen = tuple(names[index] for index in columns)
    return Series(values, chosen, dates, path, header, date_index, date_format, columns)


def _read_table(path: Path, header: bool, width: int, date_index: int | None) -> pd.DataFrame:
    """All rows; the columns are named by their positions."""
    import zlib

    source: Any = path
    skip = int(header)
    if width == 1:  # pandas takes no blank line for an empty cell
        cells = (cells for _, cells in islice(numbered_rows(path, header), skip, None))
        source, skip = io.StringIO(), 0
        csv.writer(source, quoting=csv.QUOTE_ALL).writerows(cells)
        source.seek(0)
    try:
        return pd.read_csv(
            source,
            header=0 if skip else None,
            names=list(range(width)),
            # Dates as they stand: a column of plain numbers would otherwise pass for nanoseconds since 1970.
            dtype=None if date_index is None else {date_index: str},
            low_memory=False,
        )
    except pd.errors.ParserError as error:
        _raise_ragged(path, str(error))
    except UnicodeDecodeError as error:
        for _ in numbered_rows(path):  # tells the row
            pass
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); save it as comma-separated UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; check its permissions, or copy it anew") from error


def _raise_ragged(path: Path, reason: str) -> NoReturn:
    rows = numbered_rows(path)
    _, first = next(rows)
    for line, cells in rows:
        _check_length(path, line, cells, first)
    raise DataError(f"{path} is not comma-separated text: {reason}; write it anew")


def _check_length(path: Path, line: int, cells: Sequence[str], first: Sequence[str]) -> None:
    if len(cells) != len(first):
        column = min(len(cells), len(first)) + 1
        comma = len(cells) == len(first) + 1 and not cells[-1].strip()
        do = "remove the comma at the end of the line" if comma else "every row needs one cell per column"
        raise DataError(
            f"{path} row {line}, column {column}: the row has {len(cells)} cells, but the first row has {len(first)}; "
            f"{do}"
        )


def _place(path: Path, row: int, column: int, header: bool) -> str:
    """A cell of the table, given as ``row`` and ``column`` of the file from 0, without the header."""
    rows = numbered_rows(path, header)
    line, cells = next(rows)
    first = cells
    for _ in range(row + 1 if header else row):
        line, cells = next(rows)
        # A row that is too short or too long may be the one that is meant: pandas fills the former up.
        _check_length(path, line, cells, first)
    name = first[column].strip() if header else str(column + 1)
    return f"{path} row {line}, column {name}: {cells[column]!r}"


def _to_numbers(path: Path, table: pd.DataFrame, header: bool, may_be_empty: bool) -> np.ndarray:
    empty = np.array(table.isna())
    text = [column for column in table.columns if table[column].dtype.kind not in "iuf"]
    if text:
        table = table.copy()
        for column in text:
            cells = table[column].astype(str).str.strip()
            empty[:, table.columns.get_loc(column)] |= cells.str.lower().isin(_EMPTY).to_numpy()
            table[column] = pd.to_numeric(cells, errors="coerce")
    values = table.to_numpy(dtype=np.float64)
    if may_be_empty:
        problem = "is not a finite number, nor is the cell empty; write a number, or nothing"
        _refuse(~np.isfinite(values) & ~empty, path, table, header, problem)
    else:
        bad = ~np.isfinite(values)
        gap = bool(bad.any() and empty.flat[int(bad.argmax())])
        do = "fill the gap, leave the row out, or take empty cells for such (data.missing=mask)"
        do = do if gap else "write it with digits and a point"
        _refuse(bad, path, table, header, f"is not a finite number; {do}")
    size = np.abs(values)
    if np.fmax.reduce(size, axis=None) > _FLOAT32.max:
        problem = f"is beyond what float32 carries ({_FLOAT32.max:.4g}); correct it, or use a larger unit"
        _refuse(size > _FLOAT32.max, path, table, header, problem)
    tiny = size < _FLOAT32.tiny
    if tiny.any():
        problem = f"is nearer to zero than float32 carries ({_FLOAT32.tiny:.4g}); write 0, or use a smaller unit"
        _refuse(tiny & (size > 0), path, table, header, problem)
    return values


def _refuse(bad: np.ndarray, path: Path, table: pd.DataFrame, header: bool, problem: str) -> None:
    """Raise for the first cell that is ``bad``."""
    if not bad.any():
        return
    row, column = divmod(int(bad.argmax()), bad.shape[1])
    if bad[:, column].all() and len(bad) > 1:
        problem += "; it is so in the whole column: remove it if it is no series"
    number = int(table.columns[column])
    if is_archive(path):
        place = _place_in_array(path, row, number, table.iat[row, column])
    else:
        place = _place(path, row, number, header)
    raise DataError(f"{place} {problem}")


def _place_in_array(path: Path, row: int, series: int, value: float) -> str:
    """A cell of the array, from 0, as numpy's users index it."""
    return f"{path} data[{row}, {series}]: {value:.6g}"


def _to_dates(
    path: Path, table: pd.DataFrame, names: Sequence[str], index: int, date_format: str | None
) -> tuple[pd.DatetimeIndex, str]:
    try:
        dates, found = parse_dates(table[index].fillna("").str.strip(), date_format)
        backwards = dates[1:] <= dates[:-1]
        if backwards.any():
            row = int(backwards.argmax()) + 1
            kind = "repeats" if dates[row] == dates[row - 1] else "is earlier than"
            key = _key_of_long(table, dates)
            if key is not None:
                raise DateError(row, f"{kind} the date before it: {long_table(names, key, index)}")
            raise DateError(
                row,
                f"{kind} the date before it; sort the rows by date and keep one per date, or, where the clock was put "
                "back, write times in UTC",
            )
    except DateError as error:
        message = f"{_place(path, error.row, index, True)} {error.problem}"
        if error.formats:
            raise AmbiguousDatesError(message, error.formats) from error
        raise DataError(message) from error
    return dates, found


def _key_of_long(table: pd.DataFrame, dates: pd.DatetimeIndex) -> int | None:
    """The column that names the series of a long table, in which every series has each date once; None: it is none."""
    if 4 * dates.nunique() > 3 * len(dates):
        return None
    for column in table.columns:
        few = 1 < table[column].nunique() <= len(table) // 2
        if few and not pd.DataFrame({0: table[column].astype(str), 1: dates}).duplicated().any():
            return int(column)
    return None
