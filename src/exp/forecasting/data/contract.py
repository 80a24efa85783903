"""What goes with weights, and what other rows are checked against."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from exp.data.places import shortened
from exp.errors import DataError
from exp.forecasting.data.calendar import same_spacing

if TYPE_CHECKING:
    from pathlib import Path

    from exp.forecasting.data.series import Series

__all__ = ["Contract", "NeedsContractError"]

_EMPTIER = 0.2  # of all cells


class NeedsContractError(DataError):
    """A file cannot be used by itself: its dates are ambiguous, or it is too short for its split."""


@dataclass(frozen=True)
class Contract:
    """What goes with weights: how the series that they were trained on were read and standardized.

    Attributes:
        name: of the data set.
        names: of the C series, in order.
        mean: of the training rows in the units of the file, one for each series.
        std: population standard deviation, likewise; 1 where a series is constant.
        low: below it lies a hundredth of the values, likewise; None: not known.
        high: above it lies a hundredth.
        missing: the share of empty cells, likewise.
        date_format: in which dates were written; None: there were none.
        seconds: how far apart rows were; None where that is not known, or too irregular.
        season: rows of a season (:attr:`exp.forecasting.data.calendar.Frequency.season`); 1: not known.
        scale: mean absolute difference of rows that are a season apart, standardized; None: not known.
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

    def check_spacing(self, path: Path, seconds: float | None) -> None:
        """Refuse rows at another distance in time.

        Args:
            path: of the file.
            seconds: how far apart its rows are; None: not known.

        Raises:
            DataError: they are not of the frequency of the training.
        """
        if seconds and self.seconds and not same_spacing(seconds, self.seconds):
            raise DataError(
                f"{path}: its rows are {timedelta(seconds=seconds)} apart, and those that the weights were trained on "
                f"{timedelta(seconds=self.seconds)}; give rows of that distance"
            )

    def unlike(self, series: Series, rows: range) -> list[str]:
        """Name columns that are unlike those of the training: far outside of their range, or far more empty.

        Args:
            series: as it was read, in the order of :attr:`names`.
            rows: those that are looked at.
        """
        far, emptier = [], []
        values = series.values[rows.start : rows.stop].T
        for name, column, share in zip(self.names, values, self.missing or [1.0] * len(values)):
            empty = float(np.isnan(column).mean())
            if empty > share + _EMPTIER:
                emptier.append(f"{name} ({empty:.0%}; {share:.0%} in the training)")
        for name, column, low, high in zip(self.names, values, self.low or (), self.high or ()):
            known = column[~np.isnan(column)]
            if len(known):
                first, middle, last = np.quantile(known, (0.01, 0.5, 0.99))
                if max(last - high, low - first) > ((high - low) or 1.0) or not low <= middle <= high:
                    far.append(f"{name} ({first:.6g} to {last:.6g}; trained on {low:.6g} to {high:.6g})")
        said = (
            f"{series.path}: far outside of what the weights were trained on: {shortened(far)}; is it the same unit, "
        )
        more = f"{series.path}: more empty cells than the weights were trained on: {shortened(emptier)}"
        return [f"{said}and the same sensor?"] * bool(far) + [more] * bool(emptier)
