"""Whether one model's errors are smaller than another's in the same windows, or whether that may be chance.

The test is that of Diebold and Mariano (J. Business & Economic Statistics 13(3), 1995): is the mean of the differences
of errors zero? Windows are not independent: those that overlap share rows, and all series of a date share its events.
Differences are therefore summed over the series of each origin, and the variance of their mean is the long-run variance
of these sums (for panels: Driscoll and Kraay, Review of Economics and Statistics 80(4), 1998), estimated by equally
weighted cosines, with Student's t as the distribution (Mueller, J. Econometrics 141(2), 2007; Lazarus, Lewis, Stock and
Watson, J. Business & Economic Statistics 36(4), 2018, who recommend 0.4 T^(2/3) cosines). T counts origins that are a
horizon apart. With too few of them the differences of series are compared instead, which supposes that series are
independent, as the sentence then says. Of several comparisons, p is that of Holm (Scand. J. Statistics 6(2), 1979).
"""

from __future__ import annotations

import math
from typing import Mapping, NamedTuple, Sequence

import numpy as np

_LEAST = 8  # origins, or series, that a test needs: 0.4 * 8**(2/3) = 1.6 cosines, rounded to two
_LEVEL = 0.05  # a smaller p counts as a difference


class Windows(NamedTuple):
    """The windows whose errors are compared.

    Attributes:
        series: number of each window's series, int64 (N,).
        times: position in time of each one's origin, in rows, int64 (N,).
        horizon: rows of a forecast.
    """

    series: np.ndarray
    times: np.ndarray
    horizon: int


class Comparison(NamedTuple):
    """The errors of two models in the same windows.

    Attributes:
        better: the model with the smaller mean.
        worse: the other one.
        wins: windows in which the error of ``better`` is smaller.
        windows: their number.
        p: two-sided, after Holm's correction; None: there are too few windows for a test.
        text: the comparison in words.
    """

    better: str
    worse: str
    wins: int
    windows: int
    p: float | None
    text: str


def compare(metric: str, errors: Mapping[str, np.ndarray], windows: Windows) -> list[Comparison]:
    """Compare the model with the smallest mean error with each other one.

    Args:
        metric: name of the errors, for the text.
        errors: of each window, float64 (N,), by the name of the model; NaN where a window has no truth.
        windows: the N windows.
    """
    complete = ~np.isnan(np.stack([*errors.values()])).any(axis=0)
    selected = Windows(windows.series[complete], windows.times[complete], windows.horizon)
    ranked = sorted((float(values[complete].mean()), name) for name, values in errors.items()) if complete.any() else []
    if len(ranked) < 2:
        return []
    best, tests = ranked[0], []
    for mean, name in ranked[1:]:
        difference = errors[best[1]][complete] - errors[name][complete]
        tests.append((mean, name, int((difference < 0).sum()), *_test(difference, selected)))
    adjusted = _holm([p for *_, p, _ in tests])
    count, comparisons = int(complete.sum()), []
    for (mean, name, wins, _, doubt), p in zip(tests, adjusted):
        share = f"in {wins} of {count} windows"
        values = f"{metric} {best[0]:.4g} against {mean:.4g}"
        if p is None:
            text = f"{best[1]} is better than {name} {share} ({values}): {doubt}"
        elif p < _LEVEL:
            text = f"{best[1]} is better than {name} {share} ({values}); {_p_text(p)}{doubt}"
        else:
            text = f"no difference between {best[1]} and {name} that these {count} windows show ({values}, {share}); "
            text += f"{_p_text(p)}{doubt}"
        comparisons.append(Comparison(best[1], name, wins, count, p, text))
    return comparisons


def _test(difference: np.ndarray, windows: Windows) -> tuple[float | None, str]:
    """The p value of the mean difference of N windows, and what the test supposes; p is None if they are too few."""
    if not difference.any():
        return 1.0, ""
    deviation = difference - difference.mean()
    distinct, origins = np.unique(windows.times, return_inverse=True)
    independent = min(len(distinct), int(distinct[-1] - distinct[0]) // windows.horizon + 1)
    if independent >= _LEAST:
        sums, count = np.bincount(origins, weights=deviation), len(distinct)
        cosines = max(round(0.4 * independent ** (2 / 3)), 1)
        waves = np.cos(np.pi * np.outer(np.arange(1, cosines + 1), np.arange(count) + 0.5) / count)
        long_run = float(np.square(waves @ sums * math.sqrt(2.0 / count)).mean())
        return _p(difference, math.sqrt(long_run * count), cosines), ""
    present, numbers = np.unique(windows.series, return_inverse=True)
    number = len(present)
    if number < _LEAST:
        return None, f"too few windows for a test ({independent} origins that are a horizon apart, {number} series)"
    sums = np.bincount(numbers, weights=deviation)
    spread = math.sqrt(float(np.square(sums).sum()) * number / (number - 1))
    doubt = f" if the {number} series are independent (only {independent} origins are a horizon apart)"
    return _p(difference, spread, number - 1), doubt


def _p(difference: np.ndarray, spread: float, degrees: int) -> float:
    """The p value of the sum of the differences, given its standard deviation."""
    return 0.0 if spread == 0.0 else student_p(float(difference.sum()) / spread, degrees)


def student_p(t: float, degrees: int) -> float:
    """The probability that Student's t is at least as far from 0 as ``t``.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine, remainder = math.sin(angle), math.cos(angle), degrees % 2
    term, total = (cosine, 0.0) if remainder else (1.0, 0.0)
    for power in range(1 + remainder, degrees, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    inside = (angle + sine * total) * 2 / math.pi if remainder else sine * total
    return min(max(1.0 - inside, 0.0), 1.0)


def _holm(values: Sequence[float | None]) -> list[float | None]:
    """The p values after Holm's correction."""
    ranked, largest = sorted((p, number) for number, p in enumerate(values) if p is not None), 0.0
    adjusted: list[float | None] = [None] * len(values)
    for rank, (p, number) in enumerate(ranked):
        adjusted[number] = largest = max(largest, min(1.0, p * (len(ranked) - rank)))
    return adjusted


def _p_text(p: float) -> str:
    """The p value as journals write it: ``p = .002``."""
    return "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".")
