"""Read a multivariate series from disk, or say what is wrong with the file, in which row and column."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from exp.data.preflight import check_columns, numbered_rows
from exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

__all__ = ["Series", "read_series"]


@dataclass(frozen=True, eq=False)
class Series:
    """A multivariate series.

    Attributes:
        values: finite, float64 (T, C), oldest row first.
        names: of the C series.
        dates: strictly increasing, T of them; None where the file has none.
        path: where it was read.
    """

    values: np.ndarray
    names: tuple[str, ...]
    dates: pd.DatetimeIndex | None
    path: Path


def read_series(path: Path, header: bool = True, channels: int | None = None) -> Series:
    """Read a CSV file.

    Args:
        path: comma-separated UTF-8 text, plain or ``.gz``, one row per time step.
        header: True: the first line is ``date`` and the names of the series (the form of ETT and of the other data sets
            of the Time-Series-Library). False: numbers only; the series are then named 0, 1, ...
        channels: number of series expected (C); None: any.

    Raises:
        DataError: the file is unreadable, empty or ragged; ``date`` is not its first column, or the number of series is
            another one; a cell is not a finite number or not a date; dates are not strictly increasing. Rows are
            numbered as lines of the file, from 1.
    """
    table = _read_table(path, header)
    names = [str(name) for name in table.columns]
    first = names if header else [str(cell) for cell in table.iloc[0]]
    check_columns(path, first, header, channels)
    if header and len(table) == 0:
        raise DataError(f"{path} is empty below its header; expected one row per time step")
    dates = None
    if header:
        dates = _parse_dates(path, table.iloc[:, 0])
        table, names = table.iloc[:, 1:], names[1:]
    return Series(_to_numbers(path, table, header), tuple(names), dates, path)


def _read_table(path: Path, header: bool) -> pd.DataFrame:
    import zlib

    import pandas as pd

    try:
        table = pd.read_csv(
            path,
            header=0 if header else None,
            # Dates as they stand: a column of plain numbers would otherwise pass for nanoseconds since 1970.
            dtype={"date": str} if header else None,
            low_memory=False,
        )
    except pd.errors.EmptyDataError:
        raise DataError(f"{path} is empty; expected one row per time step") from None
    except pd.errors.ParserError as error:
        _raise_ragged(path, str(error))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); save it as comma-separated UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; check its permissions, or copy it anew") from error
    # Where the first row is longer than the header, pandas takes the first cell of every row for a label.
    rows = list(islice(numbered_rows(path), 2))
    for line, cells in rows[1:]:
        _check_length(path, line, cells, rows[0][1])
    return table


def _raise_ragged(path: Path, reason: str) -> NoReturn:
    rows = numbered_rows(path)
    _, first = next(rows)
    for line, cells in rows:
        _check_length(path, line, cells, first)
    raise DataError(f"{path} is not comma-separated text: {reason}; write it anew")


def _check_length(path: Path, line: int, cells: list[str], first: list[str]) -> None:
    if len(cells) != len(first):
        column = min(len(cells), len(first)) + 1
        raise DataError(
            f"{path} row {line}, column {column}: the row has {len(cells)} cells, but the first row has {len(first)}; "
            "every row needs one cell per column"
        )


def _raise_cell(path: Path, row: int, column: int, header: bool, problem: str) -> NoReturn:
    """Raise for a cell of the table, given as ``row`` and ``column`` of the file from 0, without the header."""
    rows = numbered_rows(path)
    line, cells = next(rows)
    first = cells
    for _ in range(row + 1 if header else row):
        line, cells = next(rows)
    _check_length(path, line, cells, first)
    name = first[column] if header else str(column + 1)
    raise DataError(f"{path} row {line}, column {name}: {cells[column]!r} {problem}")


def _to_numbers(path: Path, table: pd.DataFrame, header: bool) -> np.ndarray:
    import pandas as pd

    text = [column for column in table.columns if table[column].dtype.kind not in "iuf"]
    if text:
        table = table.copy()
        for column in text:
            table[column] = pd.to_numeric(table[column].astype(str), errors="coerce")
    values = table.to_numpy(dtype=np.float64)
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = divmod(int(bad.argmax()), values.shape[1])
        problem = "is not a finite number; fill the gap or leave the row out, as no window can hold it"
        _raise_cell(path, row, column + header, header, problem)
    return values


def _parse_dates(path: Path, column: pd.Series) -> pd.DatetimeIndex:
    import pandas as pd

    problem = "is not a date in the form of the first one; write dates like 2016-07-01 00:00:00"
    with warnings.catch_warnings():
        # pandas would go on to guess each date for itself: "12:00" as noon of today.
        warnings.filterwarnings("error", message="Could not infer format")
        warnings.filterwarnings("ignore", message="Parsing dates in")
        try:
            dates = pd.DatetimeIndex(pd.to_datetime(column, errors="coerce"))
        except (UserWarning, ValueError, TypeError):
            _raise_cell(path, 0, 0, True, problem)
    if dates.hasnans:
        _raise_cell(path, int(dates.isna().argmax()), 0, True, problem)
    backwards = dates[1:] <= dates[:-1]
    if backwards.any():
        row = int(backwards.argmax()) + 1
        kind = "repeats" if dates[row] == dates[row - 1] else "is earlier than"
        _raise_cell(path, row, 0, True, f"{kind} the date before it; sort the rows by date and keep one per date")
    return dates
