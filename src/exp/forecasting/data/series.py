"""Read a multivariate series from disk; errors name the row and column of the file.

The dates are one column in one format, increasing, and evenly spaced. Statistics of the training rows are saved with
the weights (:class:`Contract`), and compared with new rows.
"""

from __future__ import annotations

import abc
import csv
import functools
import re
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd  # here, so that the fork server imports it once, not each worker

from exp.config.resolve import create
from exp.data.places import of_file, shortened
from exp.errors import DataError
from exp.forecasting.data.calendar import Calendar
from exp.forecasting.data.preflight import SAVE, Columns, Header, choose, layout, opened, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from exp.data.places import Fingerprint
    from exp.forecasting.config import ForecastingDataConfig

__all__ = ["Column", "Contract", "Dates", "Series", "contract_of", "parse_dates", "read_series", "warn_of_outliers",
           "with_computed"]  # fmt: skip

_LARGEST = np.finfo(np.float32).max
# Formats of a day ("-" stands for the separator of the column) and of a time of day.
_DAYS = ("%Y-%m-%d", "%d-%m-%Y", "%m-%d-%Y", "%d-%m-%y", "%m-%d-%y", "%y-%m-%d", "%d-%b-%Y", "%d-%b-%y", "%y-%b-%d",
         "%Y-%m", "%Y%m%d")  # fmt: skip
_TIMES = [time + zone for time in ("%H", "%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I %p", "%I:%M %p", "%I:%M:%S %p")
          for zone in ("", "%z", " %z")]  # fmt: skip
# Formats of plain numbers, by number of digits: dates that begin with 19 or 20, or time since 1970.
_DIGITS = {8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
_SINCE_1970 = {10: "%s", 13: "%s ms", 16: "%s us", 19: "%s ns"}


class Column(abc.ABC):
    """A column that is computed from the rows of a file.

    ``data.derived_columns={<name>: {_target_: <path of a subclass>, <arguments of its constructor>}}`` adds it to the
    columns of the file, or replaces the one of that name.
    """

    @abc.abstractmethod
    def values(self, rows: pd.DataFrame) -> Any:
        """The values of all rows, (T,): numbers, or true and false; NaN is an empty cell.

        Args:
            rows: the cells of the file by the names of its columns: numbers if all cells of a column are, else text.
                The index is the dates, if there are any.
        """


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


@dataclass(frozen=True, eq=False)
class Series:
    """A multivariate series.

    Attributes:
        path: of the file.
        header: of the file; None for ``.npz``.
        columns: the C columns that are read.
        values: float64 (T, C), oldest row first; within the range of float32, or NaN for an empty cell that is allowed.
        dates: of the rows.
        cells: all cells of the file, from which covariates are computed; None: none are.
    """

    path: Path
    header: Header | None
    columns: Columns
    values: np.ndarray
    dates: Dates
    cells: pd.DataFrame | None = None

    def place(self, row: int, channel: int) -> str:
        """``<path> row 7, column load: '3.5'``: a cell by its position in :attr:`values`, from 0."""
        name = self.columns.names[channel]
        if self.header is None or name not in self.header.names:
            return f"{self.path} data[{row}, {name}]: {self.values[row, channel]:.6g}"
        return self.header.place(row, name)


def read_series(path: Path, config: ForecastingDataConfig, of_weights: Contract | None = None) -> Series:
    """Read a file.

    Args:
        path: comma-separated UTF-8 text, plain or ``.gz``, one row per time step; or ``.npz`` with an array ``data`` of
            shape (rows, series) or (rows, series, measures), the format of PEMS. Only the first measure is read (the
            traffic flow, as in the loaders of SCINet, arXiv 2106.09305, and iTransformer, arXiv 2310.06625).
        config: the keys of ``data``.
        of_weights: has the format of the dates if several fit (see :func:`parse_dates`), and their calendar if they
            follow it; None: there are no weights.

    Raises:
        DataError: the file is unreadable, empty or ragged; its first row does not fit (see
            :func:`exp.forecasting.data.preflight.read_header`); a cell is not a date, or not a finite number that
            float32 can represent; dates are not strictly increasing, or can be read in several formats. Messages number
            rows as lines of the file, from 1.
    """
    header, dates = None, Dates()
    if path.suffix == ".npz":
        table = _read_array(path, config)
    else:
        header = read_header(path, config)
        table = _read_table(path, header)
        if header.date is not None:
            dates = read_dates(table, header, config, of_weights)
            table = table.drop(columns=header.date).set_index(dates.index)
    cells = table if not set(config.derived_columns).isdisjoint(config.future_covariates or ()) else None
    table = with_computed(table, config)
    columns = choose(path, list(table), config)
    values, empty = _to_numbers(table[columns.names])
    series = Series(path, header, columns, values, dates, cells)
    bad, do = ~(np.abs(values) <= _LARGEST), "write it with digits and a point"
    if config.missing == "mask":
        bad &= ~empty
    elif bad.any() and empty.flat[int(bad.argmax())]:
        do = "fill the gap, leave the row out, or allow empty cells (data.missing=mask)"
    if bad.any():
        row, channel = divmod(int(bad.argmax()), bad.shape[1])
        if bad[:, channel].all() and len(bad) > 1:
            do += "; so is the whole column: leave it out if it is no series (data.inputs)"
        raise DataError(f"{series.place(row, channel)} is not a finite number that float32 carries; {do}")
    return series


def with_computed(table: pd.DataFrame, config: ForecastingDataConfig) -> pd.DataFrame:
    """A copy of cells with the columns that are computed from them (``data.derived_columns``).

    Raises:
        DataError: a column has another number of values than the table has rows.
    """
    table = table.copy() if config.derived_columns else table
    for name, keys in config.derived_columns.items():
        computed = np.asarray(create(keys, Column, f"data.derived_columns.{name}").values(table), dtype=np.float64)
        if computed.shape != (len(table),):
            raise DataError(
                f"data.derived_columns.{name} has {computed.shape} values for {len(table)} rows; return one for each"
            )
        table[name] = computed
    return table


def _read_table(path: Path, header: Header) -> pd.DataFrame:
    """All rows below the header, without blank lines at the end."""
    try:
        table = pd.read_csv(
            path,
            header=None,
            skiprows=header.begin,
            names=header.names,
            skip_blank_lines=False,  # a row is a line of the file
            # Dates as text: plain numbers would later be read as nanoseconds since 1970.
            dtype=None if header.date is None else {header.date: str},
            low_memory=False,
        )
    except pd.errors.EmptyDataError:
        table = pd.DataFrame()
    except (ValueError, OSError, EOFError, zlib.error) as error:
        # pandas counts lines from 1, but the rows of open quotes from 0.
        reason = re.sub(r"(?<=starting at row )\d+", lambda row: str(int(row[0]) + 1), str(error).strip())
        raise DataError(f"{path} cannot be read as comma-separated UTF-8: {reason}; {SAVE}") from error
    while len(table) and all(str(cell).strip() in ("", "nan") for cell in table.iloc[-1]):
        table = table[:-1].copy()
    if not len(table):
        raise DataError(f"{path} is empty below its header; expected one row per time step")
    if table.iloc[:, -1].isna().any():  # pandas adds the cells that a row lacks, as empty ones
        with opened(path) as file:
            reader, width = csv.reader(file), len(header.names)
            for cells in reader:
                row = reader.line_num
                if row > header.begin and 0 < len(cells) < width:
                    raise DataError(
                        f"{path} row {row} has {len(cells)} of {width} cells; every row needs one per column"
                    )
    return table


def _to_numbers(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """float64 (T, C), NaN where a cell is no number; and bool (T, C), where it is empty."""
    empty = np.array(table.isna())
    numbers = {}
    for place, column in enumerate(table.columns):
        numbers[place] = table[column]
        if numbers[place].dtype.kind not in "iuf":
            cells = table[column].astype(str).str.strip()
            empty[:, place] |= cells.str.lower().isin(["", "nan"]).to_numpy()
            numbers[place] = pd.to_numeric(cells, errors="coerce")
    return pd.DataFrame(numbers).to_numpy(dtype=np.float64), empty


def _read_array(path: Path, config: ForecastingDataConfig) -> pd.DataFrame:
    """The array ``data`` of an ``.npz`` file, with the numbers of its series as names."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            values: np.ndarray = archive["data"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; expected: {layout(config)}") from error
    if values.ndim not in (2, 3) or not values.size or values.dtype.kind not in "fiu":
        raise DataError(f"{path}: its array `data` is {values.shape}, {values.dtype}; expected: {layout(config)}")
    table = pd.DataFrame(values if values.ndim == 2 else values[..., 0])
    return table.rename(columns=str)


def read_dates(
    table: pd.DataFrame, header: Header, config: ForecastingDataConfig, of_weights: Contract | None
) -> Dates:
    """Read the column of dates of a file.

    Args:
        table: cells of the file.
        header: of the file, with a column of dates.
        config: ``date_format``, ``allow_gaps`` and ``lookback`` are read.
        of_weights: see :func:`read_series`.

    Raises:
        DataError: a cell is no date, dates do not increase, or some are irregular and ``allow_gaps`` is false; or see
            :func:`parse_dates`.
    """
    place = functools.partial(header.place, column=str(header.date))
    usual, known = (of_weights.date_format, of_weights.calendar) if of_weights else (None, None)
    dates, form = parse_dates(table[header.date].fillna("").str.strip(), config.date_format, usual, place)
    backwards = dates[1:] <= dates[:-1]
    if backwards.any():
        row = int(backwards.argmax()) + 1
        kind = "repeats" if dates[row] == dates[row - 1] else "is earlier than"
        raise DataError(f"{place(row)} {kind} the date before it; {_order(table, header.date, dates)}")
    calendar = Calendar.of(dates, config.lookback, known)
    if calendar is None or calendar.first is None:
        return Dates(dates, form, calendar)
    distance = (dates[calendar.first] - dates[calendar.first - 1]).to_pytimedelta()
    usual = f"are {calendar.step} apart" if calendar.grid is None else f"follow their calendar ({calendar.grid.text})"
    what = (
        f"{place(calendar.first)} is {distance} after the date before it, while most rows {usual}; "
        f"{calendar.irregular} of {len(dates) - 1} steps depart from that"
    )
    if not config.allow_gaps:
        raise DataError(f"{what}; fill the gaps, or allow them with data.allow_gaps=true")
    evenly = "a window takes rows as if they were evenly spaced, data.allow_gaps=false refuses this"
    return Dates(dates, form, calendar, [f"{what}; {evenly}"])


def _order(table: pd.DataFrame, date: str | None, dates: pd.DatetimeIndex) -> str:
    """How to correct dates that do not increase: pivot a long table (dates repeat once per series), else sort."""
    cells = table.drop(columns=date)
    for key in cells if 4 * dates.nunique() <= 3 * len(dates) else ():
        few = 1 < cells[key].nunique() <= len(cells) // 2
        if few and not pd.DataFrame({0: cells[key].astype(str), 1: dates}).duplicated().any():
            value = next((name for name in cells if name != key), "<value>")
            return (
                f"this is a long table, whose rows are of the series that {key} names; write a wide one, with a "
                f"column for each series: pandas' table.pivot(index={date!r}, columns={key!r}, values={value!r})"
            )
    return "sort the rows by date and keep one per date, or, where the clock was put back, write times in UTC"


def parse_dates(
    column: pd.Series, date_format: str | None, usual: str | None, place: Callable[[int], str]
) -> tuple[pd.DatetimeIndex, str]:
    """Parse a column of dates in one format.

    If no format is given, the first cell gives the candidates, and the whole column decides between them: 01/12/2019 is
    December 1 if some other date cannot be read with the month first. Numbers of 10, 13, 16 and 19 digits are time
    since 1970 (UTC) in s, ms, us and ns.

    Args:
        column: text, without blanks at its ends.
        date_format: as for strftime; ``%s``: seconds since 1970. None: inferred from the column.
        usual: the format of the training rows, used if several formats fit; None: not known.
        place: returns the name of a row's cell, for messages; rows count from 0.

    Returns:
        The dates in the order of the column, with the cells' offset from UTC; and their format.

    Raises:
        DataError: a cell is no date, or not in the format of the others; the offset from UTC changes; or several
            formats fit the whole column and give different dates.
    """
    formats = list(_candidates(column.iloc[0])) if date_format is None else [date_format]
    if not formats:
        raise DataError(f"{place(0)} is not a date; write dates like 2016-07-01 00:00:00, or set data.date_format")
    if formats[0].endswith("%z"):
        _check_offsets(column, place)
    try:
        found = {each: _parsed(column, each) for each in formats}
    except (ValueError, TypeError) as error:  # a directive that does not exist
        raise DataError(f"{place(0)} cannot be read with data.date_format={date_format}: {error}") from error
    whole = {each: dates for each, dates in found.items() if not dates.hasnans}
    if not whole:
        # Report the first bad cell of the format that fits the most rows.
        row = max(int(dates.isna().argmax()) for dates in found.values())
        like = f"the format of the first one, {column.iloc[0]!r}" if date_format is None else date_format
        raise DataError(
            f"{place(row)} is not a date in {like}; write all in one format, or set data.date_format as for strftime: "
            "%d/%m/%Y %H:%M"
        )
    chosen = usual if usual in whole else next(iter(whole))
    for other, dates in whole.items():
        unlike = np.asarray(dates != whole[chosen])
        if unlike.any() and chosen != usual:
            raise DataError(
                f"{place(int(unlike.argmax()))} can be read as {chosen} and as {other}, and so can every date of the "
                f"column; say which with data.date_format={chosen!r} or {other!r}"
            )
    return whole[chosen], chosen


def _candidates(cell: str) -> Iterator[str]:
    """The formats in which a cell can be read."""
    if cell.isdigit():
        dated = len(cell) in _DIGITS and re.match("(19|20)..(0[1-9]|1[0-2])", cell)
        found = _DIGITS[len(cell)] if dated else _SINCE_1970.get(len(cell))
        yield from [found] if found else []
        return
    parts = re.fullmatch(r"(\S*?\d)(?:(T| +)(\S.*))?", cell)
    if parts is None:
        return
    day, between, time = parts.groups(default="")
    forms = [form for form in _TIMES if _fits(time, form)] if time else [""]
    separator = next((letter for letter in day if letter in "-/."), "-")
    for form in (each.replace("-", separator) for each in _DAYS):
        if forms and _fits(day, form):
            yield form + between + forms[0]


def _fits(text: str, form: str) -> bool:
    return not _parsed(pd.Series([text]), form).hasnans


def _check_offsets(column: pd.Series, place: Callable[[int], str]) -> None:
    offsets = column.str.extract(r"(Z|[+-]\d\d:?\d\d)$", expand=False).fillna("")
    changes = (offsets != offsets.iloc[0]).to_numpy(dtype=bool)
    if changes.any():
        raise DataError(
            f"{place(int(changes.argmax()))} has another offset from UTC than the dates before it ({offsets.iloc[0]}); "
            "write all dates in UTC, or all without an offset"
        )


def _parsed(column: pd.Series, form: str) -> pd.DatetimeIndex:
    """The dates; NaT where a cell does not have the format."""
    if not form.startswith("%s"):
        return pd.DatetimeIndex(pd.to_datetime(column, format=form, errors="coerce"))
    numbers = pd.to_numeric(column, errors="coerce")
    return pd.DatetimeIndex(pd.to_datetime(numbers, unit=form[2:].strip() or "s", errors="coerce"))


_EMPTIER = 0.2  # more empty cells, as a share of all, that are worth a warning
# An outlier is this many (scaled) median absolute deviations away, belongs to a small share of the values, and widens
# the standard deviation this many times (1.25: the MSE gets 1.6 times smaller).
_MANY, _FEW, _WIDER = 20.0, 0.01, 1.25
_SHOWN = 5  # values, and series, that a warning names


@dataclass(frozen=True)
class Contract:
    """How the training series were read and standardized; saved in every checkpoint.

    Statistics are of the training rows, one per series, in the units of the file; None: not known.

    Attributes:
        name: of the data set.
        names: of the C series, in order.
        mean: mean.
        std: population standard deviation; 1 where a series is constant.
        low: 1 % quantile.
        high: 99 % quantile.
        missing: share of empty cells.
        date_format: format of the dates; None: there were none.
        seconds: median time between rows; None: not known, or too irregular.
        season: rows per season (``data.season``, or that of the calendar); 1: not known.
        scale: mean absolute difference of standardized rows that are a season apart.
        files: fingerprint of the file (:mod:`exp.data.places`).
        calendar: the grid of the dates (:meth:`exp.forecasting.data.calendar.Calendar.state_dict`); None: not known.
    """

    name: str
    names: list[str]
    mean: list[float]
    std: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    missing: list[float] | None = None
    date_format: str | None = None
    seconds: float | None = None
    season: int = 1
    scale: list[float] | None = None
    files: Fingerprint | None = None
    calendar: Mapping[str, Any] | None = None

    def unlike(self, series: Series, rows: range) -> list[str]:
        """Compare rows with the training rows.

        Args:
            series: as it was read, in the order of :attr:`names`.
            rows: the rows to compare.

        Returns:
            A warning each for columns far outside of the training range, and for columns with far more empty cells.
        """
        far, emptier = [], []
        values = pd.DataFrame(series.values[rows.start : rows.stop])
        found = values.quantile([0.01, 0.5, 0.99]).to_numpy().T  # NaN where all cells are empty: no comparison holds
        known = zip(self.names, self.low or (), self.high or (), self.missing or ())
        for (name, low, high, share), (first, middle, last), empty in zip(known, found, values.isna().mean()):
            if empty > share + _EMPTIER:
                emptier.append(f"{name} ({empty:.0%}; {share:.0%} in the training)")
            if max(last - high, low - first) > ((high - low) or 1.0) or middle < low or middle > high:
                far.append(f"{name} ({first:.6g} to {last:.6g}; trained on {low:.6g} to {high:.6g})")
        said = f"far outside of what the weights were trained on: {shortened(far)}; same unit, same sensor?"
        more = f"more empty cells than the weights were trained on: {shortened(emptier)}"
        return [f"{series.path}: {said}"] * bool(far) + [f"{series.path}: {more}"] * bool(emptier)


def contract_of(config: ForecastingDataConfig, series: Series, train: int) -> tuple[Contract, list[str]]:
    """The contract of a series by its training rows, and a warning if some series are constant there.

    Mean and population standard deviation are those of sklearn's StandardScaler; empty cells are ignored.

    Args:
        config: ``name`` and ``season`` are read.
        series: as it was read.
        train: number of training rows, which come first.

    Raises:
        DataError: all training cells of a series are empty, or ``season`` is not below ``train``.
    """
    rows, names = series.values[:train], series.columns.names
    empty = np.isnan(rows)
    without = empty.all(axis=0)
    if without.any():
        raise DataError(
            f"{series.path}, column {names[int(without.argmax())]}: all its cells in the training rows are empty; "
            "leave it out (data.inputs), or give some values"
        )
    mean, std = np.nanmean(rows, axis=0), np.nanstd(rows, axis=0)
    # Compare the extremes: rounding gives a constant series a tiny standard deviation, not zero.
    constant = np.fmax.reduce(rows, axis=0) == np.fmin.reduce(rows, axis=0)
    std[constant] = 1.0
    standardized = (rows - mean) / std
    calendar = series.dates.calendar
    season = config.season or (calendar.season if calendar else 1)
    if season >= train:
        if config.season:
            raise DataError(f"data.season={season} must be less than the {train} training rows of {series.path}")
        season = 1
    apart = np.abs(standardized[season:] - standardized[:-season])
    scale = np.nansum(apart, axis=0) / np.maximum((~np.isnan(apart)).sum(axis=0), 1)
    ends, share = np.nanquantile(rows, (0.01, 0.99), axis=0), empty.mean(axis=0)
    mean, std, low, high, missing, scale = (each.tolist() for each in (mean, std, *ends, share, scale))
    told = shortened([names[channel] for channel in np.flatnonzero(constant)])
    warning = (
        f"{series.path}: constant in the training rows: {told}; their standard deviation is set to 1, and exact "
        "forecasts of them lower the mean error over all series"
    )
    contract = Contract(
        config.name, names, mean, std, low, high, missing, season=season, scale=scale, files=of_file(series.path)
    )
    return contract, [warning] * bool(told)


def warn_of_outliers(series: Series) -> list[str]:
    """Warnings that name values far from all others of their series: they dominate its standard deviation or errors."""
    found = []
    for channel, column in enumerate(series.values.T):
        rows = np.flatnonzero(_outliers(column)).tolist()
        if rows:
            places = shortened([*(series.place(row, channel) for row in rows[:_SHOWN]), *rows[_SHOWN:]], _SHOWN)
            found.append(
                f"{series.path} {places.replace(f'{series.path} ', '')}: far from the other values of the series; "
                "perhaps a fill value for missing data. In the training rows such a value makes standardized errors "
                "small, elsewhere large; correct it, or leave the cell empty and set data.missing=mask"
            )
    rest = len(found) - _SHOWN
    return found[:_SHOWN] + [f"{series.path}: {rest} more such series"] * (rest > 0)


def _outliers(column: np.ndarray) -> np.ndarray:
    """Find a few values, or one repeated value, that widen the standard deviation; bool (T,).

    Median and median absolute deviation find them, since outliers would distort a mean and a standard deviation. Values
    that equal the median do not count for the deviation: it would be 0 if most values are equal.
    """
    known = column[~np.isnan(column)]
    distances = np.abs(column - np.median(known)) if len(known) else column
    apart = distances[distances > 0]
    far = distances > _MANY * 1.4826 * (np.median(apart) if len(apart) else np.inf)
    if not far.any():
        return far
    few = far.sum() <= max(_FEW * len(known), 1) or np.ptp(column[far]) == 0
    wider = known.std() > _WIDER * column[~far & ~np.isnan(column)].std()
    return far if few and wider else np.zeros_like(far)
