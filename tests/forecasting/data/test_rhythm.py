"""How a series goes on: by the calendar that its dates follow, though some of them be missing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from exp.forecasting.data.rhythm import continued, find_rhythm, same_spacing, spacing

MONTH_ENDS = [date + pd.offsets.MonthEnd(0) for date in pd.date_range("2010-01-01", periods=42, freq="MS")]
CASES = {
    "months": (pd.date_range("2010-01-01", periods=42, freq="MS"), ["2013-07-01", "2013-08-01", "2013-09-01"]),
    "quarters": (pd.date_range("2010-01-01", periods=42, freq="QS"), ["2020-07-01", "2020-10-01", "2021-01-01"]),
    "years": (pd.date_range("1970-01-01", periods=42, freq="YS" if pd.__version__ >= "2.2" else "AS"),
              ["2012-01-01", "2013-01-01", "2014-01-01"]),
    "month ends": (pd.DatetimeIndex(MONTH_ENDS[:-1]), ["2013-06-30", "2013-07-31", "2013-08-31"]),
    "mid-month": (pd.date_range("2010-01-01", periods=42, freq="MS") + pd.Timedelta("14D6h"),
                  ["2013-07-15 06:00", "2013-08-15 06:00", "2013-09-15 06:00"]),
    "business days": (pd.date_range("2024-01-01", periods=43, freq="B"), ["2024-02-29", "2024-03-01", "2024-03-04"]),
    "Sunday to Thursday": (
        pd.DatetimeIndex([day for day in pd.date_range("2024-01-01", "2024-02-29", freq="D") if day.weekday() in
                          (6, 0, 1, 2, 3)]), ["2024-03-03", "2024-03-04", "2024-03-05"]),
    "weeks": (pd.date_range("2024-01-01", periods=42, freq="W-MON"), ["2024-10-21", "2024-10-28", "2024-11-04"]),
    "days": (pd.date_range("2024-01-01", periods=60, freq="D"), ["2024-03-01", "2024-03-02", "2024-03-03"]),
    "hours": (pd.date_range("2024-01-01", periods=60, freq="h" if pd.__version__ >= "2.2" else "H"),
              ["2024-01-03 12:00", "2024-01-03 13:00", "2024-01-03 14:00"]),
}  # fmt: skip


@pytest.mark.parametrize("missing", [[], [-3], [7, -4], [-2]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_series_goes_on_by_its_calendar_though_rows_are_missing(case, missing):
    dates, expected = CASES[case]
    kept = dates.delete([number % len(dates) for number in missing])
    assert continued(kept, 3, recent=8).tolist() == [pd.Timestamp(date) for date in expected]
    assert find_rhythm(kept).irregular == len(missing)


def test_the_recent_dates_tell_where_the_whole_follows_no_calendar():
    days = pd.date_range("2009-01-01", "2009-12-01", freq="D")
    dates = days.append(CASES["months"][0]).delete(-3)
    assert continued(dates, 2, recent=12).tolist() == [pd.Timestamp("2013-07-01"), pd.Timestamp("2013-08-01")]
    hours = np.cumsum([0] + [24] * 40 + [1, 1, 5, 1, 2, 1])
    dates = pd.Timestamp("2024-01-01") + pd.to_timedelta(hours, unit="h")
    assert continued(dates, 2, recent=6).tolist() == [dates[-1] + pd.Timedelta("1h"), dates[-1] + pd.Timedelta("2h")]
    assert continued(dates[:1], 2, recent=6) is None


def test_spacing_is_the_same_for_months_of_any_length_and_other_for_other_frequencies():
    found = {case: spacing(dates) for case, (dates, _) in CASES.items()}
    assert same_spacing(found["months"], found["month ends"])
    assert same_spacing(spacing(CASES["months"][0][:3]), found["months"])  # February among them
    assert same_spacing(spacing(CASES["business days"][0][3:8]), found["business days"])  # over a weekend
    frequencies = ["years", "quarters", "months", "weeks", "days", "hours"]
    assert not any(same_spacing(found[one], found[other]) for one, other in zip(frequencies, frequencies[1:]))
    assert spacing(None) is None
    assert spacing(pd.DatetimeIndex(["2020-01-01", "2020-01-02", "2020-02-01", "2021-01-01"])) is None
