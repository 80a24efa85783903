"""How a series goes on: by the calendar that its dates follow, though some of them be missing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from exp.forecasting.data.calendar import continued, frequency_of, same_spacing

MONTHS = pd.date_range("2010-01-01", periods=45, freq="MS")
DAYS = pd.date_range("2024-01-01", "2024-03-05", freq="D")
DATES = {
    "months": MONTHS,
    "quarters": pd.date_range("2010-01-01", periods=45, freq="QS"),
    "years": pd.DatetimeIndex([f"{year}-01-01" for year in range(1970, 2015)]),
    "month ends": MONTHS + pd.offsets.MonthEnd(0),
    "mid-month": MONTHS + pd.Timedelta("14D6h"),
    "business days": pd.date_range("2024-01-01", periods=46, freq="B"),
    "Sunday to Thursday": DAYS[[day.weekday() in (6, 0, 1, 2, 3) for day in DAYS]],
    "weeks": pd.date_range("2024-01-01", periods=45, freq="W-MON"),
    "days": DAYS,
    "hours": pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(63), unit="h"),
}


@pytest.mark.parametrize("missing", [[], [-3], [7, -4], [-2]], ids=str)
@pytest.mark.parametrize("case", DATES)
def test_a_series_goes_on_by_its_calendar_though_rows_are_missing(case, missing):
    dates, expected = DATES[case][:-3], DATES[case][-3:]
    kept = dates.delete([number % len(dates) for number in missing])
    assert continued(kept, 3, recent=8).tolist() == expected.tolist()
    assert frequency_of(kept).irregular == len(missing)


def test_the_recent_dates_tell_where_the_whole_follows_no_calendar():
    days = pd.date_range("2009-01-01", "2009-12-01", freq="D")
    dates = days.append(MONTHS[:-3]).delete(-3)
    assert continued(dates, 2, recent=12).tolist() == MONTHS[-3:-1].tolist()
    hours = np.cumsum([0] + [24] * 40 + [1, 1, 5, 1, 2, 1])
    dates = pd.Timestamp("2024-01-01") + pd.to_timedelta(hours, unit="h")
    assert continued(dates, 2, recent=6).tolist() == [dates[-1] + pd.Timedelta("1h"), dates[-1] + pd.Timedelta("2h")]
    assert continued(dates[:1], 2, recent=6) is None


def seconds(dates):
    return frequency_of(dates).seconds


def test_spacing_is_the_same_for_months_of_any_length_and_other_for_other_frequencies():
    found = {case: seconds(dates) for case, dates in DATES.items()}
    assert same_spacing(found["months"], found["month ends"])
    assert same_spacing(seconds(MONTHS[:3]), found["months"])  # February among them
    assert same_spacing(seconds(DATES["business days"][3:8]), found["business days"])  # over a weekend
    frequencies = ["years", "quarters", "months", "weeks", "days", "hours"]
    assert not any(same_spacing(found[one], found[other]) for one, other in zip(frequencies, frequencies[1:]))
    assert frequency_of(DAYS[:1]) is None
    assert seconds(pd.DatetimeIndex(["2020-01-01", "2020-01-02", "2020-02-01", "2021-01-01"])) is None
