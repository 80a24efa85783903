"""The training series: how they were read, and their statistics; saved with the weights, and compared with new rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from exp.data.places import of_file, shortened
from exp.errors import DataError

if TYPE_CHECKING:
    from exp.data.places import Fingerprint
    from exp.forecasting.data.series import Series

__all__ = ["Contract", "NeedsContractError", "contract_of", "warn_of_outliers"]

_EMPTIER = 0.2  # more empty cells, as a share of all, that are worth a warning
# An outlier is this many (scaled) median absolute deviations away, belongs to a small share of the values, and widens
# the standard deviation this many times (1.25: the MSE gets 1.6 times smaller).
_MANY, _FEW, _WIDER = 20.0, 0.01, 1.25
_SHOWN = 5  # values, and series, that a warning names


class NeedsContractError(DataError):
    """A file cannot be used by itself: its dates are ambiguous, or it is too short for its split."""


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
        season: rows per season (:attr:`exp.forecasting.data.calendar.Frequency.season`); 1: not known.
        scale: mean absolute difference of standardized rows that are a season apart.
        files: fingerprint of the file (:mod:`exp.data.places`).
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
        for name, empty, share in zip(self.names, values.isna().mean(), self.missing or [1.0] * len(self.names)):
            if empty > share + _EMPTIER:
                emptier.append(f"{name} ({empty:.0%}; {share:.0%} in the training)")
        found = values.quantile([0.01, 0.5, 0.99]).to_numpy().T  # NaN where all cells are empty: no comparison holds
        for name, (first, middle, last), low, high in zip(self.names, found, self.low or (), self.high or ()):
            if max(last - high, low - first) > ((high - low) or 1.0) or middle < low or middle > high:
                far.append(f"{name} ({first:.6g} to {last:.6g}; trained on {low:.6g} to {high:.6g})")
        said = f"far outside of what the weights were trained on: {shortened(far)}; same unit, same sensor?"
        more = f"more empty cells than the weights were trained on: {shortened(emptier)}"
        return [f"{series.path}: {said}"] * bool(far) + [f"{series.path}: {more}"] * bool(emptier)


def contract_of(name: str, series: Series, train: int, season: int) -> tuple[Contract, list[str]]:
    """The contract of a series by its training rows, and a warning if some series are constant there.

    Mean and population standard deviation are those of sklearn's StandardScaler; empty cells are ignored.

    Args:
        name: of the data set.
        series: as it was read.
        train: number of training rows, which come first.
        season: rows per season; 1: not known.

    Raises:
        DataError: all training cells of a series are empty.
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
        name, names, mean, std, low, high, missing, season=season, scale=scale, files=of_file(series.path)
    )
    return contract, [warning] * bool(told)


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
