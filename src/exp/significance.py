"""Is a difference more than noise? Paired tests over seeds, and over test samples that depend on their neighbors.

Needs numpy alone. A test over seeds asks whether another training would show the difference, a test over samples
whether other test data would. A result that should hold for both needs both.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

ALPHA = 0.05
"""A difference with a smaller p-value is more than noise; intervals cover 1 - ALPHA."""
POWER = 0.8
"""Probability with which :func:`pairs_needed` pairs show a difference."""
_NORMAL = statistics.NormalDist().inv_cdf(1 - ALPHA / 2)
_DRAWS = 2000  # of the bootstrap: the error of a p-value near 0.05 is 0.005
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_MOST_PAIRS = 1000  # more are not asked for


class Difference(NamedTuple):
    """A difference of two means, ``a - b``, in the unit of the values.

    Attributes:
        value: the difference.
        low: lower end of its 95% interval.
        high: upper end of its 95% interval.
        p: two-sided p-value of "there is no difference".
        n: what was compared: pairs, the smaller number of values, or samples.
        block: number of neighboring samples that the bootstrap drew together; 1: samples counted as independent.
    """

    value: float
    low: float
    high: float
    p: float
    n: int
    block: int = 1


def compare_pairs(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """Compare two configurations by values that belong together, such as those of equal seeds: the paired t-test.

    Args:
        a: a value of each pair.
        b: the other value of each pair, in the same order.

    Returns:
        None for fewer than two pairs, which say nothing about the noise.

    Raises:
        ValueError: ``a`` and ``b`` have different lengths.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values cannot be paired with {len(b)}")
    differences = [first - second for first, second in zip(a, b)]
    if len(differences) < 2:
        return None
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return _t_test(statistics.mean(differences), error, len(differences) - 1, len(differences))


def compare_means(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """Compare two configurations whose values do not belong together: Welch's t-test (Biometrika 34, 1947).

    Args:
        a: the values of one.
        b: those of the other; their number may differ.

    Returns:
        None if one of them has fewer than two values.
    """
    if min(len(a), len(b)) < 2:
        return None
    first, second = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    error = math.sqrt(first + second)
    parts = first**2 / (len(a) - 1) + second**2 / (len(b) - 1)
    # Equal values have no noise; the degrees of freedom are then of no importance.
    degrees = (first + second) ** 2 / parts if parts else 1.0
    return _t_test(statistics.mean(a) - statistics.mean(b), error, degrees, min(len(a), len(b)))


def compare_samples(differences: Any, block: int | None = None, draws: int = _DRAWS, seed: int = 0) -> Difference:
    """Compare two models on the same test samples: the bootstrap over blocks of neighboring samples.

    Windows of a series overlap, and their errors depend on each other: a test that takes them as independent finds
    differences that are none. Blocks keep the dependence (Künsch, Annals of Statistics 17(3), 1989); they are drawn
    from a circle, so that each sample counts alike (Politis and Romano, 1992). The interval is the symmetric one of
    the percentiles (Hall, 1988), which agrees with the p-value; it is wider by as much as Student's t is wider than a
    normal distribution for as many values as there are blocks, since a few blocks show too little of the noise.

    Args:
        differences: differences of the errors, (N,) in the order of time, or (N, S) for S series, whose rows are
            drawn together, because series depend on each other, too. NaN: there is no value.
        block: samples to draw together, such as the horizon of windows that overlap; None: :func:`automatic_block`.
        draws: number of samples of the bootstrap.
        seed: of its random numbers.

    Raises:
        ValueError: there is no value.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values.reshape(len(values), -1)
    sums, counts = np.nansum(values, axis=1), (~np.isnan(values)).sum(axis=1).astype(np.float64)
    if not counts.sum():
        raise ValueError("there is no sample to compare")
    number, mean = len(sums), sums.sum() / counts.sum()
    if block is None:
        block = automatic_block(sums - mean * counts)
    block = max(1, min(block, number))
    # Sums over each block of the circle; a bootstrap sample is a sum of such sums, cut to N samples.
    rest = number % block
    whole, last = ([_circular_sums(part, length) for part in (sums, counts)] for length in (block, rest))
    random, means = np.random.RandomState(seed), np.empty(draws)
    for draw in range(draws):
        starts = random.randint(number, size=number // block)
        total, count = (part[starts].sum() for part in whole)
        if rest:
            start = random.randint(number)
            total, count = total + last[0][start], count + last[1][start]
        means[draw] = total / count if count else mean
    blocks = max(number / block, 2.0)
    widening = _t_quantile(1 - ALPHA / 2, blocks - 1) / _NORMAL * math.sqrt(blocks / (blocks - 1))
    distances = np.abs(means - mean) * widening
    # Rounding must not make samples with equal differences a doubtful case.
    as_large = int((distances >= abs(mean) * (1 - 1e-9)).sum())
    value, reach, p = float(mean), float(np.quantile(distances, 1 - ALPHA)), (1 + as_large) / (1 + draws)
    return Difference(value, value - reach, value + reach, p, number, block)


def automatic_block(values: Any) -> int:
    """The length of the blocks for :func:`compare_samples`, from the correlation of neighbors.

    That of Politis and White (Econometric Reviews 23(1), 2004; corrected by Patton, Politis and White, 28(4), 2009)
    for a circular bootstrap: long where samples a long way apart still depend on each other, 1 for independent ones.

    Args:
        values: (N,), in the order of time, without NaN.
    """
    values = np.asarray(values, dtype=np.float64)
    values = values - values.mean()
    number = len(values)
    variance = float(values @ values) / number
    if number < 8 or variance <= 0:
        return 1
    window = max(5, math.ceil(math.sqrt(math.log10(number))))
    most = min(math.ceil(math.sqrt(number)) + window, number - 1)
    covariance = [float(values[lag:] @ values[: number - lag]) / number for lag in range(most + 1)]
    limit = 2 * math.sqrt(math.log10(number) / number) * variance
    # The first lag after which the correlations stay insignificant for a while.
    quiet = (lag for lag in range(most - window + 1)
             if all(abs(value) < limit for value in covariance[lag + 1 : lag + 1 + window]))  # fmt: skip
    last = next(quiet, most)
    lags = range(-min(2 * last, most), min(2 * last, most) + 1)
    taper = {lag: 1.0 if 2 * abs(lag) <= last else 2 * (1 - abs(lag) / (2 * last)) if last else 1.0 for lag in lags}
    spectrum = sum(taper[lag] * covariance[abs(lag)] for lag in lags)
    slope = sum(taper[lag] * abs(lag) * covariance[abs(lag)] for lag in lags)
    length = (1.5 * number) ** (1 / 3) * abs(slope / spectrum) ** (2 / 3) if spectrum > 0 else math.inf
    return max(1, math.ceil(min(length, 3 * math.sqrt(number), number / 3)))


def pairs_needed(value: float, low: float, high: float, count: int) -> int | None:
    """How many pairs (seeds) would show a difference of this size, with a probability of 80%.

    The usual estimate from a pilot: the deviation and the difference are taken from the pairs that there are, so it is
    rough.

    Args:
        value: the difference.
        low: lower end of its interval by :func:`compare_pairs`.
        high: upper end of this interval.
        count: the number of pairs.

    Returns:
        None if the difference is zero, or more than a thousand would be needed.
    """
    deviation = (high - low) / 2 / _t_quantile(1 - ALPHA / 2, count - 1) * math.sqrt(count)
    for needed in range(2, _MOST_PAIRS + 1 if value else 0):
        quantiles = _t_quantile(1 - ALPHA / 2, needed - 1) + _t_quantile(POWER, needed - 1)
        if abs(value) * math.sqrt(needed) >= deviation * quantiles:
            return needed
    return None


def adjusted_p(values: Sequence[float]) -> list[float]:
    """P-values of several comparisons, so that the probability of any false finding is kept (Holm, 1979).

    Args:
        values: the p-values, in any order.
    """
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def _circular_sums(values: Any, length: int) -> Any:
    """The sum of ``length`` values from each place of a circle on."""
    totals = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[:length]]))])
    return totals[length : length + len(values)] - totals[: len(values)]


def _t_test(value: float, error: float, degrees: float, count: int) -> Difference:
    reach = _t_quantile(1 - ALPHA / 2, degrees) * error
    # Without noise, any difference is more than noise.
    p = 2 * (1 - _t_probability(abs(value) / error, degrees)) if error else float(value == 0)
    return Difference(value, value - reach, value + reach, p, count)


def _t_probability(t: float, degrees: float) -> float:
    """The probability that Student's t is at most ``t`` >= 0: with t = sqrt(degrees) tan(angle), a smooth integral."""
    angle = math.atan(t / math.sqrt(degrees))
    integral = angle / 2 * float(_WEIGHTS @ np.cos(angle / 2 * (_NODES + 1)) ** (degrees - 1))
    log_constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(math.pi) / 2
    return min(1.0, 0.5 + math.exp(log_constant) * integral)


def _t_quantile(probability: float, degrees: float) -> float:
    """Of Student's t, for probabilities of at least one half; by bisection."""
    low, high = 0.0, 1.0
    inside: Callable[[float], bool] = lambda t: _t_probability(t, degrees) < probability  # noqa: E731
    while inside(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) else (low, middle)
    return high
