"""The quantiles of forecasts, whatever they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, Mapping, NamedTuple, Sequence

import torch

from exp.data.transfer import move
from exp.engine.wrapper import forward, preprocessed, unwrapped
from exp.forecasting.intervals.conformal import GRID, quantile_levels

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Band", "Intervals", "Spread"]


class Band(NamedTuple):
    """A central interval.

    Attributes:
        level: the coverage that it aims at.
        lower: (B, H, C), standardised.
        upper: (B, H, C), standardised.
    """

    level: float
    lower: Any
    upper: Any


class Spread:
    """What a model itself says of how sure it is: standard deviations, or quantiles.

    A model offers it by an attribute ``spread``: ``"std"`` or ``"quantiles"``. Then ``forward(..., mode="spread")``
    gives standard deviations (B, H, C) of a Gaussian around its forecast, or quantiles (B, H, C, Q) at its levels
    ``quantiles``, ascending and not crossing, of which the one at 0.5 is its forecast; all standardised.

    Args:
        session: the session.
        model: on its device.
    """

    def __init__(self, session: Session, model: Any) -> None:
        self.session = session
        self.model = unwrapped(model)

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> torch.Tensor:
        """For a batch that may lie on the CPU; float32, on the model's device."""
        batch = move(batch, self.session.device)
        with self.session.backend.autocast(self.session.config.precision):
            found: torch.Tensor = forward(self.model, preprocessed(self.model, batch), "spread")
        return found.float()


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

    From the median outwards each is at least as far out as the one before it, also where a correction is negative.

    Args:
        kind: :data:`exp.forecasting.intervals.keys.RESIDUALS`, ``std`` or ``quantiles``.
        levels: coverages asked for, ascending.
        taus: quantile levels, ascending: both ends of each interval, and the median.
        offsets: float32 (K, H, C), or (K, 1, 1) where all places have the same.
        spread: of a model that says it; None with residuals.
        calibrated: whether ``offsets`` come from the validation part.
        record: what the result of a run says of them.
        adapts: how fast they adapt, measured beside them (:mod:`exp.forecasting.intervals.adaptive`); 0: not at all.
        budget: bytes that this may take.

    Attributes:
        scored: places in ``taus`` of the levels that CRPS and WQL are made of, whatever levels are asked for: those of
            :data:`exp.forecasting.intervals.conformal.GRID`; all of a model's own.
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
        adapts: float = 0.0,
        budget: int = 2**28,
    ) -> None:
        self.kind, self.levels, self.taus = kind, list(levels), list(taus)
        self.offsets = offsets
        self.calibrated = calibrated
        self.record = record or {}
        self.adapts, self.budget = adapts, budget
        self._spread = spread
        self._numbers = {round(tau, 6): number for number, tau in enumerate(self.taus)}
        scored = self._numbers if kind == "quantiles" else quantile_levels(GRID)
        self.scored = [self._numbers[tau] for tau in scored if tau in self._numbers]
        self._ends = [[self.number((1.0 + sign * level) / 2.0) for sign in (-1, 1)] for level in self.levels]

    @property
    def gaussian(self) -> bool:
        """Whether each forecast is a Gaussian."""
        return self.kind == "std" and not self.calibrated

    def number(self, tau: float) -> int:
        """The place of a quantile level in ``taus``."""
        return self._numbers[round(tau, 6)]

    def spread(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """What the model says of a batch (:class:`Spread`); None with residuals."""
        return None if self._spread is None else self._spread(batch)

    def quantiles(self, forecast: torch.Tensor, spread: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
        """All quantiles, from the median down, and then up, each with its place in ``taus``.

        One after the other: together they may be larger than the device's memory.

        Args:
            forecast: (B, H, C), standardised, float32.
            spread: of :meth:`spread`, on the same device.

        Yields:
            A place and (B, H, C), standardised.
        """
        if self.offsets.device != forecast.device:
            self.offsets = self.offsets.to(forecast.device)
        middle = forecast if self.kind == "quantiles" else self._raw(self.number(0.5), forecast, spread)
        below = sum(tau < 0.5 for tau in self.taus)
        above = below + (0.5 in self._numbers)
        if above > below:
            yield below, middle
        for numbers, outer in ((range(below)[::-1], torch.minimum), (range(above, len(self.taus)), torch.maximum)):
            last = middle
            for number in numbers:
                last = outer(last, self._raw(number, forecast, spread))
                yield number, last

    def _raw(self, number: int, forecast: torch.Tensor, spread: torch.Tensor | None) -> torch.Tensor:
        offset = self.offsets[number]
        if self.kind == "quantiles":
            assert spread is not None
            return spread[..., number] + offset
        return forecast + (offset if spread is None else offset * spread)

    def is_end(self, number: int) -> bool:
        """Whether a place in ``taus`` is an end of an interval asked for."""
        return any(number in ends for ends in self._ends)

    def bands(self, quantiles: Mapping[int, torch.Tensor]) -> list[Band]:
        """The intervals asked for.

        Args:
            quantiles: of :meth:`quantiles`, those that :meth:`is_end` is true of, by place.
        """
        return [Band(level, quantiles[low], quantiles[high]) for level, (low, high) in zip(self.levels, self._ends)]
