"""The calendar of a series: when its rows come, how many make a season, and the dates ahead; and time features."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Iterator, Mapping

import numpy as np
import pandas as pd

__all__ = ["NUM_TIME_FEATURES", "Calendar", "Grid", "same_spacing", "time_features"]

NUM_TIME_FEATURES = 4
_ALIKE = 1.12  # ratio of distances that count as equal: months have 28 to 31 days
_DAY, _WEEK = 86_400 * 10**9, 7 * 86_400 * 10**9  # ns
_YEAR = 365.2425 * _DAY
_MONDAY = pd.Timestamp("1970-01-05")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_EVERY_DAY, _BUSINESS = "1111111", "1111100"  # of numpy's business days
_SHORTEST, _LONGEST = 28, 31  # months, in days
# Clocks are put forward and back by these rules. Dates in UTC may follow the clock of one of these places.
_ZONES = ("America/New_York", "Europe/London", "Australia/Sydney", "Pacific/Auckland", "America/Santiago",
          "Asia/Jerusalem", "America/Sao_Paulo", "America/Mexico_City", "Africa/Cairo")  # fmt: skip
_FEWER = 0.97  # times of day on such a clock, as a ratio of those in the file
_OFTEN = 0.25  # how often rows come at a slot, as a ratio of the most frequent one; less often they are exceptions
_ENOUGH = 0.985  # share of slots with a row that is enough to look for no less simple grid
_FEWER_EMPTY = 0.6  # slots without a row that a less simple grid may have, as a ratio of those of a simpler one
# Shares of the time that regular steps cover: so few that the rows may have followed another calendar at first; and
# what that of the later rows alone must gain among these.
_CHANGED, _BETTER = 0.9, 0.3
_LATEST = 3  # rows that tell where equal steps go on; days that show when rows come in a day
_IN_PHASE = 0.9  # share of slots that have the time of day of the slot a season before
_NEAR = 1 / 50  # how far a season of equal steps may be from whole days, weeks or years, as a ratio of these


@dataclass(frozen=True)
class Grid:
    """The times at which rows come: slots in a cycle that repeats.

    Attributes:
        cycle: length of the cycle in ns, counted from a Monday; 0: a month.
        slots: times of the slots in the cycle in ns, ascending; of a month: days of :attr:`weekmask`, from 0, or from
            the end (-1: the last one). A shorter month has its last day instead.
        weekmask: the days of the week that count in a month, from Monday on.
        time: time of day in ns, if the cycle is a month.
        stride: slots from one row to the next.
        zone: time zone whose clock the rows follow; None: the clock of the file.
        loose: the rows come near the slots only.
    """

    cycle: int
    slots: list[int]
    weekmask: str = _EVERY_DAY
    time: int = 0
    stride: int = 1
    zone: str | None = None
    loose: bool = False

    def regular(self, dates: pd.DatetimeIndex) -> np.ndarray:
        """Whether each row but the first one is at a slot, :attr:`stride` slots after the row before it; (T - 1,)."""
        times = _nanoseconds(_on_clock(dates, self.zone))
        if self.loose and self.cycle:
            return _alike(np.diff(times), self.cycle)
        numbers = self._numbers(times)
        there: np.ndarray = self._times(numbers) == times
        found: np.ndarray = (np.diff(numbers) == self.stride) & (there | self.loose)[1:]
        if len(self.slots) == 1:  # equal steps, also after one that was not
            found |= np.diff(times) == self.cycle
        return found

    def filled(self, dates: pd.DatetimeIndex) -> float:
        """The share of slots between the first and the last date that have a row, or of rows that have a slot."""
        times = _nanoseconds(_on_clock(dates, self.zone))
        numbers = self._numbers(times)
        there = np.unique(numbers[self._times(numbers) == times])
        return len(there) / float(max((numbers[-1] - numbers[0]) / self.stride + 1, len(dates)))

    def ahead(self, last: pd.DatetimeIndex, count: int) -> pd.DatetimeIndex:
        """The ``count`` dates after ``last``, which has one date."""
        times, steps = _nanoseconds(_on_clock(last, self.zone)), np.arange(1, count + 1)
        if self.loose and self.cycle:
            times = times + steps * self.cycle
        else:
            times = self._times(self._numbers(times) + self.stride * steps)
        dates = pd.DatetimeIndex(_MONDAY + pd.to_timedelta(times, unit="ns"))
        if self.zone is None:
            return dates.tz_localize(last.tz)
        dates = dates.tz_localize(self.zone, ambiguous=np.ones(count, dtype=bool), nonexistent="shift_forward")
        return dates.tz_convert(last.tz or "UTC").tz_localize(None).tz_localize(last.tz)

    def _numbers(self, times: np.ndarray) -> np.ndarray:
        """The number of the slot that is nearest to each time."""
        slots = np.array(self.slots)
        if self.cycle:
            cycles, rest = np.divmod(times, self.cycle)
            around = np.concatenate([slots[-1:] - self.cycle, slots, slots[:1] + self.cycle])
            numbers: np.ndarray = cycles * len(slots) + np.searchsorted((around[1:] + around[:-1]) / 2, rest) - 1
            return numbers
        months = _months(times)
        there = np.stack([self._times(months * len(slots) + number) for number in range(len(slots))])
        nearest: np.ndarray = months * len(slots) + np.abs(there - times).argmin(axis=0)
        return nearest

    def _times(self, numbers: np.ndarray) -> np.ndarray:
        """The times of slots."""
        cycles, places = np.divmod(numbers, len(self.slots))
        slots = np.array(self.slots)[places]
        if self.cycle:
            times: np.ndarray = cycles * self.cycle + slots
            return times
        first = cycles.astype("datetime64[M]").astype("datetime64[D]")
        end = (cycles + 1).astype("datetime64[M]").astype("datetime64[D]") - 1
        forward = np.minimum(np.busday_offset(first, np.maximum(slots, 0), "forward", self.weekmask), end)
        backward = np.busday_offset(end, np.minimum(slots + 1, 0), "backward", self.weekmask)
        days = np.where(slots < 0, backward, forward) - np.datetime64(_MONDAY.date())
        return days.astype(np.int64) * _DAY + self.time

    @property
    def season(self) -> tuple[int, str]:
        """The rows of a season, and the days, weeks or year that they make up; 1 and no text: none is known.

        A season is a day for several rows a day, a week for daily rows, and a year for months and weeks.
        """
        count = len(self.slots)
        if not self.cycle:
            rows, rest = divmod(12 * count, self.stride)
            return (rows, "a year") if not rest and rows > 1 else (1, "")
        if count > 1:
            times = np.array(self.slots) % _DAY
            for rows in range(2, count if len(set(times)) > 1 else 0):
                if (times == np.roll(times, rows)).mean() >= _IN_PHASE:
                    return rows, "a day"
            return count, "a day" if self.cycle == _DAY else "a week"
        whole, name = next(
            (each for each in ((_DAY, "day"), (_WEEK, "week"), (_YEAR, "year")) if self.cycle < each[0]), (0, "")
        )
        for cycles in range(1, 13) if whole else ():
            rows = round(cycles * whole / self.cycle)
            if rows > 1 and abs(rows * self.cycle - cycles * whole) <= _NEAR * whole:
                return rows, f"a {name}" if cycles == 1 else f"{cycles} {name}s"
        return 1, ""

    @property
    def text(self) -> str:
        """When rows come, for messages: ``9 rows a day, 09:00 to 17:00, Monday to Friday``."""
        clock = "" if self.zone is None else f", by the clock of {self.zone}"
        if not self.cycle:
            apart = f"{self.stride} months" if self.stride > 1 else "1 month"
            if len(self.slots) > 1:
                return (
                    f"{len(self.slots)} rows a month, on days {', '.join(str(each + 1) for each in self.slots)}{clock}"
                )
            return f"{apart} apart, {self._day_of_month()}{clock}"
        if len(self.slots) == 1:
            return f"{'about ' * self.loose}{timedelta(microseconds=self.cycle // 1000)} apart{clock}"
        days, times = (np.unique(each) for each in np.divmod(np.array(self.slots), _DAY))
        text = (
            f"{len(times)} rows a day, {_clock(times[0])} to {_clock(times[-1])}" if len(times) > 1 else "1 row a day"
        )
        if self.cycle == _WEEK:
            if len(self.slots) != len(days) * len(times):
                text = f"{len(self.slots)} rows a week"
            together = len(days) > 2 and days[-1] - days[0] == len(days) - 1
            text += f", {_DAYS[days[0]]} to {_DAYS[days[-1]]}" if together else f", {', '.join(_DAYS[d] for d in days)}"
        return text + clock

    def _day_of_month(self) -> str:
        day, days = self.slots[0], _DAYS[self.weekmask.index("1")] if self.weekmask.count("1") == 1 else "business day"
        if self.weekmask != _EVERY_DAY:
            return f"on the last {days}" if day == -1 else f"on {days} {day + 1 if day >= 0 else day} of the month"
        varies = "on a day that varies; dates ahead are on " if self.loose else "on "
        last = " or the last one" if day >= _SHORTEST else ""
        return varies + ("the last day" if day == _LONGEST - 1 else f"day {day + 1}{last}")


@dataclass(frozen=True)
class Calendar:
    """When the rows of a series come.

    Attributes:
        step: the most frequent time between neighboring rows, as text: ``1:00:00``, ``7 days, 0:00:00``, ``1 month``.
        seconds: the median of these times; None if more than half of the rows depart from the grid.
        irregular: number of rows that depart from the grid.
        first: the first of these rows, from 0; None: there is none.
        grid: the times at which rows come; None: they follow none that exp knows.
        season: rows of a season; 1: not known.
        cycle: what a season is, as text; empty: not known.
        distance: the most frequent time between the recent rows, in ns.
    """

    step: str
    seconds: float | None
    irregular: int
    first: int | None
    grid: Grid | None
    season: int
    cycle: str
    distance: int

    @classmethod
    def of(cls, dates: pd.DatetimeIndex, recent: int = 3, known: Mapping[str, Any] | None = None) -> Calendar | None:
        """The calendar that dates follow: though some be missing, and if it has changed, that of the later ones.

        Args:
            dates: strictly increasing.
            recent: number of the last dates that must follow it, and from which alone it may be found.
            known: the :meth:`state_dict` of another calendar, which counts if the dates follow it: few rows do not show
                on which days there are none. None: there is none.

        Returns:
            None for fewer than two dates.
        """
        if len(dates) < 2:
            return None
        grid, part = _chosen(dates, max(recent, 3), None if known is None else Grid(**known))
        steps = np.diff(_nanoseconds(dates.tz_localize(None)))
        usual = _mode(steps)
        regular = steps == usual if grid is None else grid.regular(dates)
        irregular, first = int((~regular).sum()), int((~regular).argmax()) + 1 if not regular.all() else None
        seconds = None if 2 * irregular > len(steps) else float(np.median(steps)) / 1e9
        season, cycle = (1, "") if grid is None or not _is_full(grid, part) else grid.season
        distance = _mode(steps[-max(recent, 3) :])
        return cls(_step_text(grid, usual), seconds, irregular, first, grid, season, cycle, distance)

    def ahead(self, last: pd.DatetimeIndex, count: int) -> pd.DatetimeIndex:
        """The ``count`` dates after the last one of ``last``."""
        grid = self.grid or Grid(self.distance, [0], loose=True)
        return grid.ahead(last[-1:], count)

    def state_dict(self) -> dict[str, Any] | None:
        """The fields of the grid, which :meth:`of` takes; None: there is no grid."""
        return None if self.grid is None else asdict(self.grid)

    @property
    def text(self) -> str:
        """What was found, in one sentence."""
        if self.grid is None:
            apart = timedelta(microseconds=self.distance // 1000)
            return (
                f"the dates follow no calendar that exp knows; dates ahead are {apart} apart, as most of the last rows "
                "are; no season is known"
            )
        season = f"a season has {self.season} rows ({self.cycle})" if self.season > 1 else "no season is known"
        return f"{self.grid.text}; {season}"


def same_spacing(seconds: float, other: float) -> bool:
    """Whether two distances between rows, in seconds, count as the same frequency: months differ by a tenth."""
    return seconds < other * _ALIKE and other < seconds * _ALIKE


def _chosen(dates: pd.DatetimeIndex, recent: int, known: Grid | None) -> tuple[Grid | None, pd.DatetimeIndex]:
    """The grid of the dates, and those from which it was found: all, or the later half, quarter and so on."""
    if known is not None and _covered(known, dates) >= _CHANGED:
        return known, dates
    clock = _zone(dates)
    part = dates
    found: list[tuple[Grid, pd.DatetimeIndex]] = []
    while not found or len(part) > recent:
        part = part[-max(len(part) // 2, recent) :] if found else dates
        grid = _simplest(part, clock)
        found.append((grid, part))
        covered = _covered(grid, part)
        better = len(found) == 1 or covered > _covered(found[0][0], part) + _BETTER
        if covered >= _CHANGED and better and grid.regular(part)[-recent:].mean() >= 1 / 2:
            return grid, part
    # Then the dates are near a grid, not on it; or on one, with many rows missing; or on none.
    steps = np.diff(_nanoseconds(dates.tz_localize(None)))
    day, time = int(np.median(dates.day)) - 1, _mode(_time_of_day(dates))
    stride = max(_mode(np.diff(_months(_nanoseconds(dates.tz_localize(None))))), 1)
    for near in (Grid(int(np.median(steps)), [0], loose=True), Grid(0, [day], time=time, stride=stride, loose=True)):
        if near.regular(dates).mean() >= max(_CHANGED, found[0][0].regular(dates).mean() + 0.1):
            return near, dates
    for grid, part in (found[0], found[-1]):
        if min(grid.regular(part)[-each:].mean() for each in (recent, len(part))) >= 1 / 2:
            return grid, part
    return None, dates


def _simplest(dates: pd.DatetimeIndex, clock: str | None) -> Grid:
    """The simplest grid of those that leave few slots without a row.

    Rows that are missing by chance are missing on any grid; hours in which a shop is closed are not.
    """
    chosen, filled = None, -1.0
    for grid in _grids(dates, clock):
        share = grid.filled(dates)
        if chosen is None or 1.0 - share <= (1.0 - filled) * _FEWER_EMPTY:
            chosen, filled = grid, share
        if filled >= _ENOUGH:
            break
    assert chosen is not None
    return chosen


def _grids(dates: pd.DatetimeIndex, clock: str | None) -> Iterator[Grid]:
    """Grids that dates may follow: equal steps; times of a day, of a week; days of a month."""
    local = _on_clock(dates, clock)
    times = _nanoseconds(local)
    steps = np.diff(times)
    usual = _mode(steps)
    yield Grid(usual, [_mode(times[-_LATEST:] % usual)], zone=clock)
    for cycle, enough in ((_DAY, len(np.unique(times // _DAY)) >= _LATEST), (_WEEK, times[-1] - times[0] >= 2 * _WEEK)):
        slots = _frequent(times % cycle)
        if np.median(steps) < cycle and enough and slots:
            yield Grid(cycle, slots, zone=clock)
    if np.median(steps) < 5 * _DAY:
        return
    time = _mode(_time_of_day(local))
    stride = max(_mode(np.diff(_months(times))), 1)
    ends = np.where(local.is_month_end, _LONGEST, local.day) - 1
    for days in filter(None, (_frequent(ends), _frequent(np.asarray(local.day) - 1))):
        yield Grid(0, days, time=time, stride=stride if len(days) == 1 else 1, zone=clock)
    first = _months(times).astype("datetime64[M]").astype("datetime64[D]")
    end = (_months(times) + 1).astype("datetime64[M]").astype("datetime64[D]")
    day = times // _DAY * np.timedelta64(1, "D") + np.datetime64(_MONDAY.date())
    weekday = _mode(np.asarray(local.day_of_week))
    for mask in (_BUSINESS, "".join(str(int(number == weekday)) for number in range(7))):
        for number in (-1 - _mode(np.busday_count(day + 1, end, mask)), _mode(np.busday_count(first, day, mask))):
            yield Grid(0, [number], mask, time, stride, clock)


def _zone(dates: pd.DatetimeIndex) -> str | None:
    """The time zone on whose clock rows come at clearly fewer times of day than in the file; None: there is none."""
    fewest, found = _FEWER * len(np.unique(_time_of_day(dates))), None
    for zone in _ZONES if 1 < fewest / _FEWER <= len(dates) / 2 else ():
        try:
            count = len(np.unique(_time_of_day(_on_clock(dates, zone))))
        except KeyError:  # a machine without this zone
            continue
        if count <= fewest and (found is None or count < fewest):
            fewest, found = count, zone
    return found


def _on_clock(dates: pd.DatetimeIndex, zone: str | None) -> pd.DatetimeIndex:
    """Dates without a zone, as the clock of ``zone`` shows them, or as they are; those of the file may be in UTC."""
    if zone is not None:
        dates = (dates.tz_localize("UTC") if dates.tz is None else dates).tz_convert(zone)
    return dates.tz_localize(None)


def _covered(grid: Grid, dates: pd.DatetimeIndex) -> float:
    """The share of the time between the first and the last date that regular steps cover."""
    steps = np.diff(_nanoseconds(dates.tz_localize(None)))
    return float(steps[grid.regular(dates)].sum() / steps.sum())


def _is_full(grid: Grid, dates: pd.DatetimeIndex) -> bool:
    """Whether rows in equal steps come at all times of the day, unlike those of sessions that follow no rule."""
    times = _nanoseconds(_on_clock(dates, grid.zone))
    if len(grid.slots) > 1 or not 0 < grid.cycle < _DAY or times[-1] - times[0] < _DAY:
        return True
    return bool(len(np.unique(times % _DAY // grid.cycle)) * grid.cycle >= (1 - 1 / 10) * _DAY)


def _nanoseconds(dates: pd.DatetimeIndex) -> np.ndarray:
    """Time since a Monday, int64 (T,)."""
    return np.asarray((dates - _MONDAY) // pd.Timedelta(1, "ns"), dtype=np.int64)


def _time_of_day(dates: pd.DatetimeIndex) -> np.ndarray:
    """In ns, int64 (T,)."""
    times: np.ndarray = _nanoseconds(dates.tz_localize(None)) % _DAY
    return times


def _months(times: np.ndarray) -> np.ndarray:
    """The months of times, counted from January 1970, int64 (T,)."""
    days = times // _DAY * np.timedelta64(1, "D") + np.datetime64(_MONDAY.date())
    return days.astype("datetime64[M]").astype(np.int64)


def _mode(values: Any) -> int:
    """The most frequent value; of several the smallest."""
    each, counts = np.unique(values, return_counts=True)
    return int(each[counts.argmax()])


def _frequent(values: Any) -> list[int]:
    """The values that are not much less frequent than the most frequent one, ascending; none if few come again."""
    each, counts = np.unique(values, return_counts=True)
    found: list[int] = each[counts >= _OFTEN * counts.max()].tolist()
    return found if len(values) > 2 * len(found) else []


def _alike(steps: np.ndarray, usual: int) -> np.ndarray:
    found: np.ndarray = (steps < usual * _ALIKE) & (usual < steps * _ALIKE)
    return found


def _clock(time: int) -> str:
    return f"{pd.Timestamp(0) + pd.Timedelta(int(time), 'ns'):%H:%M}"


def _step_text(grid: Grid | None, usual: int) -> str:
    """The usual time between rows, as text."""
    if grid is not None and not grid.cycle and len(grid.slots) == 1:
        return f"{grid.stride} month{'s' * (grid.stride > 1)}"
    if grid is not None and grid.cycle == _WEEK and len({each % _DAY for each in grid.slots}) == 1 < len(grid.slots):
        return "1 business day"
    return str(timedelta(microseconds=(grid.cycle if grid is not None and grid.loose else usual) // 1000))


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
