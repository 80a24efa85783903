"""Quantiles of forecasts, from residuals, standard deviations or a model's own quantiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, Mapping, NamedTuple, Sequence

import torch

from exp.data.loader import move
from exp.engine.wrapper import forward, preprocessed

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["GRID", "LEAST_STD", "Band", "Intervals", "Spread", "central_pairs", "percent", "quantile_levels"]

# Central intervals that CRPS and WQL are computed from, independent of `task.intervals`; with the median, 19 quantiles.
GRID = tuple(round(0.1 * step, 1) for step in range(1, 10))

# Smallest standard deviation (standardized) that errors are divided by: over a flat lookback a model gives 0.
LEAST_STD = 1e-6


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


class Band(NamedTuple):
    """A central interval.

    Attributes:
        level: nominal coverage, between 0 and 1.
        lower: (B, H, C), standardized.
        upper: (B, H, C), standardized.
    """

    level: float
    lower: Any
    upper: Any


class Spread(NamedTuple):
    """A model's own spread: standard deviations, or quantiles.

    A model that has one sets the attribute ``spread`` to ``"std"`` or ``"quantiles"``. ``forward(..., mode="spread")``
    then returns standard deviations (B, H, C) of a Gaussian around its forecast, or quantiles (B, H, C, Q) at the
    levels of its attribute ``quantiles``, ascending and not crossing; the one at 0.5 is the forecast. All are
    standardized.

    Args:
        session: the session.
        model: on its device, not wrapped.
    """

    session: Session
    model: Any

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> torch.Tensor:
        """The spread of a batch on any device; float32, on the device of the batch."""
        moved = move(batch, self.session.device)
        with self.session.backend.autocast(self.session.config.precision):
            found: torch.Tensor = forward(self.model, preprocessed(self.model, moved), "spread")
        return found.float().to(batch["x"].device)


class Intervals:
    """Quantiles of forecasts at some levels: ``base + offset * scale`` for each step and channel.

    ======================  ================  ==========================  =====================
    made of                 base              offset                      scale
    ======================  ================  ==========================  =====================
    residuals               the forecast      of the residuals            1
    standard deviations     the forecast      of a standard Gaussian, or  standard deviation
                                              of residuals / deviations
    quantiles               the model's       0, or of their errors       1
    ======================  ================  ==========================  =====================

    Quantiles do not cross, also where a correction is negative: from the median outwards each is at least as far out as
    the one before it.

    Args:
        kind: ``residuals``, ``std`` or ``quantiles``.
        levels: coverages asked for, ascending.
        taus: the K quantile levels, ascending: both ends of each interval, and the median.
        offsets: float32 (K, H, C), or (K, 1, 1) if they are the same for all steps and channels.
        spread: the model's own spread; None with residuals.
        calibrated: whether ``offsets`` come from the validation split.
        record: entries for the result of a run.

    Attributes:
        scored: positions in ``taus`` of the levels that CRPS and WQL are computed from: those of :data:`GRID`, or with
            ``quantiles`` all.
    """

    def __init__(
        self,
        kind: str,
        levels: Sequence[float],
        taus: Sequence[float],
        offsets: torch.Tensor,
        spread: Spread | None = None,
        calibrated: bool = True,
        record: dict[str, Any] | None = None,
    ) -> None:
        self.kind, self.levels, self.taus, self.offsets = kind, list(levels), list(taus), offsets
        self.gaussian = kind == "std" and not calibrated
        self.record = record or {}
        self._spread = spread
        self._numbers = {round(tau, 6): number for number, tau in enumerate(self.taus)}
        scored = self._numbers if kind == "quantiles" else quantile_levels(GRID)
        self.scored = [self._numbers[tau] for tau in scored if tau in self._numbers]
        ends = [[round((1.0 + sign * level) / 2.0, 6) for sign in (-1, 1)] for level in self.levels]
        self._ends = [[self._numbers[tau] for tau in pair] for pair in ends]

    def spread(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """The model's spread for a batch (:class:`Spread`); None with residuals."""
        return None if self._spread is None else self._spread(batch)

    def quantiles(self, forecast: torch.Tensor, spread: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
        """All quantiles: the median, then those below it downwards, then those above it upwards.

        One at a time, since all together may not fit into the device's memory.

        Args:
            forecast: (B, H, C), standardized, float32.
            spread: of :meth:`spread`, on the same device.

        Yields:
            The position in ``taus``, and the quantile (B, H, C), standardized.
        """
        self.offsets = self.offsets.to(forecast.device)
        below, median = sum(tau < 0.5 for tau in self.taus), self._numbers.get(0.5)
        middle = forecast if self.kind == "quantiles" else self._raw(below, forecast, spread)
        if median is not None:
            yield median, middle
        above = range(below + (median is not None), len(self.taus))
        for numbers, outer in ((reversed(range(below)), torch.minimum), (above, torch.maximum)):
            last = middle
            for number in numbers:
                last = outer(last, self._raw(number, forecast, spread))
                yield number, last

    def _raw(self, number: int, forecast: torch.Tensor, spread: torch.Tensor | None) -> torch.Tensor:
        offset = self.offsets[number]
        if spread is None:
            return forecast + offset
        return spread[..., number] + offset if self.kind == "quantiles" else forecast + offset * spread

    def bands(self, quantiles: Mapping[int, torch.Tensor]) -> list[Band]:
        """The intervals of ``levels``.

        Args:
            quantiles: those of :meth:`quantiles`, by position in ``taus``.
        """
        return [Band(level, quantiles[low], quantiles[high]) for level, (low, high) in zip(self.levels, self._ends)]

    def is_end(self, number: int) -> bool:
        """Whether a position in ``taus`` is an end of an interval of ``levels``."""
        return any(number in ends for ends in self._ends)
