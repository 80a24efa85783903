"""Standardisation in float64, and whether float32 can carry what comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

import numpy as np

from exp.errors import DataError

if TYPE_CHECKING:
    from exp.forecasting.data.series import Series

__all__ = ["filled", "peaks", "standardised", "statistics"]


def standardised(series: Series, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """``(values - mean) / std``, float64 (T, C); NaN where a cell is empty.

    Args:
        series: as it was read.
        mean: float64 (C,).
        std: float64 (C,).

    Raises:
        DataError: the mean, the standard deviation or a result is beyond what float32 carries.
    """
    _check_statistics(series, mean, std)
    values: np.ndarray = (series.values - mean) / std
    _check_range(series, values)
    return values


def _check_statistics(series: Series, mean: np.ndarray, std: np.ndarray) -> None:
    limits = np.finfo(np.float32)
    bad = ~((std >= limits.tiny) & (std <= limits.max) & (np.abs(mean) <= limits.max))
    if bad.any():
        channel = int(bad.argmax())
        raise DataError(
            f"{series.path}, column {series.names[channel]}: a mean of {mean[channel]:.6g} and a standard deviation of "
            f"{std[channel]:.6g} in the training rows are beyond what float32 carries; use another unit"
        )


def _check_range(series: Series, values: np.ndarray) -> None:
    if np.fmax.reduce(peaks(values)) > np.finfo(np.float32).max:
        row, channel = divmod(int(np.nanargmax(np.abs(values))), values.shape[1])
        raise DataError(
            f"{series.place(row, channel)} is {abs(values[row, channel]):.3g} standard deviations of the training rows "
            "from their mean, which is beyond what float32 carries; correct it"
        )


def peaks(values: np.ndarray) -> np.ndarray:
    """The largest size of a value of each series, (C,); of an array (T, C) that may have NaN."""
    found: np.ndarray = np.fmax(np.fmax.reduce(values, axis=0), -np.fmin.reduce(values, axis=0))
    return found


def filled(values: np.ndarray) -> np.ndarray:
    """Empty cells as a model sees them: the last value before; 0, the mean of the training rows, where there is none.

    Nothing later than a cell goes into it.

    Args:
        values: standardised, float64 (T, C); NaN where a cell is empty.

    Returns:
        The same array where there is no empty cell, else a new one.
    """
    empty = np.isnan(values)
    if not empty.any():
        return values
    last = np.maximum.accumulate(np.where(empty, -1, np.arange(len(values))[:, None]), axis=0)
    found: np.ndarray = np.where(last < 0, 0.0, np.take_along_axis(values, np.maximum(last, 0), axis=0))
    return found


def statistics(rows: np.ndarray, names: Sequence[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation, float64 (C,) (the convention of sklearn's StandardScaler).

    Args:
        rows: float64 (T, C); empty cells are NaN, and count for nothing.
        names: of the series, for messages.

    Raises:
        DataError: all cells of a series are empty.
    """
    empty = np.isnan(rows)
    if empty.any():
        without = empty.all(axis=0)
        if without.any():
            raise DataError(
                f"column {names[int(without.argmax())]}: all its cells in the training rows are empty; leave it out "
                "(data.inputs), or give some values"
            )
        std = np.nanstd(rows, axis=0)
        std[np.nanmax(rows, axis=0) == np.nanmin(rows, axis=0)] = 1.0
        return np.nanmean(rows, axis=0), std
    std = rows.std(axis=0)
    # By extremes: rounding gives a constant series a tiny standard deviation, not zero.
    std[rows.max(axis=0) == rows.min(axis=0)] = 1.0
    return rows.mean(axis=0), std
