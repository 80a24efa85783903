"""The calendar of a series: its season, its irregular rows, and how it goes on, though some of its dates be missing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from exp.forecasting.data.calendar import Calendar, same_spacing

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
    calendar = Calendar.of(kept, recent=8)
    assert calendar.future_dates(kept, 3).tolist() == expected.tolist()
    assert calendar.irregular == len(missing)


def test_the_recent_dates_tell_where_the_whole_follows_no_calendar():
    days = pd.date_range("2009-01-01", "2009-12-01", freq="D")
    dates = days.append(MONTHS[:-3]).delete(-3)
    assert Calendar.of(dates, recent=12).future_dates(dates, 2).tolist() == MONTHS[-3:-1].tolist()
    hours = np.cumsum([0] + [24] * 40 + [1, 1, 5, 1, 2, 1])
    dates = pd.Timestamp("2024-01-01") + pd.to_timedelta(hours, unit="h")
    ahead = [dates[-1] + pd.Timedelta("1h"), dates[-1] + pd.Timedelta("2h")]
    assert Calendar.of(dates, recent=6).future_dates(dates, 2).tolist() == ahead
    assert Calendar.of(dates[:1], recent=6) is None


def stamps(*texts):
    return [pd.Timestamp(text) for text in texts]


def sessions(days, times):
    return pd.DatetimeIndex([day + pd.Timedelta(time) for day in days for time in times])


def in_utc(local, zone="America/New_York"):
    return local.tz_localize(zone).tz_convert("UTC").tz_localize(None)


HOURS = [f"{hour}h" for hour in range(9, 18)]
LUNCH = [f"{minute}min" for minute in (570, 600, 630, 660, 780, 810, 840, 870)]  # 9:30 to 11:00, 13:00 to 14:30
BUSINESS = pd.bdate_range("2023-01-02", "2023-12-29").difference(stamps("2023-05-01", "2023-10-03", "2023-12-25"))
ROUND_THE_CLOCK = pd.date_range("2023-01-02", "2023-06-30 20:00", freq="h")
# Dates; their season; irregular steps; and the next dates.
FOLLOWED = {
    "a shop that is closed on Sundays": (
        pd.bdate_range("2024-01-01", "2024-05-31", freq="C", weekmask="1111110"), 6, 0,
        stamps("2024-06-01", "2024-06-03", "2024-06-04")),
    "working days without holidays": (BUSINESS, 5, 3, stamps("2024-01-01", "2024-01-02", "2024-01-03")),
    "nine hours of working days": (
        sessions(BUSINESS, HOURS)[:-1], 9, 3, stamps("2023-12-29 17:00", "2024-01-01 09:00", "2024-01-01 10:00")),
    "half hours with a lunch break": (
        sessions(BUSINESS, LUNCH), 8, 3, stamps("2024-01-01 09:30", "2024-01-01 10:00", "2024-01-01 10:30")),
    "a Saturday that is shorter": (
        sessions(pd.bdate_range("2024-01-01", "2024-03-29", freq="C", weekmask="1111110"), HOURS)[
            [day.weekday() < 5 or day.hour < 13 for day in sessions(
                pd.bdate_range("2024-01-01", "2024-03-29", freq="C", weekmask="1111110"), HOURS)]], 49, 0,
        stamps("2024-03-30 09:00", "2024-03-30 10:00", "2024-03-30 11:00", "2024-03-30 12:00", "2024-04-01 09:00")),
    "two rows a day": (
        sessions(DAYS, ["8h", "17h"]), 2, 0, stamps("2024-03-06 08:00", "2024-03-06 17:00", "2024-03-07 08:00")),
    "a market that rests one hour a day": (
        in_utc(ROUND_THE_CLOCK[(ROUND_THE_CLOCK.hour != 17) & (ROUND_THE_CLOCK.day_of_week < 5)]), 23, 0,
        stamps("2023-07-01 01:00", "2023-07-01 02:00", "2023-07-01 03:00", "2023-07-03 04:00")),
    "trading days in UTC": (  # 16:00 in New York, where clocks are put back on November 5
        in_utc(pd.bdate_range("2022-03-01", "2023-11-02") + pd.Timedelta("16h")), 5, 0,
        stamps("2023-11-03 20:00", "2023-11-06 21:00", "2023-11-07 21:00")),
    "sessions in UTC": (
        in_utc(sessions(pd.bdate_range("2023-01-02", "2023-11-03"), ["10h", "11h", "12h"])), 3, 0,
        stamps("2023-11-06 15:00", "2023-11-06 16:00", "2023-11-06 17:00", "2023-11-07 15:00")),
    "midnight of Berlin in UTC": (
        in_utc(pd.date_range("2022-01-01", "2023-03-25"), "Europe/Berlin"), 7, 0,
        stamps("2023-03-25 23:00", "2023-03-26 22:00", "2023-03-27 22:00")),
    "hours through a change of the clock": (
        ROUND_THE_CLOCK.delete(2018), 24, 1, stamps("2023-06-30 21:00", "2023-06-30 22:00", "2023-06-30 23:00")),
    "the 30th of the month": (
        pd.DatetimeIndex([min(month.replace(day=28) + pd.Timedelta("2D"), month + pd.offsets.MonthEnd(0))
                          for month in pd.date_range("2010-01-01", "2023-12-01", freq="MS")]), 12, 0,
        stamps("2024-01-30", "2024-02-29", "2024-03-30", "2024-04-30")),
    "business month ends": (
        pd.date_range("2019-01-01", "2024-02-15", freq=pd.offsets.BMonthEnd()), 12, 0,
        stamps("2024-02-29", "2024-03-29", "2024-04-30", "2024-05-31", "2024-06-28")),
    "quarter ends": (
        pd.date_range("2010-01-01", "2023-12-31", freq=pd.offsets.QuarterEnd()), 4, 0,
        stamps("2024-03-31", "2024-06-30", "2024-09-30", "2024-12-31")),
    "twice a month": (
        sessions(MONTHS, ["0D", "14D"]), 24, 0, stamps("2013-10-01", "2013-10-15", "2013-11-01")),
    "every third Friday": (
        pd.date_range("2019-01-01", "2023-12-31", freq="WOM-3FRI"), 12, 0, stamps("2024-01-19", "2024-02-16")),
    "weeks, one on another day": (
        pd.date_range("2022-01-07", periods=90, freq="7D").delete(50).insert(50, pd.Timestamp("2022-12-22")), 52, 1,
        stamps("2023-09-29", "2023-10-06")),
    "years": (DATES["years"], 1, 0, stamps("2015-01-01", "2016-01-01")),
    "every seven hours": (
        pd.date_range("2024-01-01", periods=100, freq="7h"), 24, 0, stamps("2024-01-30 04:00", "2024-01-30 11:00")),
    "other hours since May": (
        sessions(pd.date_range("2024-01-01", "2024-04-30"), HOURS).append(
            sessions(pd.date_range("2024-05-01", "2024-09-01"), ["10h", "11h", "12h"])), 3, 846,
        stamps("2024-09-02 10:00", "2024-09-02 11:00", "2024-09-02 12:00", "2024-09-03 10:00")),
    "some minutes late": (
        ROUND_THE_CLOCK[:500] + pd.to_timedelta(np.arange(500) ** 2 * 7 % 41, unit="s"), 24, 0,
        stamps("2023-01-22 20:00:15", "2023-01-22 21:00:15")),
    "events": (
        MONTHS[0] + pd.to_timedelta(np.cumsum(np.arange(99) ** 2 % 97 + 5) * 977, unit="s"), 1, 95, []),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLLOWED)
def test_season_and_dates_ahead_are_those_of_the_calendar(case):
    dates, season, irregular, ahead = FOLLOWED[case]
    calendar = Calendar.of(dates, recent=24)
    found = calendar.future_dates(dates, len(ahead)).tolist()
    assert (calendar.season, calendar.irregular, found) == (season, irregular, ahead), calendar.text
    assert "season" in calendar.text


def test_dates_without_a_common_distance_go_on_by_their_median():
    """Distances of 1, 2, ... 99 hours, in any order: none is more frequent than another."""
    hours = np.random.default_rng(0).permutation(np.arange(1, 100))
    dates = pd.Timestamp("2020-01-01") + pd.to_timedelta(np.cumsum([0, *hours]), unit="h")
    calendar = Calendar.of(dates, recent=99)
    assert calendar.grid is None
    assert (calendar.future_dates(dates, 1)[0] - dates[-1]) == pd.Timedelta("50h")
    assert calendar.step == "2 days, 2:00:00"
    assert "2 days, 2:00:00 apart, the usual distance" in calendar.text


def test_few_new_rows_follow_the_calendar_of_the_training():
    """Three days do not show that a shop is closed on Sundays; rows of another calendar count by their own."""
    days = pd.bdate_range("2024-01-01", "2024-05-31", freq="C", weekmask="1111110")
    known = Calendar.of(sessions(days, HOURS), recent=24).state_dict()
    new = sessions(pd.date_range("2024-06-06", "2024-06-08"), HOURS)
    assert Calendar.of(new, 24, known).future_dates(new, 1).tolist() == stamps("2024-06-10 09:00")
    assert Calendar.of(new, 24).future_dates(new, 1).tolist() == stamps("2024-06-09 09:00")
    other = sessions(pd.date_range("2024-06-06", "2024-06-08"), ["20h", "21h", "22h"])
    assert Calendar.of(other, 9, known).future_dates(other, 1).tolist() == stamps("2024-06-09 20:00")


def seconds(dates):
    return Calendar.of(dates).seconds


def test_spacing_is_the_same_for_months_of_any_length_and_other_for_other_frequencies():
    found = {case: seconds(dates) for case, dates in DATES.items()}
    assert same_spacing(found["months"], found["month ends"])
    assert same_spacing(seconds(MONTHS[:3]), found["months"])  # February among them
    assert same_spacing(seconds(DATES["business days"][3:8]), found["business days"])  # over a weekend
    frequencies = ["years", "quarters", "months", "weeks", "days", "hours"]
    assert not any(same_spacing(found[one], found[other]) for one, other in zip(frequencies, frequencies[1:]))
    assert Calendar.of(DAYS[:1]) is None
    assert seconds(pd.DatetimeIndex(["2020-01-01", "2020-01-02", "2020-02-01", "2021-01-01"])) is None


@pytest.mark.parametrize(
    ("dates", "season"),
    [
        (pd.date_range("2024-01-01", periods=400, freq="h"), 24),
        (pd.bdate_range("2024-01-01", periods=120), 5),
        (pd.bdate_range("2024-01-01", periods=150, freq="C", weekmask="1111110"), 6),
        (sessions(pd.bdate_range("2024-01-01", periods=30), LUNCH), 8),
        (pd.date_range("2014-01-01", periods=90, freq=pd.offsets.BMonthEnd()), 12),
        (pd.date_range("2022-01-07", periods=120, freq="7D"), 52),
    ],
    ids=["hours", "working days", "six days", "sessions", "month ends", "weeks"],
)
def test_rows_that_are_missing_by_chance_make_no_calendar(dates, season):
    """Every tenth row is missing, at random: of some weeks of hours a few never come at their time of the week."""
    for seed in range(5):
        kept = dates[np.random.default_rng(seed).random(len(dates)) > 0.1]
        calendar = Calendar.of(kept, recent=24)
        assert calendar.season == season, calendar.text
        assert calendar.future_dates(kept, 1)[0] == next(
            date for date in [*dates, *calendar.future_dates(dates, 1)] if date > kept[-1]
        )
