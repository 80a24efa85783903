"""Read the dates of a series: one column in one format, increasing; and compare them with a calendar."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from exp.errors import DataError
from exp.forecasting.data.calendar import Calendar

if TYPE_CHECKING:
    from exp.forecasting.data.files import Header
    from exp.forecasting.keys import ForecastingDataConfig

# Formats of a day ("-" stands for the separator of the column) and of a time of day.
_DAY_FORMATS = ("%Y-%m-%d", "%d-%m-%Y", "%m-%d-%Y", "%d-%m-%y", "%m-%d-%y", "%y-%m-%d", "%d-%b-%Y", "%d-%b-%y",
                "%y-%b-%d", "%Y-%m", "%Y%m%d")  # fmt: skip
_TIME_FORMATS = [time + zone
                 for time in ("%H", "%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I %p", "%I:%M %p", "%I:%M:%S %p")
                 for zone in ("", "%z", " %z")]  # fmt: skip
# Formats of plain numbers, by number of digits: dates that begin with 19 or 20, or time since 1970.
_DIGIT_FORMATS = {8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
_EPOCH_FORMATS = {10: "%s", 13: "%s ms", 16: "%s us", 19: "%s ns"}


@dataclass(frozen=True)
class Dates:
    """The dates of a series.

    Attributes:
        index: the T dates, strictly increasing; None: there are no dates, nor any of the following.
        date_format: format of the cells.
        calendar: when rows come; None: there is one row.
        warnings: a sentence about irregular rows; empty: there are none.
    """

    index: pd.DatetimeIndex | None = None
    date_format: str | None = None
    calendar: Calendar | None = None
    warnings: Sequence[str] = ()

    def rows_before(self, starts: np.ndarray, start: str) -> np.ndarray:
        """The number of rows of each series, int64 (S,), before a date in the time zone of the file.

        Args:
            starts: the first row of each series, and the number of all rows, (S + 1,).
            start: the date.

        Raises:
            DataError: it is no date, or the file has no dates.
        """
        if self.index is None:
            raise DataError(f"data.val_start or data.test_start={start} needs dates; set data.val_size, data.test_size")
        try:
            date = pd.Timestamp(start)
            date = date.tz_localize(self.index.tz) if date.tz is None else date.tz_convert(self.index.tz)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"data.val_start or data.test_start={start} is not a date like 2024-01-31: {error}"
            ) from error
        return np.add.reduceat(np.asarray(self.index < date, dtype=np.int64), starts[:-1])


def read_dates(
    table: pd.DataFrame,
    header: Header,
    config: ForecastingDataConfig,
    saved_format: str | None = None,
    saved_calendar: Mapping[str, Any] | None = None,
) -> Dates:
    """Read the column of dates of a file.

    Args:
        table: cells of the file.
        header: of the file, with a column of dates.
        config: ``date_format``, ``allow_gaps`` and ``lookback`` are read.
        saved_format: of the training rows; see :func:`parse_dates`.
        saved_calendar: of the training rows; see :meth:`exp.forecasting.data.calendar.Calendar.of`.

    Raises:
        DataError: a cell is no date, dates do not increase, or some are irregular and ``allow_gaps`` is false; or see
            :func:`parse_dates`.
    """
    describe = functools.partial(header.describe_cell, column=str(header.date))
    dates, date_format = parse_column(table, header, config, saved_format)
    backwards = dates[1:] <= dates[:-1]
    if backwards.any():
        row = int(backwards.argmax()) + 1
        kind = "repeats" if dates[row] == dates[row - 1] else "is earlier than"
        raise DataError(f"{describe(row)} {kind} the date before it; {_order_advice(table, header.date, dates)}")
    calendar = Calendar.of(dates, config.lookback, saved_calendar)
    if calendar is None or calendar.first is None:
        return Dates(dates, date_format, calendar)
    distance = (dates[calendar.first] - dates[calendar.first - 1]).to_pytimedelta()
    grid = calendar.grid
    rule = f"most rows follow their calendar ({grid.text})" if grid else f"the usual distance is {calendar.step}"
    problem = (
        f"{describe(calendar.first)} is {distance} after the date before it, while {rule}; "
        f"{calendar.irregular} of {len(dates) - 1} steps depart from that"
    )
    if not config.allow_gaps:
        raise DataError(f"{problem}; fill the gaps, or allow them with data.allow_gaps=true")
    evenly = "a window takes rows as if they were evenly spaced, data.allow_gaps=false refuses this"
    return Dates(dates, date_format, calendar, [f"{problem}; {evenly}"])


def parse_column(
    table: pd.DataFrame, header: Header, config: ForecastingDataConfig, saved_format: str | None
) -> tuple[pd.DatetimeIndex, str | None]:
    """The dates of all rows, and their format (:func:`parse_dates`); a Parquet file may have dates already.

    Raises:
        DataError: a cell is no date; or see :func:`parse_dates`.
    """
    column, describe = table[header.date], functools.partial(header.describe_cell, column=str(header.date))
    if column.dtype.kind == "M" or isinstance(column.dtype, pd.DatetimeTZDtype):
        dates = pd.DatetimeIndex(column)
        if dates.hasnans:
            raise DataError(f"{describe(int(dates.isna().argmax()))} is not a date")
        return dates, None
    codes, cells = pd.factorize(column, use_na_sentinel=False)
    first = np.zeros(len(cells), dtype=np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # of several rows with a cell the last one written counts
    texts = pd.Series(cells).astype(object).fillna("").astype(str).str.strip()
    dates, date_format = parse_dates(texts, config.date_format, saved_format, lambda cell: describe(int(first[cell])))
    return dates[codes], date_format


def _order_advice(table: pd.DataFrame, date: str | None, dates: pd.DatetimeIndex) -> str:
    """How to correct dates that do not increase: name the ids of a table of many series, else sort."""
    cells = table.drop(columns=date)
    for key in cells if 4 * dates.nunique() <= 3 * len(dates) else ():
        is_key = 1 < cells[key].nunique() <= len(cells) // 2
        if is_key and not pd.DataFrame({0: cells[key].astype(str), 1: dates}).duplicated().any():
            value = next((name for name in cells if name != key), "<column>")
            return f"its rows are of the series that {key} names: data.id_column={key} data.targets=[{value}]"
    return "sort the rows by date and keep one per date, or, where the clock was put back, write times in UTC"


def parse_dates(
    column: pd.Series, date_format: str | None, saved_format: str | None, describe: Callable[[int], str]
) -> tuple[pd.DatetimeIndex, str]:
    """Parse a column of dates in one format.

    If no format is given, the first cell gives the candidates, and the whole column decides between them: 01/12/2019 is
    December 1 if some other date cannot be read with the month first. Numbers of 10, 13, 16 and 19 digits are time
    since 1970 (UTC) in s, ms, us and ns.

    Args:
        column: text, without blanks at its ends.
        date_format: as for strftime; ``%s``: seconds since 1970. None: inferred from the column.
        saved_format: the format of the training rows, used if several formats fit; None: not known.
        describe: returns the name of a row's cell, for messages; rows count from 0.

    Returns:
        The dates in the order of the column, with the cells' offset from UTC; and their format.

    Raises:
        DataError: a cell is no date, or not in the format of the others; the offset from UTC changes; or several
            formats fit the whole column and give different dates.
    """
    formats = list(_candidate_formats(column.iloc[0])) if date_format is None else [date_format]
    if not formats:
        raise DataError(f"{describe(0)} is not a date; write dates like 2016-07-01 00:00:00, or set data.date_format")
    if formats[0].endswith("%z"):
        _check_offsets(column, describe)
    try:
        parsed = {form: _parse(column, form) for form in formats}
    except (ValueError, TypeError) as error:  # a directive that does not exist
        raise DataError(f"{describe(0)} cannot be read with data.date_format={date_format}: {error}") from error
    complete = {form: dates for form, dates in parsed.items() if not dates.hasnans}
    if not complete:
        # Report the first bad cell of the format that fits the most rows.
        row = max(int(dates.isna().argmax()) for dates in parsed.values())
        expected = f"the format of the first one, {column.iloc[0]!r}" if date_format is None else date_format
        raise DataError(
            f"{describe(row)} is not a date in {expected}; write all in one format, or set data.date_format as for "
            "strftime: %d/%m/%Y %H:%M"
        )
    chosen = saved_format if saved_format in complete else next(iter(complete))
    for other, dates in complete.items():
        differs = np.asarray(dates != complete[chosen])
        if differs.any() and chosen != saved_format:
            raise DataError(
                f"{describe(int(differs.argmax()))} can be read as {chosen} and as {other}, and so can every date of "
                f"the column; say which with data.date_format={chosen!r} or {other!r}"
            )
    return complete[chosen], chosen


def _candidate_formats(cell: str) -> Iterator[str]:
    """The formats in which a cell can be read."""
    if cell.isdigit():
        is_calendar_date = len(cell) in _DIGIT_FORMATS and re.match("(19|20)..(0[1-9]|1[0-2])", cell)
        date_format = _DIGIT_FORMATS[len(cell)] if is_calendar_date else _EPOCH_FORMATS.get(len(cell))
        yield from [date_format] if date_format else []
        return
    parts = re.fullmatch(r"(\S*?\d)(?:(T| +)(\S.*))?", cell)
    if parts is None:
        return
    day, blanks, time = parts.groups(default="")
    time_formats = [form for form in _TIME_FORMATS if _fits(time, form)] if time else [""]
    separator = next((letter for letter in day if letter in "-/."), "-")
    for day_format in _DAY_FORMATS if time_formats else ():
        day_format = day_format.replace("-", separator)
        if _fits(day, day_format):
            yield day_format + blanks + time_formats[0]


def _fits(text: str, date_format: str) -> bool:
    return not _parse(pd.Series([text]), date_format).hasnans


def _check_offsets(column: pd.Series, describe: Callable[[int], str]) -> None:
    offsets = column.str.extract(r"(Z|[+-]\d\d:?\d\d)$", expand=False).fillna("")
    changes = (offsets != offsets.iloc[0]).to_numpy(dtype=bool)
    if changes.any():
        raise DataError(
            f"{describe(int(changes.argmax()))} has another offset from UTC than the dates before it "
            f"({offsets.iloc[0]}); write all dates in UTC, or all without an offset"
        )


def _parse(column: pd.Series, date_format: str) -> pd.DatetimeIndex:
    """The dates; NaT where a cell does not have the format."""
    if not date_format.startswith("%s"):
        return pd.DatetimeIndex(pd.to_datetime(column, format=date_format, errors="coerce"))
    numbers = pd.to_numeric(column, errors="coerce")
    return pd.DatetimeIndex(pd.to_datetime(numbers, unit=date_format[2:].strip() or "s", errors="coerce"))
