"""What a user should be told of the values of a series: where figures of them will mean less than they seem to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping, Sequence

import numpy as np

from exp.data.places import shortened
from exp.forecasting.data.standardise import peaks

if TYPE_CHECKING:
    import torch

    from exp.forecasting.data.series import Series

__all__ = ["notes_on_constants", "notes_on_extremes", "without_truth"]

_FAR = 1000.0  # standard deviations; float32 tells values of that size apart by 6e-5


def notes_on_constants(series: Series, train: int, std: np.ndarray) -> list[str]:
    """Series without a standard deviation.

    Args:
        series: as it was read.
        train: rows for training, the first ones.
        std: of these, float64 (C,): 1 where there is none, and by chance.
    """
    ones = np.flatnonzero(std == 1.0)
    rows = series.values[:train, ones]
    constant = np.fmax.reduce(rows, axis=0) == np.fmin.reduce(rows, axis=0)
    names = [series.names[channel] for channel in ones[constant]]
    if not names:
        return []
    return [
        f"{series.path}: constant in the training rows: {shortened(names)}; the standard deviation is taken as 1, and "
        "a forecast that is right there lowers the mean over all series"
    ]


def notes_on_extremes(series: Series, values: np.ndarray) -> list[str]:
    """Values so far from the mean that errors of them are all that a standardised figure tells.

    Args:
        series: as it was read.
        values: standardised, float64 (T, C).
    """
    sizes = peaks(values)
    far = int((sizes > _FAR).sum())
    if not far:
        return []
    channel = int(np.nanargmax(sizes))
    row = int(np.nanargmax(np.abs(values[:, channel])))
    more = f" (and {far - 1} more series)" if far > 1 else ""
    return [
        f"{series.place(row, channel)} is {sizes[channel]:.3g} standard deviations of the training rows from their mean"
        f"{more}: standardised errors will be of such values alone; correct them, or leave the column out"
    ]


def without_truth(
    truth: torch.Tensor, names: Sequence[str], rows: Mapping[str, range], lookback: int
) -> dict[str, list[str]]:
    """By part, the series that have no value where the part is forecast; only parts that lack some.

    Args:
        truth: of the series that are forecast, (T, C); NaN where there is none.
        names: of these.
        rows: of each part, with the ``lookback`` rows before the first that is forecast.
        lookback: rows that a forecast sees.
    """
    found = {}
    for part, span in rows.items():
        there = (truth[span.start + lookback : span.stop] == truth[span.start + lookback : span.stop]).any(dim=0)
        lacking = [name for name, is_there in zip(names, there.tolist()) if not is_there]
        if lacking:
            found[part] = lacking
    return found
