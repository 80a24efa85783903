"""The quantiles of forecasts, whatever they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Sequence

import torch

from exp.data.transfer import move
from exp.engine.wrapper import forward, preprocessed, unwrapped

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

    def quantile(self, number: int, forecast: torch.Tensor, spread: torch.Tensor | None) -> torch.Tensor:
        """The quantile at ``taus[number]``.

        Args:
            number: from 0.
            forecast: (B, H, C), standardised, float32.
            spread: of :meth:`spread`, on the same device.

        Returns:
            (B, H, C), standardised.
        """
        if self.offsets.device != forecast.device:
            self.offsets = self.offsets.to(forecast.device)
        offset = self.offsets[number]
        if self.kind == "quantiles":
            assert spread is not None
            return spread[..., number] + offset
        return forecast + (offset if spread is None else offset * spread)

    def bands(self, forecast: torch.Tensor, spread: torch.Tensor | None) -> Iterator[Band]:
        """The intervals asked for, one after the other; arguments as for :meth:`quantile`."""
        for level in self.levels:
            ends = [self.number((1.0 + sign * level) / 2.0) for sign in (-1, 1)]
            lower, upper = (self.quantile(number, forecast, spread) for number in ends)
            if self.kind == "quantiles" and self.calibrated:
                # A correction may be negative: ends that would pass one another meet at the forecast.
                lower, upper = torch.minimum(lower, forecast), torch.maximum(upper, forecast)
            yield Band(level, lower, upper)
