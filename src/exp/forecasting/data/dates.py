"""Dates of a series, read in one form for the whole column: never guessed row by row."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Sequence

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DateError", "parse_dates"]

# How days are written -> the formats that can be meant. {s}: the separators that there can be; then the one there is.
_DAYS = (
    (r"\d{{4}}(?P<s>{s})\d{{1,2}}(?P=s)\d{{1,2}}", "[-/.]", ("%Y{s}%m{s}%d",)),
    (r"\d{{1,2}}(?P<s>{s})\d{{1,2}}(?P=s)\d{{4}}", "[-/.]", ("%d{s}%m{s}%Y", "%m{s}%d{s}%Y")),
    (r"\d{{1,2}}(?P<s>{s})\d{{1,2}}(?P=s)\d{{2}}", "[-/.]", ("%d{s}%m{s}%y", "%m{s}%d{s}%y", "%y{s}%m{s}%d")),
    (r"\d{{1,2}}(?P<s>{s})[A-Za-z]{{3}}(?P=s)\d{{4}}", "[-/. ]", ("%d{s}%b{s}%Y",)),
    (r"\d{{1,2}}(?P<s>{s})[A-Za-z]{{3}}(?P=s)\d{{2}}", "[-/. ]", ("%d{s}%b{s}%y", "%y{s}%b{s}%d")),
    (r"\d{{4}}(?P<s>{s})\d{{1,2}}", "[-/]", ("%Y{s}%m",)),
    (r"(?:19|20)\d{{6}}(?P<s>{s})", "", ("%Y%m%d",)),
)
_ZONE = r"(?:Z|[+-]\d{2}:?\d{2})"
_TIME = re.compile(
    r"(?:(?P<between>T|[ ]+)(?P<hour>\d{1,2})"
    r"(?:(?P<minute>:\d{2})(?:(?P<second>:\d{2})(?P<fraction>\.\d{1,9})?)?)?"
    r"(?P<half>[ ]?[AaPp][Mm])?(?P<zone>[ ]?"
    rf"{_ZONE})?)?"
)
_PARTS = {
    "hour": (r"\d{1,2}", "%H"),
    "minute": (r":\d{2}", ":%M"),
    "second": (r":\d{2}", ":%S"),
    "fraction": (r"\.\d{1,9}", ".%f"),
    "half": ("[AaPp][Mm]", "%p"),
    "zone": (_ZONE, "%z"),
}
_DATE = r"(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
# Dates without separators, and time since 1970: since September 2001, its seconds have ten digits, and those that look
# like a date as well lie after 2030.
_NUMBERS = (
    (rf"{_DATE}(?:[01]\d|2[0-3])", r"\d{10}", "%Y%m%d%H"),
    (rf"{_DATE}\d{{4}}", r"\d{12}", "%Y%m%d%H%M"),
    (rf"{_DATE}\d{{6}}", r"\d{14}", "%Y%m%d%H%M%S"),
    (r"\d{10}(?:\.\d+)?", r"\d{10}(?:\.\d+)?", "%s"),
    (r"\d{13}", r"\d{13}", "%s ms"),
    (r"\d{16}", r"\d{16}", "%s us"),
    (r"\d{19}", r"\d{19}", "%s ns"),
)
"""What the first cell looks like, and then all of them, and the format."""


class DateError(ValueError):
    """A cell is no date, or could be several.

    Args:
        row: its position, from 0.
        problem: what is wrong with it and what to do, to be said after the cell.
        formats: those in which the whole column can be read, where there are several.
    """

    def __init__(self, row: int, problem: str, formats: Sequence[str] = ()) -> None:
        super().__init__(problem)
        self.row = row
        self.problem = problem
        self.formats = tuple(formats)


class _Form(NamedTuple):
    pattern: str
    """Of every cell of the column."""
    formats: tuple[str, ...]
    """Of strftime, or ``%s``, ``%s ms`` and so on for time since 1970."""


def parse_dates(column: pd.Series, date_format: str | None = None) -> tuple[pd.DatetimeIndex, str]:
    """Parse a column of dates in the one form that fits all of them.

    Without a format, the first cell tells the form (its separators, its parts), and the whole column which number is
    the day where that is open: 01/12/2019 is the first of December if some date of the column cannot be read with the
    month first. Numbers of 10, 13, 16 and 19 digits are time since 1970 (UTC) in s, ms, us and ns.

    Args:
        column: text, without blanks at its ends.
        date_format: of strftime; ``%s``: seconds since 1970. None: found from the column.

    Returns:
        The dates, with the offset from UTC that the cells name, in the order of the column; and their format.

    Raises:
        DateError: a cell is no date, or not in the form of the others; offsets from UTC change; or the whole column
            can be read in two ways.
    """
    form = _form_of(column.iloc[0]) if date_format is None else _Form("(?s:.*)", (date_format,))
    if form is None:
        raise DateError(0, "is not a date; write dates like 2016-07-01 00:00:00, or set data.date_format")
    if date_format is None:
        problem = (
            f"is not a date in the form of the first one, {column.iloc[0]!r}; write all like 2016-07-01 00:00:00, "
            "or set data.date_format"
        )
    else:
        problem = f"does not fit data.date_format={date_format}; the same format is for all rows"
    departs = ~column.str.fullmatch(form.pattern).to_numpy(dtype=bool)
    if departs.any():
        raise DateError(int(departs.argmax()), problem)
    if "%z" in form.formats[0]:
        _check_offsets(column)
    try:
        found = {each: _parsed(column, each) for each in form.formats}
    except (ValueError, TypeError) as error:  # a directive that does not exist
        raise DateError(0, f"cannot be read with data.date_format={date_format}: {error}") from error
    whole = {each: dates for each, dates in found.items() if not dates.hasnans}
    if not whole:
        # Of the reading that goes on for longest: the others are not meant.
        raise DateError(max(int(dates.isna().argmax()) for dates in found.values()), problem)
    (chosen, dates), *others = whole.items()
    for other, also in others:
        unlike = np.asarray(dates != also)
        if unlike.any():
            raise DateError(
                int(unlike.argmax()),
                f"can be read as {chosen} and as {other}, and so can every date of the column; say which with "
                f"data.date_format={chosen!r} or {other!r}",
                list(whole),
            )
    return dates, chosen


def _form_of(cell: str) -> _Form | None:
    for first, every, written in _NUMBERS:
        if re.fullmatch(first, cell):
            return _Form(every, (written,))
    for pattern, separators, formats in _DAYS:
        day = re.match(pattern.format(s=separators), cell)
        time = _TIME.fullmatch(cell, day.end()) if day else None
        if day and time:
            rest = _of_times(time)
            separator = day.group("s")
            return _Form(
                pattern.format(s=re.escape(separator)) + rest.pattern,
                tuple(each.format(s=separator) + rest.formats[0] for each in formats),
            )
    return None


def _of_times(time: re.Match[str]) -> _Form:
    """The pattern and the format of what follows the day: nothing, or the parts of a time that the match has."""
    if time.group("between") is None:
        return _Form("", ("",))
    patterns, directives = [time.group("between")], [time.group("between")]
    for part, (pattern, directive) in _PARTS.items():
        text = time.group(part)
        if text is not None:
            blank = " " if text.startswith(" ") else ""
            patterns.append(blank + pattern)
            directives.append(blank + directive)
    written = "".join(directives)
    return _Form("".join(patterns), (written.replace("%H", "%I") if "%p" in written else written,))


def _check_offsets(column: pd.Series) -> None:
    offsets = column.str.extract(f"({_ZONE})$", expand=False).fillna("")
    changes = (offsets != offsets.iloc[0]).to_numpy(dtype=bool)
    if changes.any():
        raise DateError(
            int(changes.argmax()),
            f"has another offset from UTC than the dates before it ({offsets.iloc[0]}); write all dates in UTC, "
            "or all without an offset",
        )


def _parsed(column: pd.Series, form: str) -> pd.DatetimeIndex:
    import pandas as pd

    if not form.startswith("%s"):
        return pd.DatetimeIndex(pd.to_datetime(column, format=form, errors="coerce"))
    numbers = pd.to_numeric(column, errors="coerce")
    return pd.DatetimeIndex(pd.to_datetime(numbers, unit=form[2:].strip() or "s", errors="coerce"))
