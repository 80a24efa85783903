"""Tables of many series: a row for each series and date, arranged as one series below the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence

import numpy as np
import pandas as pd

from exp.errors import DataError
from exp.forecasting.data.calendar import Calendar
from exp.forecasting.data.dates import Dates, parse_column

if TYPE_CHECKING:
    from exp.forecasting.data.files import Header
    from exp.forecasting.keys import ForecastingDataConfig

_MOST_INSERTED = 10  # rows that gaps may add, relative to those of the file: more come from mistaken dates


class Layout(NamedTuple):
    """Where the series of a table are.

    Attributes:
        ids: names of the S series, in the order of the file; None: the table is one series.
        starts: the first row of each, and the number of all rows, int64 (S + 1,).
        lines: the row of the file, from 0, of each row, int64 (T,); -1: it was inserted. None: they are the same.
    """

    ids: list[str] | None
    starts: np.ndarray
    lines: np.ndarray | None = None

    @property
    def series_of_row(self) -> np.ndarray:
        """The number of each row's series, int32 (T,)."""
        return np.repeat(np.arange(len(self.starts) - 1, dtype=np.int32), np.diff(self.starts))


def empty_cells(column: pd.Series) -> np.ndarray:
    """Where a column has no value, bool (T,); text may also be blank, or read "nan"."""
    empty: np.ndarray = column.isna().to_numpy()
    if column.dtype.kind not in "iuf":
        empty = empty | column.astype(str).str.strip().str.lower().isin(["", "nan"]).to_numpy()
    return empty


def melt(table: pd.DataFrame, header: Header) -> tuple[pd.DataFrame, Header]:
    """The columns of a table below each other: each from its first cell that is not empty to its last.

    Args:
        table: cells of the file.
        header: of the file, with the name that the column of ids gets.

    Returns:
        A table with the columns of dates (if there is one), ids and ``y``, and its header.

    Raises:
        DataError: a column is empty.
    """
    columns = [name for name in table if name != header.date]
    parts = []
    for name in columns:
        filled = np.flatnonzero(~empty_cells(table[name]))
        if not len(filled):
            raise DataError(f"{header.path}: column {name} is empty, so it is no series; leave it out of the file")
        parts.append(np.arange(filled[0], filled[-1] + 1))
    rows, ids = np.concatenate(parts), np.repeat(np.array(columns, dtype=object), [len(part) for part in parts])
    values = np.concatenate([table[name].to_numpy()[part] for name, part in zip(columns, parts)])
    melted = pd.DataFrame({str(header.id): ids, "y": values})
    if header.date is not None:
        melted[header.date] = table[header.date].to_numpy()[rows]
    return melted, header._replace(melted=(rows, ids))


def arrange(
    table: pd.DataFrame,
    header: Header,
    config: ForecastingDataConfig,
    saved_format: str | None,
    saved_calendar: Mapping[str, Any] | None,
) -> tuple[pd.DataFrame, Dates, Layout]:
    """Sort the rows of a table by series and date, and insert the rows that it lacks, with empty cells.

    The calendar is that of the longest series. Whole numbers that are no dates count steps.

    Args:
        table: cells of the file.
        header: of the file, with a column of ids.
        config: the keys of ``data``.
        saved_format: of the training rows (:func:`exp.forecasting.data.dates.parse_dates`).
        saved_calendar: of the training rows (:meth:`exp.forecasting.data.calendar.Calendar.of`).

    Returns:
        The cells but for ids and dates, their index the dates if there are any; the dates; and the layout.

    Raises:
        DataError: an id or a date is empty; a series has two rows of a date, or rows between those of the calendar; or
            it lacks a row, unless ``missing=mask``.
    """
    assert header.id is not None
    codes, ids = _series_ids(table, header)
    cells, dates = table.drop(columns=[header.id, *([header.date] if header.date else ())]), Dates()
    distinct: pd.DatetimeIndex | None = None
    ranks = np.arange(len(table)) if header.date is None else _steps(table[header.date], config)
    if ranks is None:
        index, date_format = parse_column(table, header, config, saved_format)
        ranks, distinct = pd.factorize(index, sort=True)
        dates = Dates(None, date_format)
    order = np.lexsort((ranks, codes))
    codes, ranks, starts = codes[order], ranks[order], np.searchsorted(codes[order], np.arange(len(ids) + 1))
    follows = codes[1:] == codes[:-1]

    def place(where: np.ndarray) -> str:
        """The first row of ``where``, with its series."""
        row = int(where.argmax()) + 1
        return f"{header.describe_cell(int(order[row]), str(header.date))}, series {ids[codes[row]]!r},"

    repeated = follows & (ranks[1:] == ranks[:-1])
    if repeated.any():
        other = header.begin + int(order[int(repeated.argmax())]) + 1
        raise DataError(f"{place(repeated)} repeats the date of row {other}; keep one row per series and date")
    grid, slots, text, warnings = None, ranks, "1 step apart", []
    if distinct is not None:
        longest = int(np.diff(starts).argmax())
        calendar = Calendar.of(distinct[ranks[starts[longest] : starts[longest + 1]]], config.lookback, saved_calendar)
        dates = replace(dates, calendar=calendar)
        grid = None if calendar is None or calendar.grid is None or calendar.grid.loose else calendar.grid
        text = grid.text if grid else ""
        slots = grid.slots_of(distinct)[ranks] // grid.stride if grid else np.arange(len(ranks))
    steps = np.diff(slots)
    if (follows & (steps < 1)).any():
        raise DataError(
            f"{place(follows & (steps < 1))} comes between the dates of the longest series ({text}); a table has one "
            "frequency"
        )
    missing = np.where(follows, steps - 1, 0) if header.date else np.zeros_like(steps)
    rows = np.arange(len(codes)) + np.concatenate([[0], missing.cumsum()])
    num_missing, holes = int(missing.sum()), np.flatnonzero(missing)
    lines = np.full(len(codes) + num_missing, -1)
    lines[rows] = order
    if num_missing:
        problem = f"{place(missing > 0)} comes {missing[holes[0]]} rows too late (they are {text})"
        series = f"{num_missing} rows are missing in {len(np.unique(codes[holes]))} of {len(ids)} series"
        if config.missing != "mask" or num_missing > _MOST_INSERTED * len(codes) + config.lookback:
            advice = "add them, correct the dates, or take missing rows as empty with data.missing=mask"
            raise DataError(f"{problem}; {series}; {advice}")
        warnings = [f"{problem}; {series}, and are taken as empty"]
    cells = cells.iloc[order].set_axis(rows, axis=0)
    cells = cells.reindex(np.arange(len(lines))) if num_missing else cells
    if distinct is not None:
        inserted = distinct[ranks].to_series(index=rows)
        inserted = inserted.reindex(np.arange(len(lines))) if num_missing else inserted
        later: dict[int, pd.DatetimeIndex] = {}
        for hole in holes[np.argsort(-missing[holes], kind="stable")].tolist():  # the longest first
            rank, count = int(ranks[hole]), int(missing[hole])
            if rank not in later:
                later[rank] = grid.future_dates(distinct[[rank]], count)  # type: ignore[union-attr]
            inserted.iloc[rows[hole] + 1 : rows[hole] + 1 + count] = later[rank][:count]
        dates = replace(dates, index=pd.DatetimeIndex(inserted), warnings=warnings)
        cells.index = dates.index
    return cells, replace(dates, warnings=warnings), Layout(ids, np.append(rows[starts[:-1]], len(lines)), lines)


def _series_ids(table: pd.DataFrame, header: Header) -> tuple[np.ndarray, list[str]]:
    """The number of each row's series, int32 (T,), and their names."""
    codes, names = pd.factorize(table[header.id])
    ids = [str(name).strip() for name in names]
    empty = np.isin(codes, [-1, *(number for number, name in enumerate(ids) if not name)])
    if empty.any():
        raise DataError(
            f"{header.describe_cell(int(empty.argmax()), str(header.id))} is empty; every row needs the id of a series"
        )
    if len(set(ids)) < len(ids):
        twice = next(name for number, name in enumerate(ids) if name in ids[:number])
        raise DataError(f"{header.path}: column {header.id} has two ids that read {twice!r}; write each in one way")
    return codes.astype(np.int32), ids


def _steps(column: pd.Series, config: ForecastingDataConfig) -> np.ndarray | None:
    """Whole numbers that are no dates, int64 (T,), as steps of one; None: the column has dates."""
    is_text = isinstance(column.dtype, pd.CategoricalDtype) or column.dtype.kind == "O"
    cells = pd.unique(column) if is_text else column.to_numpy()[:1]
    texts = [str(cell) for cell in cells]
    if config.date_format or not all(text.lstrip("-").isdigit() and len(text) < 8 for text in texts):
        return None
    return pd.to_numeric(column.astype(str) if is_text else column).to_numpy(dtype=np.int64)


def static_columns(
    cells: pd.DataFrame, layout: Layout, header: Header, names: Sequence[str], categories: dict[str, list[str]]
) -> np.ndarray:
    """The values of columns that are the same in all rows of a series, float64 (S, K); NaN: none.

    Text becomes a column of 0 and 1 for each of its values.

    Args:
        cells: of :func:`arrange`.
        layout: likewise.
        header: of the file.
        names: of the columns.
        categories: the values of text columns, which the training has seen; changed in place if there are none yet.

    Raises:
        DataError: a column does not exist, or changes within a series.
    """
    parts: list[np.ndarray] = []
    first = layout.starts[:-1]
    for name in names:
        column = cells[name]
        codes = pd.factorize(column)[0]
        changed = (codes != codes[first][layout.series_of_row]) & (codes >= 0)
        if changed.any():
            assert layout.lines is not None
            row = int(layout.lines[int(changed.argmax())])
            raise DataError(f"{header.describe_cell(row, name)} changes within a series; data.static is for constants")
        values = column.iloc[first]
        if values.dtype.kind in "iufb" and name not in categories:
            parts.append(values.to_numpy(dtype=np.float64)[:, None])
            continue
        texts = values.astype(str).to_numpy()
        known = categories.setdefault(name, sorted(set(texts)))
        parts.append((texts[:, None] == np.array(known, dtype=object)).astype(np.float64))
    return np.concatenate(parts, axis=1)
