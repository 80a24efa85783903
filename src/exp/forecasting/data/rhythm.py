"""The rhythm of a series in time: how far apart its rows are, where they depart from that, and how it goes on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np

from exp.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    from exp.forecasting.data.series import Series

__all__ = ["Rhythm", "continued", "find_rhythm", "gap_notes", "same_spacing", "spacing"]

_WEEK = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_BUSINESS = [True] * 5 + [False] * 2
_ALIKE = 1.12  # months have 28 to 31 days


class Rhythm(NamedTuple):
    """How far apart the rows of a series are.

    Attributes:
        step: most rows from the one before, for people: ``1:00:00``, ``7 days, 0:00:00``, ``1 month``.
        irregular: number of rows that are nearer to the row before or further away.
        first: the first of them, from 0; None: there is none.
    """

    step: str
    irregular: int = 0
    first: int | None = None


class _Calendar(NamedTuple):
    """Rows counted in steps of the calendar, where a duration is none: months, or days of the week.

    Attributes:
        numbers: of the rows, int64 (T,).
        unit: what is counted.
        after: the date that is some numbers after the last row.
    """

    numbers: np.ndarray
    unit: str
    after: Callable[[int], Any]


def find_rhythm(dates: pd.DatetimeIndex) -> Rhythm | None:
    """The most frequent distance of neighbouring rows; None with fewer than two.

    Months of different length are one step, and so is what a frequency of pandas describes (business days, weekdays).

    Args:
        dates: strictly increasing.
    """
    if len(dates) < 2:
        return None
    frequency = _frequency(dates)
    steps = np.diff(np.asarray(dates.asi8))
    if frequency is not None:
        return Rhythm(_duration(dates[1] - dates[0]) if (steps == steps[0]).all() else frequency)
    calendar = _calendar(dates)
    if calendar is not None:
        steps = np.diff(calendar.numbers)
    usual = _usual(steps)
    departs = steps != usual
    if calendar is not None:
        step = f"{usual} {calendar.unit}{'s' * (usual > 1)}"
    else:
        row = int((~departs).argmax())
        step = _duration(dates[row + 1] - dates[row])
    return Rhythm(step, int(departs.sum()), int(departs.argmax()) + 1 if departs.any() else None)


def spacing(dates: pd.DatetimeIndex | None) -> float | None:
    """The median distance of neighbouring rows in seconds; None where less than half of them are about so far apart."""
    if dates is None or len(dates) < 2:
        return None
    steps = np.asarray((dates[1:] - dates[:-1]).total_seconds())
    usual = float(np.median(steps))
    return usual if np.mean(same_spacing(steps, usual)) >= 0.5 else None


def same_spacing(step: Any, other: float) -> Any:
    """Whether distances of rows, a number or an array, are of the same frequency: months differ by a tenth."""
    return (step < other * _ALIKE) & (other < step * _ALIKE)


def gap_notes(series: Series, rhythm: Rhythm | None, allow_gaps: bool) -> list[str]:
    """What to tell the user of the distances between rows: the first that departs, and how many do.

    Args:
        series: as it was read.
        rhythm: of its dates; None: not known.
        allow_gaps: whether they may depart.

    Raises:
        DataError: they do, and may not.
    """
    if rhythm is None or rhythm.first is None:
        return []
    assert series.dates is not None
    row = rhythm.first
    distance = (series.dates[row] - series.dates[row - 1]).to_pytimedelta()
    what = (
        f"{series.place(row)} is {distance} after the date before it, while most rows are {rhythm.step} apart "
        f"({rhythm.irregular} of {len(series.dates) - 1} steps depart from that)"
    )
    if not allow_gaps:
        raise DataError(f"{what}; fill the gaps, or allow them with data.allow_gaps=true")
    return [f"{what}; a window takes rows as if they were evenly spaced, data.allow_gaps=false refuses this"]


def continued(dates: pd.DatetimeIndex, count: int, recent: int) -> pd.DatetimeIndex | None:
    """The ``count`` dates after ``dates``.

    They go on by the calendar (a frequency of pandas, months, days of the week), where all dates follow one, though
    some be missing; or where the recent ones do. Else at the most frequent distance of these.

    Args:
        dates: strictly increasing; None is the answer to fewer than two.
        count: how many.
        recent: how many of the last dates tell, where the whole has no calendar.
    """
    import pandas as pd

    if len(dates) < 2:
        return None
    last = dates[-max(recent, 3) :]
    for known in (dates, last):
        frequency = _frequency(known)
        if frequency is not None:
            return pd.date_range(dates[-1], periods=count + 1, freq=frequency)[1:]
        calendar = _calendar(known)
        if calendar is not None:
            usual = _usual(np.diff(calendar.numbers))
            return pd.DatetimeIndex([calendar.after(usual * number) for number in range(1, count + 1)])
    step = pd.Series(last[1:] - last[:-1]).mode()[0]
    return pd.date_range(dates[-1], periods=count + 1, freq=step)[1:]


def _usual(steps: np.ndarray) -> int:
    """The most frequent step, of several the smallest."""
    values, counts = np.unique(steps, return_counts=True)
    return int(values[counts.argmax()])


def _frequency(dates: pd.DatetimeIndex) -> str | None:
    import pandas as pd

    if len(dates) < 3:
        return None
    with warnings.catch_warnings():
        # pandas 3 announces that a later version returns an object, not a string; date_range takes both.
        warnings.filterwarnings("ignore", message="A future version of pandas will return a BaseOffset")
        return pd.infer_freq(dates)


def _calendar(dates: pd.DatetimeIndex) -> _Calendar | None:
    """What all dates follow, though some be missing; None: nothing, or durations tell the same."""
    if (dates - dates.normalize()).nunique() > 1:
        return None
    return _months(dates) or _weekdays(dates)


def _months(dates: pd.DatetimeIndex) -> _Calendar | None:
    """Months where there is one row in a month at most, always at the same day, or the last where a month has none."""
    import pandas as pd

    months = np.asarray(dates.year) * 12 + np.asarray(dates.month)
    if (np.diff(months) == 0).any():
        return None
    day = 31 if dates.is_month_end.all() else int(dates.day.max())
    if not (np.asarray(dates.day) == np.minimum(day, np.asarray(dates.days_in_month))).all():
        return None

    def after(number: int) -> Any:
        date = dates[-1] + pd.DateOffset(months=number)
        return date.replace(day=min(day, date.days_in_month))

    return _Calendar(months, "month", after)


def _weekdays(dates: pd.DatetimeIndex) -> _Calendar | None:
    """Days of the week, where there is a row on most of them and none on the others, such as business days."""
    import pandas as pd

    days = np.asarray(dates.tz_localize(None).normalize(), dtype="datetime64[D]")
    open_days = [bool((dates.day_of_week == day).any()) for day in range(7)]
    weeks = (days[-1] - days[0]).astype(int) // 7
    if not 1 < sum(open_days) < 7 or weeks < 2:
        return None
    numbers = np.busday_count(days[0], days, weekmask=open_days)
    if _usual(np.diff(numbers)) != 1 or 2 * len(days) < weeks * sum(open_days):
        return None

    def after(number: int) -> Any:
        day = np.busday_offset(days[-1], number, weekmask=open_days)
        return dates[-1] + pd.Timedelta(int((day - days[-1]).astype(int)), unit="D")

    names = [name for name, is_open in zip(_WEEK, open_days) if is_open]
    return _Calendar(numbers, "business day" if open_days == _BUSINESS else f"day of {', '.join(names)}", after)


def _duration(step: pd.Timedelta) -> str:
    return str(step.to_pytimedelta())
