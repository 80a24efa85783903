"""Two simple forecasters. Shapes: batch B, lookback L, horizon H, series C."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from exp.errors import ConfigError
from exp.forecasting.model import Forecaster, masked_difference, masked_mean

__all__ = ["DLinear", "SeasonalNaive"]


class _Forecast(Forecaster):
    """A model whose loss is the squared error."""

    def forecast(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, C) to (B, H, C)."""
        raise NotImplementedError

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        observed: torch.Tensor | None = None,
        mode: str = "tensor",
        **_: Any,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The forecast (B, H, C); with mode ``loss`` the mean squared error against ``y`` (B, H, C), over the cells in
        which ``observed`` (B, H, C) is 1, or over all cells if it is None.
        """
        forecast = self.forecast(x)
        if mode != "loss":
            return forecast
        assert y is not None
        if observed is None:
            return {"loss": F.mse_loss(forecast, y)}
        return {"loss": masked_mean(masked_difference(forecast, y, observed).square(), observed)}


class DLinear(_Forecast):
    """A linear layer for the trend, and one for the remainder (Zeng et al., AAAI 2023, arXiv 2205.13504).

    All series share both layers.

    Args:
        lookback: input rows of a window (L).
        horizon: forecast rows of a window (H).
        channels: number of series (C).
        kernel: rows of the moving average that is the trend; at both ends the first and the last row are repeated.

    Raises:
        ConfigError: the kernel is even.
    """

    def __init__(self, lookback: int, horizon: int, channels: int, kernel: int = 25) -> None:
        super().__init__()
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


class SeasonalNaive(_Forecast):
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
