"""What a user should be told of the values of a series: where figures of them will mean less than they seem to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Mapping, Sequence

import numpy as np

from exp.data.places import shortened
from exp.forecasting.data.standardise import peaks

if TYPE_CHECKING:
    import torch

    from exp.forecasting.data.series import Series

__all__ = ["notes_on_constants", "notes_on_extremes", "without_truth"]

_FAR = 1000.0  # standard deviations of the training rows; float32 tells values of that size apart by 6e-5
_MANY = 20.0  # median absolute deviations
_FEW = 0.01  # of the values
_WIDER = 1.25  # times the standard deviation of the rest: the MSE is 1.6 times as small
_CAN_MATTER = 6.0  # standard deviations: a few values that are nearer do not widen it by _WIDER
_SHOWN = 5
_NINES = re.compile(r"9{3,}(\.9+)?|9{2}\.9+")
_LIMITS = (-32768.0, 32767.0, 65535.0, -2147483648.0, 2147483647.0)
_HUGE = 1e15
_DO = "correct it, or leave the cell empty and set data.missing=mask"


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
    """Values that are far from all others of their series: they make its standard deviation, or the errors.

    Args:
        series: as it was read.
        values: standardised, float64 (T, C).
    """
    notes = []
    low, high = np.fmin.reduce(series.values, axis=0), np.fmax.reduce(series.values, axis=0)
    for channel, size in enumerate(peaks(values)):
        fills = np.zeros(len(values), dtype=bool)
        if _like_a_fill_value(low[channel]) or _like_a_fill_value(high[channel]):
            fills = _fill_values(series.values[:, channel])
        if fills.any():
            notes.append(f"{_places(series, fills, channel)}: probably a fill value, which stands for none; {_DO}")
        far = np.zeros_like(fills)
        if size > _CAN_MATTER:
            far = np.abs(values[:, channel]) > _FAR
            far |= _outliers(np.where(fills, np.nan, series.values[:, channel]))
        far &= ~fills
        if far.any():
            notes.append(
                f"{_places(series, far, channel)}: far from the other values of the series. In the training rows such "
                f"a value makes standardised errors small, elsewhere large; {_DO}"
            )
    rest = len(notes) - _SHOWN
    return notes[:_SHOWN] + [f"{series.path}: {rest} more such notes"] * (rest > 0)


def _places(series: Series, chosen: np.ndarray, channel: int) -> str:
    """``<path> row 7, column load: '1e36'; row 9, column load: '1e20' and 3 more``."""
    rows = np.flatnonzero(chosen).tolist()
    first, *others = (series.place(row, channel) for row in rows[:_SHOWN])
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return "; ".join([first, *(other.replace(f"{series.path} ", "", 1) for other in others)]) + more


def _like_a_fill_value(value: float) -> bool:
    return abs(value) >= _HUGE or value in _LIMITS or _NINES.fullmatch(f"{abs(value):.9g}") is not None


def _fill_values(column: np.ndarray) -> np.ndarray:
    """Which values are such as -999, 9999.9 or 1e20, and lie apart from the rest; bool (T,)."""
    found = np.isnan(column)
    known = found.copy()
    while not found.all():
        rest = column[~found]
        for end in (rest.min(), rest.max()):
            others = rest[rest != end]
            if _like_a_fill_value(end) and len(others) and np.abs(others - end).min() > 0.1 * np.ptp(others):
                found |= column == end
                break
        else:
            break
    return found & ~known


def _outliers(column: np.ndarray) -> np.ndarray:
    """A few values that widen the standard deviation, told by median and median absolute deviation; bool (T,).

    A mean and a standard deviation would be made by the very values that are looked for. Where most values are equal,
    the deviation is that of the others.
    """
    known = column[~np.isnan(column)]
    distances = np.abs(column - np.median(known))
    scale = 1.4826 * float(np.median(distances[distances > 0])) if (distances > 0).any() else 0.0
    far = distances > _MANY * scale
    rest = column[~far & ~np.isnan(column)]
    few = 0 < far.sum() <= max(_FEW * len(known), 1)
    return far if few and known.std() > _WIDER * rest.std() else np.zeros_like(far)


def notes_on_range(series: Series, low: Sequence[float] | None, high: Sequence[float] | None) -> list[str]:
    """Series of new rows that are far outside of the range of the training rows: of another unit or sensor, perhaps.

    Args:
        series: as it was read.
        low: the lowest value of each series in the training rows; None: not known.
        high: likewise.
    """
    if low is None or high is None:
        return []
    found = []
    for name, column, least, most in zip(series.names, series.values.T, low, high):
        known = column[~np.isnan(column)]
        if not len(known):
            continue
        width, middle = most - least, float(np.median(known))
        beyond = max(known.max() - most, least - known.min())
        if beyond > (width or 1.0) or not least <= middle <= most:
            found.append(f"{name} ({known.min():.6g} to {known.max():.6g}; trained on {least:.6g} to {most:.6g})")
    if not found:
        return []
    return [
        f"{series.path}: far outside of what the weights were trained on: {shortened(found)}; is it the same unit, and "
        "the same sensor?"
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
