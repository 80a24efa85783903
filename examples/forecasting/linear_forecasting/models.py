"""Two simple forecasters. Shapes: batch B, lookback L, horizon H, series C."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from exp.errors import ConfigError
from exp.forecasting.model import Forecaster

__all__ = ["DLinear", "SeasonalNaive"]


class DLinear(Forecaster):
    """A linear layer for the trend, and one for the remainder (Zeng et al., AAAI 2023, arXiv 2205.13504).

    All series share both layers.

    Args:
        lookback: input rows of a window (L).
        horizon: forecast rows of a window (H).
        channels: number of series (C).
        kernel: rows of the moving average that is the trend; at both ends the first and the last row are repeated.
        **keys: output, loss and instance normalization (:class:`exp.forecasting.model.Forecaster`).

    Raises:
        ConfigError: the kernel is even.
    """

    default_loss = "l2"

    def __init__(self, lookback: int, horizon: int, channels: int, kernel: int = 25, **keys: Any) -> None:
        super().__init__(lookback, horizon, **keys)
        if kernel < 1 or kernel % 2 == 0:
            raise ConfigError(f"model.kernel={kernel} must be odd, so that the average has a middle")
        self.kernel = kernel
        self.trend = nn.Linear(lookback, horizon)
        self.rest = nn.Linear(lookback, horizon)

    def forecast(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, C) to (B, H, C)."""
        series = x.transpose(1, 2)
        trend = F.avg_pool1d(F.pad(series, [self.kernel // 2] * 2, mode="replicate"), self.kernel, stride=1)
        return (self.trend(trend) + self.rest(series - trend)).transpose(1, 2)


class SeasonalNaive(Forecaster):
    """Repeats the last season; without weights.

    Args:
        lookback: input rows of a window (L).
        horizon: forecast rows of a window (H).
        channels: number of series (C).
        period: rows of a season.

    Raises:
        ConfigError: the lookback has no whole season.
    """

    def __init__(self, lookback: int, horizon: int, channels: int, period: int = 24) -> None:
        super().__init__()
        if not 1 <= period <= lookback:
            raise ConfigError(f"model.period={period} must be from 1 to data.lookback={lookback}")
        self.horizon, self.period = horizon, period

    def forecast(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, C) to (B, H, C)."""
        seasons = -(-self.horizon // self.period)
        return x[:, -self.period :].repeat(1, seasons, 1)[:, : self.horizon]
