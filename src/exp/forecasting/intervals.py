"""Quantiles and intervals of forecasts: of a model's output, corrected by split conformal prediction, within bounds."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import torch

from exp.forecasting.outputs import Output, uncross

# Central intervals that CRPS and WQL are computed from, independent of `task.intervals`; with the median, 19 quantiles.
SCORED_LEVELS = tuple(round(0.1 * step, 1) for step in range(1, 10))


def quantile_levels(levels: Sequence[float]) -> list[float]:
    """The two ends of each central interval, and the median, ascending: 0.1, 0.5 and 0.9 for 0.8."""
    ends = {round((1.0 + sign * level) / 2.0, 6) for level in levels for sign in (-1, 1)}
    return sorted(ends | {0.5})


def central_pairs(taus: Sequence[float]) -> list[tuple[float, float]]:
    """Quantile levels that are the two ends of a central interval: lower and upper, the narrowest first."""
    mirrored = {round(1.0 - tau, 6): tau for tau in taus}
    return [(mirrored[round(tau, 6)], tau) for tau in taus if tau > 0.5 and round(tau, 6) in mirrored]


def percent(level: float) -> str:
    """A level as text for names: 80, 97.5."""
    return f"{round(100.0 * level, 4):g}"


class Interval(NamedTuple):
    """A central interval.

    Attributes:
        level: nominal coverage, between 0 and 1.
        lower: (B, H, C), standardized.
        upper: (B, H, C), standardized.
    """

    level: float
    lower: Any
    upper: Any


class Intervals:
    """Quantiles of forecasts at some levels: those of an output, and for each step and column ``offset * spread``.

    Quantiles do not cross, also where a correction is negative: from the median outwards each is at least as far out as
    the one before it.

    Args:
        output: of the model; :class:`exp.forecasting.outputs.Points` for intervals from residuals alone.
        levels: coverages asked for, ascending.
        taus: the K quantile levels, ascending: both ends of each interval, and the median.
        offsets: corrections, float32 (K, H, C); None: there are none.
        record: entries for the result of a run.

    Attributes:
        scored: positions in ``taus`` of the levels that CRPS and WQL are computed from: those of :data:`SCORED_LEVELS`,
            or all of an output that knows no other.
        ends: positions in ``taus`` of the ends of ``levels``.
    """

    def __init__(
        self,
        output: Output,
        levels: Sequence[float],
        taus: Sequence[float],
        offsets: torch.Tensor | None = None,
        record: dict[str, Any] | None = None,
    ) -> None:
        self.output, self.levels, self.taus, self.offsets = output, list(levels), list(taus), offsets
        self.record = record or {}
        self._index_of = {round(tau, 6): number for number, tau in enumerate(self.taus)}
        scored = self._index_of if output.levels is not None else quantile_levels(SCORED_LEVELS)
        self.scored = [self._index_of[tau] for tau in scored if tau in self._index_of]
        ends = [[round((1.0 + sign * level) / 2.0, 6) for sign in (-1, 1)] for level in self.levels]
        self._pairs = [[self._index_of[tau] for tau in pair] for pair in ends]
        self.ends = {number for pair in self._pairs for number in pair}

    def quantiles(
        self, forecast: torch.Tensor, clip: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """All quantiles: the median, then those below it downwards, then those above it upwards.

        One at a time, since all together may not fit into the device's memory.

        Args:
            forecast: what the model predicts: values of its output, (B, H, C, D), or points (B, H, C); float32.
            clip: applies the bounds of the data.

        Yields:
            The position in ``taus``, and the quantile (B, H, C), standardized.
        """
        values = forecast if forecast.dim() == 4 else forecast.unsqueeze(-1)
        spread = self.output.spread(values)
        if self.offsets is not None:
            self.offsets = self.offsets.to(values.device)
        middle = self._index_of[0.5]
        order = [middle, *reversed(range(middle)), *range(middle + 1, len(self.taus))]
        raw = self.output.quantiles(values, [self.taus[number] for number in order])
        corrected = (
            quantile if self.offsets is None else quantile + self.offsets[number] * spread
            for number, quantile in zip(order, raw)
        )
        median = next(corrected)
        yield middle, clip(median)
        below = uncross(median, itertools.islice(corrected, middle), torch.minimum)
        above = uncross(median, corrected, torch.maximum)
        for number, quantile in zip(order[1:], itertools.chain(below, above)):
            yield number, clip(quantile)

    def central(self, quantiles: Mapping[int, torch.Tensor]) -> list[Interval]:
        """The intervals of ``levels``.

        Args:
            quantiles: those of :meth:`quantiles`, by position in ``taus``.
        """
        return [
            Interval(level, quantiles[low], quantiles[high]) for level, (low, high) in zip(self.levels, self._pairs)
        ]
