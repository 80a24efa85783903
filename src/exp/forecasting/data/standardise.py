"""Standardisation in float64, and whether float32 can carry what comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from exp.errors import DataError

if TYPE_CHECKING:
    from exp.forecasting.data.series import Series

__all__ = ["standardised", "statistics"]


def standardised(series: Series, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """``(values - mean) / std``, float64 (T, C).

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
    if max(values.max(), -values.min()) > np.finfo(np.float32).max:
        row, channel = divmod(int(np.abs(values).argmax()), values.shape[1])
        raise DataError(
            f"{series.place(row, channel)} is {abs(values[row, channel]):.3g} standard deviations of the training rows "
            "from their mean, which is beyond what float32 carries; correct it"
        )


def statistics(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and population standard deviation, float64 (C,) (the convention of sklearn's StandardScaler)."""
    std = rows.std(axis=0)
    # By extremes: rounding gives a constant series a tiny standard deviation, not zero.
    std[rows.max(axis=0) == rows.min(axis=0)] = 1.0
    return rows.mean(axis=0), std
