"""The calendar of a series: when its rows come, how many make a season, and the dates ahead; and time features."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Iterator, Mapping

import numpy as np
import pandas as pd

TIME_FEATURES = {"hour": (0, 23), "day_of_week": (0, 6), "day": (1, 31), "day_of_year": (1, 366)}
"""The parts of a date that models get, by their names in pandas, with the lowest and the highest value."""
_SPACING_TOLERANCE = 1.12  # ratio of distances that count as equal: months have 28 to 31 days
_DAY, _WEEK = 86_400 * 10**9, 7 * 86_400 * 10**9  # ns
_PERIODS = ((_DAY, "day"), (_WEEK, "week"), (365.2425 * _DAY, "year"))
_MONDAY = pd.Timestamp("1970-01-05")
_FIRST_DAY = np.datetime64(_MONDAY.date())
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_EVERY_DAY, _BUSINESS = "1111111", "1111100"  # of numpy's business days
_SHORTEST, _LONGEST = 28, 31  # months, in days
# One zone for each rule of daylight saving time. Dates in UTC may follow the clock of one of these zones.
_ZONES = ("America/New_York", "Europe/London", "Australia/Sydney", "Pacific/Auckland", "America/Santiago",
          "Asia/Jerusalem", "America/Sao_Paulo", "America/Mexico_City", "Africa/Cairo")  # fmt: skip
_CLOCK_RATIO = 0.97  # number of times of day on such a clock, relative to that in the file
_FREQUENT_RATIO = 0.25  # how often rows come at a slot, relative to the most frequent one; rarer slots are exceptions
_FULL_RATIO = 0.985  # fraction of slots with a row from which on no more complex grid is tried
_EMPTY_RATIO = 0.6  # slots without a row that a more complex grid may have, relative to those of the simpler one
# Fractions of the time that regular steps cover: below the first one, the rows may have followed another calendar in
# the beginning; the second one is what the later rows alone must gain to count.
_MIN_COVERAGE, _MIN_GAIN = 0.9, 0.3
_NUM_LATEST = 3  # last rows that give the phase of equal steps; days that are needed for the times of a day
_PHASE_RATIO = 0.9  # fraction of slots that have the time of day of the slot a season before
_PERIOD_TOLERANCE = 1 / 50  # relative distance of a season of equal steps from whole days, weeks or years


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

    def is_regular(self, dates: pd.DatetimeIndex) -> np.ndarray:
        """Whether each row but the first one is at a slot, :attr:`stride` slots after the row before it; (T - 1,)."""
        times = _local_times(dates, self.zone)
        if self.loose and self.cycle:
            return same_spacing(np.diff(times), self.cycle)
        slots = self._slot_indices(times)
        at_slot: np.ndarray = self._slot_times(slots) == times
        regular: np.ndarray = (np.diff(slots) == self.stride) & (at_slot | self.loose)[1:]
        if len(self.slots) == 1:  # equal steps, also after one that was not
            regular |= np.diff(times) == self.cycle
        return regular

    def filled_ratio(self, dates: pd.DatetimeIndex) -> float:
        """The fraction of slots between the first and the last date that have a row, or of rows that have a slot."""
        times = _local_times(dates, self.zone)
        slots = self._slot_indices(times)
        filled = np.unique(slots[self._slot_times(slots) == times])
        return len(filled) / float(max((slots[-1] - slots[0]) / self.stride + 1, len(dates)))

    def future_dates(self, last: pd.DatetimeIndex, count: int) -> pd.DatetimeIndex:
        """The ``count`` dates after ``last``, which has one date."""
        times, steps = _local_times(last, self.zone), np.arange(1, count + 1)
        if self.loose and self.cycle:
            times = times + steps * self.cycle
        else:
            times = self._slot_times(self._slot_indices(times) + self.stride * steps)
        dates = pd.DatetimeIndex(_MONDAY + pd.to_timedelta(times, unit="ns"))
        if self.zone is None:
            return dates.tz_localize(last.tz)
        dates = dates.tz_localize(self.zone, ambiguous=np.ones(count, dtype=bool), nonexistent="shift_forward")
        return dates.tz_convert(last.tz or "UTC").tz_localize(None).tz_localize(last.tz)

    def slots_of(self, dates: pd.DatetimeIndex) -> np.ndarray:
        """The number of the slot that is nearest to each date, int64 (T,)."""
        return self._slot_indices(_local_times(dates, self.zone))

    def _slot_indices(self, times: np.ndarray) -> np.ndarray:
        """The number of the slot that is nearest to each time."""
        slots = np.array(self.slots)
        if self.cycle:
            cycles, rest = np.divmod(times, self.cycle)
            around = np.concatenate([slots[-1:] - self.cycle, slots, slots[:1] + self.cycle])
            nearest = np.searchsorted((around[1:] + around[:-1]) / 2, rest) - 1
        else:
            cycles = _months(times)
            slot_times = np.stack([self._slot_times(cycles * len(slots) + number) for number in range(len(slots))])
            nearest = np.abs(slot_times - times).argmin(axis=0)
        return np.asarray(cycles * len(slots) + nearest)

    def _slot_times(self, numbers: np.ndarray) -> np.ndarray:
        """The times of slots."""
        cycles, positions = np.divmod(numbers, len(self.slots))
        slots = np.array(self.slots)[positions]
        if self.cycle:
            return np.asarray(cycles * self.cycle + slots)
        first, end = _month_ends(cycles)
        forward = np.minimum(np.busday_offset(first, np.maximum(slots, 0), "forward", self.weekmask), end)
        backward = np.busday_offset(end, np.minimum(slots + 1, 0), "backward", self.weekmask)
        return (np.where(slots < 0, backward, forward) - _FIRST_DAY).astype(np.int64) * _DAY + self.time

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
                if (times == np.roll(times, rows)).mean() >= _PHASE_RATIO:
                    return rows, "a day"
            return count, "a day" if self.cycle == _DAY else "a week"
        period, name = next((pair for pair in _PERIODS if self.cycle < pair[0]), (0, ""))
        for cycles in range(1, 13) if period else ():
            rows = round(cycles * period / self.cycle)
            if rows > 1 and abs(rows * self.cycle - cycles * period) <= _PERIOD_TOLERANCE * period:
                return rows, f"a {name}" if cycles == 1 else f"{cycles} {name}s"
        return 1, ""

    @property
    def text(self) -> str:
        """When rows come, for messages: ``9 rows a day, 09:00 to 17:00, Monday to Friday``."""
        clock = "" if self.zone is None else f", by the clock of {self.zone}"
        if not self.cycle:
            step = f"{self.stride} months" if self.stride > 1 else "1 month"
            if len(self.slots) > 1:
                days = ", ".join(str(day + 1) for day in self.slots)
                return f"{len(self.slots)} rows a month, on days {days}{clock}"
            return f"{step} apart, {self._day_of_month()}{clock}"
        if len(self.slots) == 1:
            return f"{'about ' * self.loose}{timedelta(microseconds=self.cycle // 1000)} apart{clock}"
        weekdays, times = map(np.unique, np.divmod(np.array(self.slots), _DAY))
        text = "1 row a day"
        if len(times) > 1:
            text = f"{len(times)} rows a day, {_format_time(times[0])} to {_format_time(times[-1])}"
        if self.cycle == _WEEK:
            if len(self.slots) != len(weekdays) * len(times):
                text = f"{len(self.slots)} rows a week"
            consecutive = len(weekdays) > 2 and weekdays[-1] - weekdays[0] == len(weekdays) - 1
            names = [_WEEKDAYS[day] for day in weekdays]
            text += f", {names[0]} to {names[-1]}" if consecutive else f", {', '.join(names)}"
        return text + clock

    def _day_of_month(self) -> str:
        day = self.slots[0]
        if self.weekmask != _EVERY_DAY:
            kind = "business day" if self.weekmask == _BUSINESS else _WEEKDAYS[self.weekmask.index("1")]
            return f"on the last {kind}" if day == -1 else f"on {kind} {day + 1 if day >= 0 else day} of the month"
        varies = "on a day that varies; dates ahead are on " if self.loose else "on "
        last = " or the last one" if day >= _SHORTEST else ""
        return varies + ("the last day" if day == _LONGEST - 1 else f"day {day + 1}{last}")


@dataclass(frozen=True)
class Calendar:
    """When the rows of a series come.

    Attributes:
        step: the usual time between neighboring rows, as text: ``1:00:00``, ``7 days, 0:00:00``, ``1 month``.
        seconds: the median of these times; None if more than half of the rows depart from the grid.
        irregular: number of rows that depart from the grid.
        first: the first of these rows, from 0; None: there is none.
        grid: the times at which rows come; None: they follow none that exp knows.
        season: rows of a season; 1: not known.
        cycle: what a season is, as text; empty: not known.
        distance: the usual time between the recent rows, in ns.
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
    def of(cls, dates: pd.DatetimeIndex, recent: int = 3, saved: Mapping[str, Any] | None = None) -> Calendar | None:
        """The calendar that dates follow, also if some are missing; if it has changed, that of the later dates.

        Args:
            dates: strictly increasing.
            recent: number of the last dates that must follow it; they may be the only ones.
            saved: the :meth:`state_dict` of another calendar. It is taken if the dates follow it, since few rows do not
                show on which days there are none. None: there is none.

        Returns:
            None for fewer than two dates.
        """
        if len(dates) < 2:
            return None
        grid, followed = _choose_grid(dates, max(recent, 3), None if saved is None else Grid(**saved))
        steps = np.diff(_local_times(dates))
        step = _usual_step(steps)
        regular = steps == step if grid is None else grid.is_regular(dates)
        irregular, first = int((~regular).sum()), int((~regular).argmax()) + 1 if not regular.all() else None
        seconds = None if 2 * irregular > len(steps) else float(np.median(steps)) / 1e9
        season, cycle = (1, "") if grid is None or not _covers_whole_day(grid, followed) else grid.season
        distance = _usual_step(steps[-max(recent, 3) :])
        return cls(_format_step(grid, step), seconds, irregular, first, grid, season, cycle, distance)

    def future_dates(self, last: pd.DatetimeIndex, count: int) -> pd.DatetimeIndex:
        """The ``count`` dates after the last one of ``last``."""
        grid = self.grid or Grid(self.distance, [0], loose=True)
        return grid.future_dates(last[-1:], count)

    def state_dict(self) -> dict[str, Any] | None:
        """The fields of the grid, which :meth:`of` takes; None: there is no grid."""
        return None if self.grid is None else asdict(self.grid)

    @property
    def text(self) -> str:
        """The grid and the season, in one sentence."""
        if self.grid is None:
            step = timedelta(microseconds=self.distance // 1000)
            return (
                f"the dates follow no calendar that exp knows; dates ahead are {step} apart, the usual distance of the "
                "last rows; no season is known"
            )
        season = f"a season has {self.season} rows ({self.cycle})" if self.season > 1 else "no season is known"
        return f"{self.grid.text}; {season}"


def same_spacing(distance: Any, other: Any) -> Any:
    """Whether two distances between rows count as the same frequency: months differ by a tenth. Also of arrays."""
    return (distance < other * _SPACING_TOLERANCE) & (other < distance * _SPACING_TOLERANCE)


def _choose_grid(dates: pd.DatetimeIndex, recent: int, saved: Grid | None) -> tuple[Grid | None, pd.DatetimeIndex]:
    """The grid of the dates, and the dates that it was inferred from: all, or the last half, quarter and so on."""
    if saved is not None and _coverage(saved, dates) >= _MIN_COVERAGE:
        return saved, dates
    clock = _infer_zone(dates)
    part = dates
    candidates: list[tuple[Grid, pd.DatetimeIndex]] = []
    while not candidates or len(part) > recent:
        part = part[-max(len(part) // 2, recent) :] if candidates else dates
        grid = _simplest_grid(part, clock)
        candidates.append((grid, part))
        covered = _coverage(grid, part)
        better = len(candidates) == 1 or covered > _coverage(candidates[0][0], part) + _MIN_GAIN
        if covered >= _MIN_COVERAGE and better and grid.is_regular(part)[-recent:].mean() >= 1 / 2:
            return grid, part
    # The dates are near a grid, not on it; or on a grid, with many rows missing; or on none.
    times = _local_times(dates)
    day, time = int(np.median(dates.day)) - 1, _most_frequent(times % _DAY)
    stride = max(_most_frequent(np.diff(_months(times))), 1)
    even = Grid(int(np.median(np.diff(times))), [0], loose=True)
    for loose_grid in (even, Grid(0, [day], time=time, stride=stride, loose=True)):
        if loose_grid.is_regular(dates).mean() >= max(_MIN_COVERAGE, candidates[0][0].is_regular(dates).mean() + 0.1):
            return loose_grid, dates
    for grid, part in (candidates[0], candidates[-1]):
        regular = grid.is_regular(part)
        if min(regular[-recent:].mean(), regular.mean()) >= 1 / 2:
            return grid, part
    return None, dates


def _simplest_grid(dates: pd.DatetimeIndex, clock: str | None) -> Grid:
    """The simplest grid among those with few slots without a row.

    Rows that are missing by chance are missing on any grid; hours in which a shop is closed are not.
    """
    candidates = _candidate_grids(dates, clock)
    best = next(candidates)
    best_ratio = best.filled_ratio(dates)
    while best_ratio < _FULL_RATIO:
        grid = next(candidates, None)
        if grid is None:
            break
        ratio = grid.filled_ratio(dates)
        if 1.0 - ratio <= (1.0 - best_ratio) * _EMPTY_RATIO:
            best, best_ratio = grid, ratio
    return best


def _candidate_grids(dates: pd.DatetimeIndex, clock: str | None) -> Iterator[Grid]:
    """Grids that dates may follow: equal steps; times of a day, of a week; days of a month."""
    times = _local_times(dates, clock)
    steps = np.diff(times)
    step = _usual_step(steps)
    yield Grid(step, [_most_frequent(times[-_NUM_LATEST:] % step)], zone=clock)
    spans_days, spans_weeks = len(np.unique(times // _DAY)) >= _NUM_LATEST, times[-1] - times[0] >= 2 * _WEEK
    for cycle, enough in ((_DAY, spans_days), (_WEEK, spans_weeks)):
        slots = _frequent_values(times % cycle)
        if np.median(steps) < cycle and enough and slots:
            yield Grid(cycle, slots, zone=clock)
    if np.median(steps) < 5 * _DAY:
        return
    time, stride = _most_frequent(times % _DAY), max(_most_frequent(np.diff(_months(times))), 1)
    days, (first, end) = _days(times), _month_ends(_months(times))
    numbers = (days - first).astype(np.int64)
    for slots in filter(None, map(_frequent_values, (np.where(days == end, _LONGEST - 1, numbers), numbers))):
        yield Grid(0, slots, time=time, stride=stride if len(slots) == 1 else 1, zone=clock)
    weekday = _most_frequent(times // _DAY % 7)
    for mask in (_BUSINESS, "".join(str(int(number == weekday)) for number in range(7))):
        last, before = np.busday_count(days + 1, end + 1, mask), np.busday_count(first, days, mask)
        for number in (-1 - _most_frequent(last), _most_frequent(before)):
            yield Grid(0, [number], mask, time, stride, clock)


def _infer_zone(dates: pd.DatetimeIndex) -> str | None:
    """The time zone on whose clock rows come at clearly fewer times of day than in the file; None: there is none."""
    in_file = len(np.unique(_local_times(dates) % _DAY))
    counts = {}
    for zone in _ZONES if 1 < in_file <= len(dates) / 2 else ():
        with contextlib.suppress(KeyError):  # a machine without this zone
            counts[zone] = len(np.unique(_local_times(dates, zone) % _DAY))
    best_zone = min(counts, key=lambda zone: counts[zone], default=None)
    return best_zone if best_zone is not None and counts[best_zone] <= _CLOCK_RATIO * in_file else None


def _local_times(dates: pd.DatetimeIndex, zone: str | None = None) -> np.ndarray:
    """Time since a Monday in ns, int64 (T,), as the clock of ``zone`` shows it, or as it is in the file (maybe UTC)."""
    if zone is not None:
        dates = (dates.tz_localize("UTC") if dates.tz is None else dates).tz_convert(zone)
    return np.asarray((dates.tz_localize(None) - _MONDAY) // pd.Timedelta(1, "ns"), dtype=np.int64)


def _coverage(grid: Grid, dates: pd.DatetimeIndex) -> float:
    """The fraction of the time between the first and the last date that regular steps cover."""
    steps = np.diff(_local_times(dates))
    return float(steps[grid.is_regular(dates)].sum() / steps.sum())


def _covers_whole_day(grid: Grid, dates: pd.DatetimeIndex) -> bool:
    """Whether rows in equal steps come at all times of the day; those of irregular sessions do not."""
    times = _local_times(dates, grid.zone)
    if len(grid.slots) > 1 or not 0 < grid.cycle < _DAY or times[-1] - times[0] < _DAY:
        return True
    return bool(len(np.unique(times % _DAY // grid.cycle)) * grid.cycle >= (1 - 1 / 10) * _DAY)


def _days(times: np.ndarray) -> np.ndarray:
    """The days of times, datetime64 (T,)."""
    return np.asarray(times // _DAY * np.timedelta64(1, "D") + _FIRST_DAY)


def _months(times: np.ndarray) -> np.ndarray:
    """The months of times, counted from January 1970, int64 (T,)."""
    return _days(times).astype("datetime64[M]").astype(np.int64)


def _month_ends(months: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last days of months, datetime64 (T,) each."""
    first, end = ((months + ahead).astype("datetime64[M]").astype("datetime64[D]") for ahead in (0, 1))
    return first, end - 1


def _most_frequent(values: Any) -> int:
    """The most frequent value; of several the smallest."""
    unique, counts = np.unique(values, return_counts=True)
    return int(unique[counts.argmax()])


def _usual_step(steps: np.ndarray) -> int:
    """The most frequent distance; the median if none comes twice."""
    return int(np.median(steps)) if len(np.unique(steps)) == len(steps) else _most_frequent(steps)


def _frequent_values(values: Any) -> list[int]:
    """The values that are not much less frequent than the most frequent one, ascending; none if few come again."""
    unique, counts = np.unique(values, return_counts=True)
    frequent: list[int] = unique[counts >= _FREQUENT_RATIO * counts.max()].tolist()
    return frequent if len(values) > 2 * len(frequent) else []


def _format_time(time: int) -> str:
    return f"{pd.Timestamp(0) + pd.Timedelta(int(time), 'ns'):%H:%M}"


def _format_step(grid: Grid | None, step: int) -> str:
    """The usual time between rows, as text."""
    if grid is not None and not grid.cycle and len(grid.slots) == 1:
        return f"{grid.stride} month{'s' * (grid.stride > 1)}"
    if grid is not None and grid.cycle == _WEEK and len({slot % _DAY for slot in grid.slots}) == 1 < len(grid.slots):
        return "1 business day"
    return str(timedelta(microseconds=(grid.cycle if grid is not None and grid.loose else step) // 1000))


def time_features(dates: pd.DatetimeIndex | None, num_rows: int) -> np.ndarray:
    """Hour of the day, day of the week, of the month and of the year, each scaled to [-0.5, 0.5].

    The convention of GluonTS (Alexandrov et al., arXiv 1906.05264) for hourly data. Published benchmarks use these
    four for every data set, also for rows every few minutes.

    Args:
        dates: of the rows; None: not known.
        num_rows: number of rows (T); if there are ``dates``, their length.

    Returns:
        float32 (T, 4); zeros where there are no dates.
    """
    if dates is None:
        return np.zeros((num_rows, len(TIME_FEATURES)), dtype=np.float32)
    features = [(getattr(dates, part) - low) / (high - low) - 0.5 for part, (low, high) in TIME_FEATURES.items()]
    return np.stack([np.asarray(feature) for feature in features], axis=1).astype(np.float32)
