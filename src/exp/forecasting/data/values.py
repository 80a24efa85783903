"""Values of a series: statistics, filling of empty cells, and warnings of constants and outliers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from exp.data.places import shortened
from exp.errors import DataError

if TYPE_CHECKING:
    from exp.forecasting.data.series import Series

__all__ = ["filled", "ranges", "seasonal_difference", "statistics", "warn_of_constants", "warn_of_outliers"]

# An outlier is this many (scaled) median absolute deviations away, belongs to a small share of the values, and widens
# the standard deviation this many times (1.25: the MSE gets 1.6 times smaller).
_MANY = 20.0
_FEW = 0.01
_WIDER = 1.25
_SHOWN = 5  # values, and series, that a warning names


def statistics(series: Series, num_train: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation of the training rows (the convention of sklearn's StandardScaler).

    Args:
        series: as it was read; empty cells are ignored.
        num_train: number of training rows, which come first.

    Returns:
        Mean and standard deviation, float64 (C,) each; the latter is 1 where a series is constant.

    Raises:
        DataError: all training cells of a series are empty.
    """
    rows = series.values[:num_train]
    empty = np.isnan(rows)
    without = empty.all(axis=0)
    if without.any():
        raise DataError(
            f"{series.path}, column {series.columns.names[int(without.argmax())]}: all its cells in the training rows "
            "are empty; leave it out (data.inputs), or give some values"
        )
    mean, std = (
        (np.nanmean(rows, axis=0), np.nanstd(rows, axis=0)) if empty.any() else (rows.mean(axis=0), rows.std(axis=0))
    )
    # Compare the extremes: rounding gives a constant series a tiny standard deviation, not zero.
    std[np.fmax.reduce(rows, axis=0) == np.fmin.reduce(rows, axis=0)] = 1.0
    return mean, std


def ranges(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The 1 % and 99 % quantiles of each series, and its share of empty cells, float64 (C,) each.

    Args:
        values: float64 (T, C), NaN where a cell is empty; each series has at least one value.
    """
    empty = np.isnan(values)
    low, high = (np.nanquantile if empty.any() else np.quantile)(values, (0.01, 0.99), axis=0)
    return low, high, empty.mean(axis=0)


def seasonal_difference(values: np.ndarray, season: int) -> np.ndarray:
    """Mean absolute difference of rows that are a season apart, float64 (C,); 0 for a series without such a pair.

    Args:
        values: float64 (T, C), NaN where a cell is empty.
        season: length of a season in rows.
    """
    differences = np.abs(values[season:] - values[:-season])
    counts = (~np.isnan(differences)).sum(axis=0)
    found: np.ndarray = np.nansum(differences, axis=0) / np.maximum(counts, 1)
    return found


def filled(values: np.ndarray) -> np.ndarray:
    """Fill each empty cell with the last value before it, or with 0 (the mean of the training rows) if there is none.

    Args:
        values: standardized, float64 (T, C); NaN where a cell is empty.

    Returns:
        The same array where there is no empty cell, else a new one.
    """
    empty = np.isnan(values)
    if not empty.any():
        return values
    last = np.maximum.accumulate(np.where(empty, -1, np.arange(len(values))[:, None]), axis=0)
    found: np.ndarray = np.where(last < 0, 0.0, np.take_along_axis(values, np.maximum(last, 0), axis=0))
    return found


def warn_of_constants(series: Series, num_train: int) -> list[str]:
    """A warning that names the series that are constant in the training rows; empty: there are none."""
    rows = series.values[:num_train]
    constant = np.fmax.reduce(rows, axis=0) == np.fmin.reduce(rows, axis=0)
    names = [series.columns.names[channel] for channel in np.flatnonzero(constant)]
    if not names:
        return []
    return [
        f"{series.path}: constant in the training rows: {shortened(names)}; their standard deviation is set to 1, and "
        "exact forecasts of them lower the mean error over all series"
    ]


def warn_of_outliers(series: Series) -> list[str]:
    """Warnings that name values far from all others of their series: they dominate its standard deviation or errors."""
    found = []
    for channel, column in enumerate(series.values.T):
        rows = np.flatnonzero(_outliers(column)).tolist()
        if rows:
            first, *others = (series.place(row, channel) for row in rows[:_SHOWN])
            places = "; ".join([first, *(other.replace(f"{series.path} ", "", 1) for other in others)])
            more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
            found.append(
                f"{places}{more}: far from the other values of the series; perhaps a fill value for missing data. In "
                "the training rows such a value makes standardized errors small, elsewhere large; correct it, "
                "or leave the cell empty and set data.missing=mask"
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
