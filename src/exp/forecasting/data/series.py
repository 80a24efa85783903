"""Read a multivariate series from disk; errors name the row and column of the file.

Statistics of the training rows are saved with the weights (:class:`TrainingStatistics`), and compared with new rows.
"""

from __future__ import annotations

import abc
import csv
import re
import zipfile
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Mapping

import numpy as np
import pandas as pd  # here, so that the fork server imports it once, not each worker
import torch

from exp.config.resolve import create
from exp.data.fingerprint import file_fingerprint, shortened
from exp.errors import DataError
from exp.forecasting.data import files as data_files
from exp.forecasting.data.dates import Dates, read_dates
from exp.forecasting.data.panel import Layout, arrange, empty_cells, melt, static_columns

if TYPE_CHECKING:
    from pathlib import Path

    from exp.data.fingerprint import Fingerprint
    from exp.forecasting.keys import ForecastingDataConfig

_FLOAT32_MAX = np.finfo(np.float32).max
_EMPTY = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "<NA>", "#N/A"]


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


@dataclass(frozen=True, eq=False)
class Series:
    """A multivariate series.

    Attributes:
        path: of the file.
        header: of the file; None for ``.npz``.
        columns: the C columns that are read.
        values: float64 (T, C), oldest row first; within the range of float32, or NaN for an empty cell that is allowed.
            Of several series, one lies below the other.
        dates: of the rows.
        layout: where the series are.
        static: values of each series, float64 (S, K); None: there are none.
        categories: the values of each static column of text.
        cells: all cells of the file, from which covariates are computed; None: none are.
    """

    path: Path
    header: data_files.Header | None
    columns: data_files.Columns
    values: np.ndarray
    dates: Dates
    layout: Layout
    static: np.ndarray | None = None
    categories: Mapping[str, list[str]] = field(default_factory=dict)
    cells: pd.DataFrame | None = None

    def describe_cell(self, row: int, channel: int) -> str:
        """``<path> row 7, column load: '3.5'``: a cell by its position in :attr:`values`, from 0."""
        name = self.columns.names[channel]
        if self.header is None or (name not in self.header.names and self.header.melted is None):
            return f"{self.path} data[{row}, {name}]: {self.values[row, channel]:.6g}"
        return self.header.describe_cell(row if self.layout.lines is None else int(self.layout.lines[row]), name)


def read_series(path: Path, config: ForecastingDataConfig, statistics: TrainingStatistics | None = None) -> Series:
    """Read a file.

    Args:
        path: comma-separated UTF-8 text, plain or ``.gz``, or ``.parquet``, one row per time step, or with
            ``data.id_column`` per series and time step; or ``.npz`` with an array ``data`` of
            shape (rows, series) or (rows, series, measures), the format of PEMS. Only the first measure is read (the
            traffic flow, as in the loaders of SCINet, arXiv 2106.09305, and iTransformer, arXiv 2310.06625).
        config: the keys of ``data``.
        statistics: has the format of the dates if several fit (see :func:`exp.forecasting.data.dates.parse_dates`), and
            their calendar if they follow it; None: there are no weights.

    Raises:
        DataError: the file is unreadable, empty or ragged; its first row does not fit (see
            :func:`exp.forecasting.data.files.read_header`); a cell is not a date, or not a finite number that
            float32 can represent; dates are not strictly increasing, or can be read in several formats. Messages number
            rows as lines of the file, from 1.
    """
    header, dates, layout, static = None, Dates(), None, None
    saved = (statistics.date_format, statistics.calendar) if statistics else (None, None)
    categories = dict(statistics.categories) if statistics else {}
    if path.suffix == ".npz":
        table = _read_array(path, config)
    else:
        table, header = _read_table(path, config)
        if config.melt:
            table, header = melt(table, header)
        if header.id is not None:
            table, dates, layout = arrange(table, header, config, *saved)
            if config.static:
                static = static_columns(table, layout, header, config.static, categories)
                table = table.drop(columns=[name for name in config.static if name not in (config.inputs or ())])
        elif header.date is not None:
            dates = read_dates(table, header, config, *saved)
            table = table.drop(columns=header.date).set_index(dates.index)
    layout = layout or Layout(None, np.array([0, len(table)]))
    cells = table if not set(config.derived_columns).isdisjoint(config.future_covariates or ()) else None
    table = add_derived_columns(table, config)
    columns = data_files.select_columns(path, list(table), config)
    values, empty = _to_numbers(table[columns.names])
    series = Series(path, header, columns, values, dates, layout, static, categories, cells)
    bad, advice = ~(np.abs(values) <= _FLOAT32_MAX), "write it with digits and a point"
    if config.missing == "mask":
        bad &= ~empty
    elif bad.any() and empty.flat[int(bad.argmax())]:
        advice = "fill the gap, leave the row out, or allow empty cells (data.missing=mask)"
    if bad.any():
        row, channel = divmod(int(bad.argmax()), bad.shape[1])
        if bad[:, channel].all() and len(bad) > 1:
            advice += "; so is the whole column: leave it out if it is no series (data.inputs)"
        raise DataError(f"{series.describe_cell(row, channel)} is not a finite number that float32 carries; {advice}")
    return series


def add_derived_columns(table: pd.DataFrame, config: ForecastingDataConfig) -> pd.DataFrame:
    """A copy of cells with the columns that are computed from them (``data.derived_columns``).

    Raises:
        DataError: a column has another number of values than the table has rows.
    """
    table = table.copy() if config.derived_columns else table
    for name, keys in config.derived_columns.items():
        values = np.asarray(create(keys, Column, f"data.derived_columns.{name}").values(table), dtype=np.float64)
        if values.shape != (len(table),):
            raise DataError(
                f"data.derived_columns.{name} has {values.shape} values for {len(table)} rows; return one for each"
            )
        table[name] = values
    return table


def _read_table(path: Path, config: ForecastingDataConfig) -> tuple[pd.DataFrame, data_files.Header]:
    """All rows below the header, without blank lines at the end; and the header."""
    if path.suffix == ".parquet":
        return _read_parquet(path, config)
    header = data_files.read_header(path, config)
    # Dates as text: plain numbers would later be read as nanoseconds since 1970. A blank line is a row, too.
    dtype: Any = None if header.date is None else {header.date: str}
    options: dict[str, Any] = {"skiprows": header.begin, "names": header.names, "skip_blank_lines": False}
    if header.id is not None:  # an id may read "NA"; repeated text takes little memory as a category
        texts = [header.id, *([] if header.date is None else [header.date])]
        dtype = dict.fromkeys(texts, "category")
        options.update(keep_default_na=False, na_values={name: _EMPTY for name in header.names if name not in texts})
    options["dtype"] = dtype
    try:
        table = pd.read_csv(path, header=None, low_memory=False, **options)
    except pd.errors.EmptyDataError:
        table = pd.DataFrame()
    except (ValueError, OSError, EOFError, zlib.error) as error:
        # pandas counts lines from 1, but the rows of open quotes from 0.
        reason = re.sub(r"(?<=starting at row )\d+", lambda row: str(int(row[0]) + 1), str(error).strip())
        raise DataError(
            f"{path} cannot be read as comma-separated UTF-8: {reason}; {data_files.SAVE_ADVICE}"
        ) from error
    while len(table) and all(str(cell).strip() in ("", "nan") for cell in table.iloc[-1]):
        table = table[:-1].copy()
    if not len(table):
        raise DataError(f"{path} is empty below its header; expected one row per time step")
    if table.iloc[:, -1].isna().any():  # pandas adds the cells that a row lacks, as empty ones
        with data_files.open_text(path) as file:
            reader, width = csv.reader(file), len(header.names)
            for cells in reader:
                row = reader.line_num
                if row > header.begin and 0 < len(cells) < width:
                    raise DataError(
                        f"{path} row {row} has {len(cells)} of {width} cells; every row needs one per column"
                    )
    return table, header


def _read_parquet(path: Path, config: ForecastingDataConfig) -> tuple[pd.DataFrame, data_files.Header]:
    try:
        table = pd.read_parquet(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    table = table.reset_index(drop=all(name is None for name in table.index.names)).rename(columns=str)
    if not len(table):
        raise DataError(f"{path} has no rows")
    date = None if config.date_column is None else data_files.find_date_column(path, list(table), config.date_column)
    return table, data_files.table_header(path, 0, list(table), date, config)


def _to_numbers(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """float64 (T, C), NaN where a cell is no number; and bool (T, C), where it is empty."""
    empty, numbers = np.zeros(table.shape, dtype=bool), {}
    for position, column in enumerate(table.columns):
        numbers[position] = table[column]
        empty[:, position] = empty_cells(table[column])
        if numbers[position].dtype.kind not in "iuf":
            numbers[position] = pd.to_numeric(table[column].astype(str).str.strip(), errors="coerce")
    return pd.DataFrame(numbers).to_numpy(dtype=np.float64), empty


def _read_array(path: Path, config: ForecastingDataConfig) -> pd.DataFrame:
    """The array ``data`` of an ``.npz`` file, with the numbers of its series as names."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            values: np.ndarray = archive["data"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; expected: {data_files.describe_layout(config)}") from error
    if values.ndim not in (2, 3) or not values.size or values.dtype.kind not in "fiu":
        raise DataError(
            f"{path}: its array `data` is {values.shape}, {values.dtype}; expected: "
            f"{data_files.describe_layout(config)}"
        )
    table = pd.DataFrame(values if values.ndim == 2 else values[..., 0])
    return table.rename(columns=str)


_MAX_EMPTY_INCREASE = 0.2  # more empty cells, as a share of all, that are worth a warning
# An outlier is this many (scaled) median absolute deviations away, belongs to a small share of the values, and widens
# the standard deviation this many times (1.25: the MSE gets 1.6 times smaller).
_OUTLIER_DEVIATIONS, _OUTLIER_FRACTION, _OUTLIER_STD_RATIO = 20.0, 0.01, 1.25
_GAUSSIAN_RANGE = 1.3489795  # interquartile range of a standard Gaussian
_MAX_NAMED = 5  # values, and series, that a warning names


@dataclass(frozen=True)
class TrainingStatistics:
    """How the training series were read and standardized; saved in every checkpoint.

    Statistics are of the training rows, one per column, in the units of the file; None: not known. In a table of many
    series, mean, std and scale are float64 tensors (S, C).

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
        files: fingerprint of the file (:mod:`exp.data.fingerprint`).
        calendar: the grid of the dates (:meth:`exp.forecasting.data.calendar.Calendar.state_dict`); None: not known.
        ids: of the S series of a table; None: it was one series.
        static: mean and deviation over series of each static column, float64 (2, K); None: there are none.
        categories: the values of each static column of text.
        calibration: corrections of intervals (``task=calibrate``); None: there are none.
    """

    name: str
    names: list[str]
    mean: Any
    std: Any
    low: list[float] | None = None
    high: list[float] | None = None
    missing: list[float] | None = None
    date_format: str | None = None
    seconds: float | None = None
    season: int = 1
    scale: Any = None
    files: Fingerprint | None = None
    calendar: Mapping[str, Any] | None = None
    ids: list[str] | None = None
    static: torch.Tensor | None = None
    categories: Mapping[str, list[str]] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None

    def matched(self, computed: TrainingStatistics) -> tuple[TrainingStatistics, int]:
        """These statistics for the series of other rows, by their ids; a new series has its own.

        Returns:
            The statistics, and the number of new series.
        """
        if computed.ids is None:
            return self, 0
        numbers = {name: number for number, name in enumerate(self.ids or ())}
        known = torch.tensor([name in numbers for name in computed.ids])
        rows = torch.tensor([numbers[name] for name in computed.ids if name in numbers], dtype=torch.int64)
        values = {name: getattr(computed, name).clone() for name in ("mean", "std", "scale")}
        for name, tensor in values.items() if len(rows) else ():
            tensor[known] = torch.as_tensor(getattr(self, name), dtype=torch.float64)[rows]
        return replace(self, ids=computed.ids, **values), int((~known).sum())

    def drift_warnings(self, series: Series, rows: range) -> list[str]:
        """Compare rows with the training rows.

        Args:
            series: as it was read, in the order of :attr:`names`.
            rows: the rows to compare.

        Returns:
            A warning each for columns far outside of the training range, and for columns with far more empty cells.
        """
        far, emptier = [], []
        values = pd.DataFrame(series.values[rows.start : rows.stop])
        # NaN where all cells are empty: then no comparison holds.
        quantiles = values.quantile([0.01, 0.5, 0.99]).to_numpy().T
        saved = zip(self.names, self.low or (), self.high or (), self.missing or ())
        for (name, low, high, share), (first, middle, last), empty in zip(saved, quantiles, values.isna().mean()):
            if empty > share + _MAX_EMPTY_INCREASE:
                emptier.append(f"{name} ({empty:.0%}; {share:.0%} in the training)")
            if max(last - high, low - first) > ((high - low) or 1.0) or middle < low or middle > high:
                far.append(f"{name} ({first:.6g} to {last:.6g}; trained on {low:.6g} to {high:.6g})")
        range_warning = f"far outside of what the weights were trained on: {shortened(far)}; same unit, same sensor?"
        empty_warning = f"more empty cells than the weights were trained on: {shortened(emptier)}"
        return [f"{series.path}: {range_warning}"] * bool(far) + [f"{series.path}: {empty_warning}"] * bool(emptier)


def compute_statistics(
    config: ForecastingDataConfig, series: Series, train: np.ndarray, saved_season: int | None = None
) -> tuple[TrainingStatistics, str]:
    """The statistics of the training rows, and a warning if some series are constant there; empty: none is.

    Mean and population standard deviation are those of sklearn's StandardScaler; empty cells are ignored.

    Args:
        config: ``name`` and ``season`` are read.
        series: as it was read.
        train: number of training rows of each series, which come first, (S,).
        saved_season: that of weights, whose scales are of it; None: there are none.

    Raises:
        DataError: all training cells of a series are empty, or ``season`` is not below ``train``.
    """
    names, calendar, most = series.columns.names, series.dates.calendar, int(train.max())
    season = config.season or saved_season or (calendar.season if calendar else 1)
    if season >= most and saved_season is None:
        if config.season:
            raise DataError(f"data.season={season} must be less than the {most} training rows of {series.path}")
        season = 1
    files = file_fingerprint(series.path)
    if series.layout.ids is not None:
        mean, std, scale, constant_ids = _statistics_of_each(series, train, season, config.scaling)
        warning = f"{series.path}: constant in the training rows: {shortened(constant_ids)}; std is set to 1 there"
        ids = series.layout.ids
        statistics = TrainingStatistics(config.name, names, mean, std, season=season, scale=scale, files=files, ids=ids)
        return statistics, warning * bool(constant_ids)
    rows = series.values[:most]
    empty = np.isnan(rows)
    all_empty = empty.all(axis=0)
    if all_empty.any():
        raise DataError(
            f"{series.path}, column {names[int(all_empty.argmax())]}: all its cells in the training rows are empty; "
            "leave it out (data.inputs), give some values, or take each column as a series of its own (data=panel "
            "data.melt=true)"
        )
    mean, std = np.nanmean(rows, axis=0), np.nanstd(rows, axis=0)
    # Compare the extremes: rounding gives a constant series a tiny standard deviation, not zero.
    constant = np.fmax.reduce(rows, axis=0) == np.fmin.reduce(rows, axis=0)
    std[constant] = 1.0
    if config.scaling is not None:
        parts = _other_scaling(config.scaling, rows, np.zeros(len(rows), dtype=np.int32), mean[None], std[None])
        mean, std = (part[0] for part in parts)
    standardized = (rows - mean) / std
    differences = np.abs(standardized[season:] - standardized[:-season])
    scale = np.nansum(differences, axis=0) / np.maximum((~np.isnan(differences)).sum(axis=0), 1)
    ends, empty_fractions = np.nanquantile(rows, (0.01, 0.99), axis=0), empty.mean(axis=0)
    arrays = (mean, std, *ends, empty_fractions, scale)
    mean, std, low, high, missing, scale = (array.tolist() for array in arrays)
    constant_names = shortened([names[channel] for channel in np.flatnonzero(constant)])
    warning = (
        f"{series.path}: constant in the training rows: {constant_names}; their standard deviation is set to 1, and "
        "exact forecasts of them lower the mean error over all series"
    )
    moments = (names, mean, std, low, high, missing)
    statistics = TrainingStatistics(config.name, *moments, season=season, scale=scale, files=files)
    return statistics, warning * bool(constant_names)


def _statistics_of_each(
    series: Series, train: np.ndarray, season: int, scaling: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[str]]:
    """Mean, standard deviation and scale of each series, float64 (S, C) each; and the series that are constant."""
    first, of_row = series.layout.starts[:-1], series.layout.series_of_row
    position = np.arange(len(of_row)) - first[of_row]
    values = np.where((position < train[of_row])[:, None], series.values, np.nan)
    present = ~np.isnan(values)

    def mean_of(cells: np.ndarray, where: np.ndarray) -> np.ndarray:
        counts = np.add.reduceat(where.astype(np.int64), first, axis=0)
        return np.asarray(np.add.reduceat(np.where(where, cells, 0.0), first, axis=0) / np.maximum(counts, 1))

    mean = mean_of(values, present)
    std = np.sqrt(mean_of((values - mean[of_row]) ** 2, present))
    constant = np.fmax.reduceat(values, first, axis=0) == np.fmin.reduceat(values, first, axis=0)
    std[constant | (std == 0)] = 1.0
    if scaling is not None:
        mean, std = _other_scaling(scaling, values, of_row, mean, std)
    standardized = (values - mean[of_row]) / std[of_row]
    differences = np.full_like(values, np.nan)
    differences[season:] = np.abs(standardized[season:] - standardized[:-season])
    differences[position < season] = np.nan
    scale = mean_of(differences, ~np.isnan(differences))
    assert series.layout.ids is not None
    names = [series.layout.ids[number] for number in np.flatnonzero(constant[:, series.columns.scored].any(axis=1))]
    return torch.from_numpy(mean), torch.from_numpy(std), torch.from_numpy(scale), names


def _other_scaling(
    scaling: str, values: np.ndarray, of_row: np.ndarray, mean: np.ndarray, std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What ``data.scaling`` takes instead of mean and standard deviation, (S, C) each; ``of_row``: series of rows."""
    if scaling == "none":
        return np.zeros_like(mean), np.ones_like(std)
    groups = pd.DataFrame(values).groupby(of_row)
    low, median, high = (groups.quantile(level).to_numpy() for level in (0.25, 0.5, 0.75))
    spread = (high - low) / _GAUSSIAN_RANGE
    return np.where(np.isnan(median), mean, median), np.where(spread > 0, spread, std)


def outlier_warnings(series: Series) -> list[str]:
    """Warnings that name values far from all others of their series: they dominate its standard deviation or errors.

    Not of tables of many series.
    """
    warnings: list[str] = []
    if series.layout.ids is not None:
        return warnings
    for channel, column in enumerate(series.values.T):
        rows = np.flatnonzero(_find_outliers(column)).tolist()
        if rows:
            described = [series.describe_cell(row, channel) for row in rows[:_MAX_NAMED]]
            cells = shortened([*described, *rows[_MAX_NAMED:]], _MAX_NAMED)
            warnings.append(
                f"{series.path} {cells.replace(f'{series.path} ', '')}: far from the other values of the series; "
                "perhaps a fill value for missing data. In the training rows such a value makes standardized errors "
                "small, elsewhere large; correct it, or leave the cell empty and set data.missing=mask"
            )
    num_more = len(warnings) - _MAX_NAMED
    return warnings[:_MAX_NAMED] + [f"{series.path}: {num_more} more such series"] * (num_more > 0)


def _find_outliers(column: np.ndarray) -> np.ndarray:
    """Find a few values, or one repeated value, that widen the standard deviation; bool (T,).

    Median and median absolute deviation find them, since outliers would distort a mean and a standard deviation. Values
    that equal the median do not count for the deviation: it would be 0 if most values are equal.
    """
    present = column[~np.isnan(column)]
    distances = np.abs(column - np.median(present)) if len(present) else column
    nonzero = distances[distances > 0]
    far = distances > _OUTLIER_DEVIATIONS * 1.4826 * (np.median(nonzero) if len(nonzero) else np.inf)
    if not far.any():
        return far
    few = far.sum() <= max(_OUTLIER_FRACTION * len(present), 1) or np.ptp(column[far]) == 0
    wider = present.std() > _OUTLIER_STD_RATIO * column[~far & ~np.isnan(column)].std()
    return far if few and wider else np.zeros_like(far)
