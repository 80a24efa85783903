"""Quantiles of conformity scores with the finite-sample rank of conformal prediction, and quantile levels."""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np

from exp.errors import ConfigError

__all__ = [
    "GRID",
    "LEAST_STD",
    "OrderedScores",
    "percent",
    "quantile_levels",
    "rank_of",
    "trapezoid_weights",
    "windows_needed",
]

GRID = tuple(round(0.1 * step, 1) for step in range(1, 10))
"""Central intervals of which CRPS and WQL are made, whatever is asked for: with the median, 19 quantiles."""

LEAST_STD = 1e-6
"""Standardised: the least standard deviation that errors are divided by. Over a flat lookback a model says 0."""


def quantile_levels(levels: Sequence[float]) -> list[float]:
    """The two ends of each central interval, and the median, ascending: 0.1, 0.5 and 0.9 for 0.8."""
    ends = {round((1.0 + sign * level) / 2.0, 6) for level in levels for sign in (-1, 1)}
    return sorted(ends | {0.5})


def percent(level: float) -> str:
    """A level as it is written in names: 80, 97.5."""
    return f"{round(100.0 * level, 4):g}"


def rank_of(count: int, level: float) -> int:
    """``ceil((count + 1) * level)``: the score of this rank (from 1) bounds a new one with probability ``level`` or
    more, if all are exchangeable (Vovk, Gammerman and Shafer 2005; Lei et al., JASA 113(523), 2018). It may be
    ``count + 1``: then nothing bounds it.
    """
    return math.ceil(round((count + 1) * level, 6))


def windows_needed(level: float) -> int:
    """The fewest scores of which one bounds a new one with probability ``level``."""
    return math.ceil(round(level / (1.0 - level), 6))


def trapezoid_weights(taus: Sequence[float]) -> list[float]:
    """Weights of the integral from 0 to 1 over values at ``taus`` that are 0 at both ends, by trapezoids."""
    ends = [0.0, *taus, 1.0]
    return [(after - before) / 2.0 for before, after in zip(ends, ends[2:])]


class OrderedScores:
    """Scores of windows at each place, in order.

    Args:
        scores: float32 (N, H, C); sorted in place; nan where the truth is missing.
        names: of the C channels.
        scored: positions of those that are forecast; the others do not count, and their bounds are 0 where they have no
            truth.

    Attributes:
        fewest: scores at the place that has the fewest.
    """

    def __init__(self, scores: np.ndarray, names: Sequence[str], scored: Sequence[int]) -> None:
        scores.sort(axis=0)  # nan last
        self.scores = scores
        self.counts = len(scores) - np.isnan(scores).sum(axis=0)  # (H, C)
        self.names, self.scored = names, list(scored)
        self.fewest = int(self.counts[:, self.scored].min())

    def bound(self, level: float, exact: bool = True) -> np.ndarray:
        """What a new score does not exceed with probability ``level``, (H, C).

        Args:
            level: between 0 and 1.
            exact: False: the largest score where there are too few of them.

        Raises:
            ConfigError: there are too few.
        """
        return self._at(self._ranks(level, exact) - 1)

    def lower_bound(self, level: float, exact: bool = True) -> np.ndarray:
        """What a new score does not fall below with probability ``level``, (H, C); as :meth:`bound` of their
        negatives.
        """
        return self._at(self.counts - self._ranks(level, exact))

    def _ranks(self, level: float, exact: bool) -> np.ndarray:
        if exact and rank_of(self.fewest, level) > self.fewest:
            raise ConfigError(
                f"task.intervals: {self._what_there_is()} to tell a quantile of {level:g} from, and "
                f"{windows_needed(level)} are needed; ask for a lower level, or give the validation part more rows"
            )
        ranks = np.ceil(np.round((self.counts + 1) * level, 6)).astype(np.int64)
        return np.clip(ranks, 1, self.counts)

    def _what_there_is(self) -> str:
        if self.fewest == len(self.scores):
            return f"there are {self.fewest} validation windows"
        step, number = np.argwhere(self.counts[:, self.scored] == self.fewest)[0]
        name = self.names[self.scored[number]]
        return f"{self.fewest} of {len(self.scores)} validation windows have a truth of {name} at step {step + 1}"

    def _at(self, places: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.take_along_axis(self.scores, places[None], axis=0)[0]
        return np.where(self.counts > 0, found, np.float32(0.0))
