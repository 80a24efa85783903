"""How the training series were read and standardized: saved with the weights, and compared with new rows."""

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

_EMPTIER = 0.2  # more empty cells, as a share of all, that are worth a warning


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
        """Refuse rows with another time between them than the training rows had.

        Args:
            path: of the file.
            seconds: median time between its rows; None: not known.

        Raises:
            DataError: the time between rows is another one.
        """
        if seconds and self.seconds and not same_spacing(seconds, self.seconds):
            raise DataError(
                f"{path}: its rows are {timedelta(seconds=seconds)} apart, and those that the weights were trained on "
                f"{timedelta(seconds=self.seconds)}; give rows of that distance"
            )

    def unlike(self, series: Series, rows: range) -> list[str]:
        """Compare rows with the training rows.

        Args:
            series: as it was read, in the order of :attr:`names`.
            rows: the rows to compare.

        Returns:
            A warning each for columns far outside of the training range, and for columns with far more empty cells.
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
