"""Values of a series: what standardizes them, what fills empty cells, and where their figures would mislead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from exp.data.places import shortened
from exp.errors import DataError

if TYPE_CHECKING:
    from exp.forecasting.data.series import Series

__all__ = ["filled", "ranges", "seasonal_difference", "statistics", "warn_of_constants", "warn_of_outliers"]

_MANY = 20.0  # median absolute deviations
_FEW = 0.01  # of the values
_WIDER = 1.25  # times the standard deviation of the rest: the MSE is 1.6 times as small
_SHOWN = 5


def statistics(series: Series, num_train: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation, float64 (C,) (the convention of sklearn's StandardScaler).

    Args:
        series: as it was read; empty cells count for nothing.
        num_train: the first rows, which are for training.

    Returns:
        The deviation is 1 where a series is constant.

    Raises:
        DataError: all cells of a series are empty.
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
    # By extremes: rounding gives a constant series a tiny standard deviation, not zero.
    std[np.fmax.reduce(rows, axis=0) == np.fmin.reduce(rows, axis=0)] = 1.0
    return mean, std


def ranges(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Between which values 98 % of each series lie, and which share of its cells is empty; (C,) each.

    Args:
        values: float64 (T, C), NaN where a cell is empty; each series has a value.
    """
    empty = np.isnan(values)
    low, high = (np.nanquantile if empty.any() else np.quantile)(values, (0.01, 0.99), axis=0)
    return low, high, empty.mean(axis=0)


def seasonal_difference(values: np.ndarray, season: int) -> np.ndarray:
    """Mean absolute difference of rows that are a season apart, (C,); 0 where there is none.

    Args:
        values: float64 (T, C), NaN where a cell is empty.
        season: in rows.
    """
    differences = np.abs(values[season:] - values[:-season])
    counts = (~np.isnan(differences)).sum(axis=0)
    found: np.ndarray = np.nansum(differences, axis=0) / np.maximum(counts, 1)
    return found


def filled(values: np.ndarray) -> np.ndarray:
    """Empty cells as a model sees them: the last value before; 0, the mean of the training rows, where there is none.

    Nothing later than a cell goes into it.

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
    """Name the series that are constant in the training rows, which are divided by 1."""
    rows = series.values[:num_train]
    constant = np.fmax.reduce(rows, axis=0) == np.fmin.reduce(rows, axis=0)
    names = [series.columns.names[channel] for channel in np.flatnonzero(constant)]
    if not names:
        return []
    return [
        f"{series.path}: constant in the training rows: {shortened(names)}; the standard deviation is taken as 1, and "
        "a forecast that is right there lowers the mean over all series"
    ]


def warn_of_outliers(series: Series) -> list[str]:
    """Name values that are far from all others of their series: they make its standard deviation, or the errors."""
    found = []
    for channel, column in enumerate(series.values.T):
        rows = np.flatnonzero(_outliers(column)).tolist()
        if rows:
            first, *others = (series.place(row, channel) for row in rows[:_SHOWN])
            places = "; ".join([first, *(other.replace(f"{series.path} ", "", 1) for other in others)])
            more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
            found.append(
                f"{places}{more}: far from the other values of the series; a fill value, perhaps, which stands for "
                "none. In the training rows such a value makes standardized errors small, elsewhere large; correct it, "
                "or leave the cell empty and set data.missing=mask"
            )
    rest = len(found) - _SHOWN
    return found[:_SHOWN] + [f"{series.path}: {rest} more such series"] * (rest > 0)


def _outliers(column: np.ndarray) -> np.ndarray:
    """A few values, or one value again and again, that widen the standard deviation; bool (T,).

    They are found by median and median absolute deviation: a mean and a standard deviation would be made by the very
    values that are looked for. Where most values are equal, the deviation is that of the others.
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
