"""Forecasts without training, from the lookback alone: what every model is compared with, and ``model=naive``."""

from __future__ import annotations

import torch

from exp.errors import ConfigError
from exp.forecasting.model import Forecaster

KINDS = {"last": "last value", "seasonal": "seasonal naive", "mean": "mean of the lookback", "drift": "drift"}
"""The kinds of :class:`Naive`, and their names in tables."""


def repeat_last(x: torch.Tensor, horizon: int, rows: int = 1) -> torch.Tensor:
    """Repeat the last ``rows`` rows of the lookback; (B, L, C) to (B, horizon, C)."""
    return torch.cat([x[:, -rows:]] * -(-horizon // rows), dim=1)[:, :horizon]


class Naive(Forecaster):
    """A forecast of the last value, the last season, the mean of the lookback, or the line from its first to its last
    value (Hyndman and Athanasopoulos, Forecasting: Principles and Practice, section 5.2). Without weights.

    Args:
        lookback: input rows of a window (L).
        horizon: forecast rows of a window (H).
        channels: number of series (C).
        kind: one of :data:`KINDS`.
        season: rows of a season.

    Raises:
        ConfigError: there is no such kind, or the lookback has no whole season.
    """

    def __init__(
        self, lookback: int, horizon: int, channels: int, kind: str = "last", season: int | None = None
    ) -> None:
        super().__init__(lookback, horizon)
        if kind not in KINDS:
            raise ConfigError(f"model.kind={kind} is not one of {', '.join(KINDS)}", key="model.kind")
        if kind == "seasonal" and (season is None or not 1 <= season <= lookback):
            raise ConfigError(
                f"model.kind=seasonal: model.season={season} must be from 1 to data.lookback={lookback}",
                key="model.season",
            )
        self.horizon, self.kind, self.season = horizon, kind, season or 1

    def forecast(self, x: torch.Tensor) -> torch.Tensor:
        """The forecast (B, H, C) of ``x`` (B, L, C)."""
        if self.kind == "mean":
            return x.mean(dim=1, keepdim=True).expand(-1, self.horizon, -1)
        if self.kind == "drift":
            slope = (x[:, -1:] - x[:, :1]) / max(x.shape[1] - 1, 1)
            steps = torch.arange(1, self.horizon + 1, dtype=x.dtype, device=x.device).view(1, -1, 1)
            return x[:, -1:] + slope * steps
        return repeat_last(x, self.horizon, self.season if self.kind == "seasonal" else 1)
