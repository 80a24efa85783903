"""The typed keys of both models, for exp's command line. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from exp.forecasting.keys import ForecastingModelConfig, OutputKeys
from exp.plugins import Plugin

__all__ = ["DLinearConfig", "SeasonalNaiveConfig", "plugin"]


@dataclass
class DLinearConfig(OutputKeys):
    """Keys of :class:`linear_forecasting.models.DLinear`."""

    _target_: str = "linear_forecasting.models.DLinear"
    kernel: int = 25
    """Rows of the moving average; must be odd."""


@dataclass
class SeasonalNaiveConfig(ForecastingModelConfig):
    """Keys of :class:`linear_forecasting.models.SeasonalNaive`."""

    _target_: str = "linear_forecasting.models.SeasonalNaive"
    period: int = 24
    """Rows of a season."""

    has_weights: ClassVar[bool] = False


plugin = Plugin(
    structures={"model/dlinear": DLinearConfig, "model/seasonal_naive": SeasonalNaiveConfig},
    config="linear_forecasting.conf",
)
