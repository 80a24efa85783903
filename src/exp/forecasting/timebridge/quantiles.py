"""Quantile heads: their levels, their loss, and how they are kept from crossing."""

from __future__ import annotations

from typing import Sequence

import torch

from exp.errors import ConfigError
from exp.forecasting.known import known_difference, mean_over_known

__all__ = ["MEDIAN", "check_quantiles", "quantile_loss", "uncrossed"]

MEDIAN = 0.5


def check_quantiles(quantiles: Sequence[float]) -> list[float]:
    """The levels as floats.

    Raises:
        ConfigError: they are not between 0 and 1, not ascending, or the median is not among them or alone.
    """
    levels = [float(level) for level in quantiles]
    shown = f"model.quantiles={levels}"
    if not all(0.0 < level < 1.0 for level in levels):
        raise ConfigError(f"{shown}: each must be between 0 and 1, such as [0.1,0.5,0.9]")
    if levels != sorted(set(levels)):
        raise ConfigError(f"{shown} must ascend; write {sorted(set(levels))}")
    if MEDIAN not in levels or len(levels) < 2:
        wanted = sorted({*levels, MEDIAN})
        raise ConfigError(
            f"{shown} must have 0.5, which is the forecast, and another one"
            + (f"; write {wanted}" if len(wanted) > 1 else ", or be null")
        )
    return levels


def quantile_loss(
    others: Sequence[torch.Tensor], y: torch.Tensor, levels: Sequence[float], known: torch.Tensor | None = None
) -> torch.Tensor:
    """Twice the pinball loss (Koenker and Bassett, Econometrica 46(1), 1978), averaged over levels, 0-dim, float32.

    Twice, so that the one of the median is the mean absolute error.

    Args:
        others: the quantiles, by level, (B, H, C) each.
        y: (B, H, C), the truth.
        levels: between 0 and 1.
        known: (B, H, C), 1 where ``y`` has a truth, else 0; None: everywhere.
    """
    losses = []
    for quantile, tau in zip(others, levels):
        error = y - quantile if known is None else known_difference(y, quantile, known)
        loss = torch.maximum(tau * error, (tau - 1.0) * error)
        losses.append(loss.mean() if known is None else mean_over_known(loss, known))
    return 2.0 * torch.stack(losses).mean()


def uncrossed(forecast: torch.Tensor, others: Sequence[torch.Tensor], median: int) -> list[torch.Tensor]:
    """Quantiles in ascending order, with the forecast as the median.

    From the median outwards each is at least as far out as the one before it. The forecast stays as it is, and only
    minimum and maximum are needed, which every card has; sorting is not to be had on all of them.

    Args:
        forecast: any shape.
        others: of the same shape; the first ``median`` of them are below the median, ascending.
        median: its place among all.
    """
    lower = [forecast]
    for quantile in reversed(others[:median]):
        lower.append(torch.minimum(lower[-1], quantile))
    upper = [forecast]
    for quantile in others[median:]:
        upper.append(torch.maximum(upper[-1], quantile))
    return [*reversed(lower), *upper[1:]]
