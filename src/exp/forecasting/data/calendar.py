"""Dates of a series: time between rows, dates after the last row, and time features."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import numpy as np
import pandas as pd

__all__ = ["NUM_TIME_FEATURES", "Frequency", "continued", "frequency_of", "same_spacing", "time_features"]

NUM_TIME_FEATURES = 4
_ALIKE = 1.12  # ratio of distances that count as equal: months have 28 to 31 days


class Frequency(NamedTuple):
    """The time between neighboring rows of a series.

    Attributes:
        seconds: the median; None if more than half of the rows depart from ``step``.
        step: the most frequent one, as text: ``1:00:00``, ``7 days, 0:00:00``, ``1 month``.
        irregular: number of rows that depart from ``step``.
        first: the first of these rows, from 0; None: there is none.
    """

    seconds: float | None
    step: str
    irregular: int
    first: int | None

    @property
    def season(self) -> int:
        """Rows per season; 1: no known season.

        A season is a day for rows within a day, a week for daily rows and working days, and a year for weekly, monthly
        and quarterly rows.
        """
        days = 0.0 if self.seconds is None else self.seconds / 86400
        if 0.0 < days < 1.0:
            return round(1.0 / days)
        return 5 if "business" in self.step else {1: 7, 7: 52, 30: 12, 31: 12, 91: 4, 92: 4}.get(round(days), 1)


def frequency_of(dates: pd.DatetimeIndex) -> Frequency | None:
    """The time between neighboring rows, counted in months or working days if all dates follow these.

    Args:
        dates: strictly increasing.

    Returns:
        None for fewer than two dates.
    """
    if len(dates) < 2:
        return None
    numbers, unit, offset = _numbered(dates)
    usual = _usual_step(numbers)
    step = f"{usual} {unit}{'s' * (usual > 1)}" if unit else str(offset(usual).to_pytimedelta())
    steps = np.diff(numbers)
    other = steps != usual
    irregular, first = int(other.sum()), int(other.argmax()) + 1 if other.any() else None
    seconds = None if 2 * irregular > len(steps) else float(np.median((dates[1:] - dates[:-1]).total_seconds()))
    return Frequency(seconds, step, irregular, first)


def same_spacing(seconds: float, other: float) -> bool:
    """Whether two distances between rows, in seconds, count as the same frequency: months differ by a tenth."""
    return seconds < other * _ALIKE and other < seconds * _ALIKE


def continued(dates: pd.DatetimeIndex, count: int, recent: int) -> pd.DatetimeIndex | None:
    """The ``count`` dates after ``dates``.

    They continue in months or working days if all dates follow these (some may be missing) or if the recent ones do,
    else at the most frequent distance of the recent ones.

    Args:
        dates: strictly increasing.
        count: number of dates.
        recent: number of the last dates that count as recent.

    Returns:
        None for fewer than two dates.
    """
    if len(dates) < 2:
        return None
    numbers, unit, offset = _numbered(dates)
    if not unit:
        numbers, _, offset = _numbered(dates[-max(recent, 3) :])
    usual = _usual_step(numbers)
    return pd.DatetimeIndex([dates[-1] + offset(usual * number) for number in range(1, count + 1)])


def _usual_step(numbers: Any) -> int:
    """The most frequent difference of neighbors; of several the smallest."""
    return int(pd.Series(np.diff(numbers)).mode()[0])


def _numbered(dates: pd.DatetimeIndex) -> tuple[Any, str, Callable[[int], Any]]:
    """Number the rows in months or working days, or, if the dates follow neither, in nanoseconds.

    Returns:
        The numbers (T,); the unit, ``""`` for nanoseconds; and a function from a count to an offset of pandas.
    """
    in_time = (dates - dates[0]) // pd.Timedelta(1), "", pd.Timedelta
    days = dates.tz_localize(None).normalize()
    if (dates.tz_localize(None) - days).nunique() > 1:
        return in_time
    months = np.asarray(dates.year) * 12 + np.asarray(dates.month)
    ends = bool(dates.is_month_end.all())
    if (np.diff(months) > 0).all() and (ends or dates.day.nunique() == 1):
        return months, "month", pd.offsets.MonthEnd if ends else lambda number: pd.DateOffset(months=number)
    week = "".join(str(int((dates.day_of_week == day).any())) for day in range(7))
    if week.count("1") in (0, 1, 7) or (days[-1] - days[0]).days < 14:
        return in_time
    numbers = np.busday_count(days[0].date(), days.to_numpy().astype("datetime64[D]"), weekmask=week)
    if _usual_step(numbers) != 1:
        return in_time
    return numbers, "business day", lambda number: pd.offsets.CustomBusinessDay(number, weekmask=week)


def time_features(dates: pd.DatetimeIndex | None, num_rows: int) -> np.ndarray:
    """Hour of the day, day of the week, of the month and of the year, each scaled to [-0.5, 0.5].

    The convention of GluonTS (Alexandrov et al., arXiv 1906.05264) for hourly data. Published TimeBridge runs use these
    four for every data set, also for rows every few minutes.

    Args:
        dates: of the rows; None: not known.
        num_rows: number of rows (T); if there are ``dates``, their length.

    Returns:
        float32 (T, 4); zeros where there are no dates.
    """
    if dates is None:
        return np.zeros((num_rows, NUM_TIME_FEATURES), dtype=np.float32)
    features = [
        dates.hour / 23 - 0.5,
        dates.day_of_week / 6 - 0.5,
        (dates.day - 1) / 30 - 0.5,
        (dates.day_of_year - 1) / 365 - 0.5,
    ]
    return np.stack([np.asarray(feature) for feature in features], axis=1).astype(np.float32)
