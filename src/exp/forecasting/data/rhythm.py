"""The rhythm of a series in time: how far apart its rows are, where they depart from that, and how it goes on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exp.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    from exp.forecasting.data.series import Series

__all__ = ["Rhythm", "continued", "find_rhythm", "gap_notes"]


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
    months = _months(dates)
    if months is not None:
        steps = np.diff(months)
    values, counts = np.unique(steps, return_counts=True)
    usual = values[counts.argmax()]
    departs = steps != usual
    if months is not None:
        step = f"{usual} month{'s' * bool(usual > 1)}"
    else:
        row = int((~departs).argmax())
        step = _duration(dates[row + 1] - dates[row])
    return Rhythm(step, int(departs.sum()), int(departs.argmax()) + 1 if departs.any() else None)


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


def continued(dates: pd.DatetimeIndex, count: int) -> pd.DatetimeIndex | None:
    """The ``count`` dates after ``dates``, in their rhythm or else at their most frequent distance.

    Args:
        dates: strictly increasing; None is the answer to fewer than two.
        count: how many.
    """
    import pandas as pd

    if len(dates) < 2:
        return None
    rhythm: Any = _frequency(dates)
    if rhythm is None:
        rhythm = pd.Series(dates[1:] - dates[:-1]).mode()[0]
    return pd.date_range(dates[-1], periods=count + 1, freq=rhythm)[1:]


def _frequency(dates: pd.DatetimeIndex) -> str | None:
    import pandas as pd

    if len(dates) < 3:
        return None
    with warnings.catch_warnings():
        # pandas 3 announces that a later version returns an object, not a string; date_range takes both.
        warnings.filterwarnings("ignore", message="A future version of pandas will return a BaseOffset")
        return pd.infer_freq(dates)


def _months(dates: pd.DatetimeIndex) -> np.ndarray | None:
    """Months since the year 0 where there is one row in a month at most, always at the same day and time."""
    months = np.asarray(dates.year) * 12 + np.asarray(dates.month)
    if len(np.unique(months)) < len(months):
        return None
    same_time = (dates - dates.normalize()).nunique() == 1
    same_day = dates.day.nunique() == 1 or bool(dates.is_month_end.all())
    return months if same_time and same_day else None


def _duration(step: pd.Timedelta) -> str:
    return str(step.to_pytimedelta())
