"""What forecasting adds to exp: typed keys, and models and data that can be combined."""

from __future__ import annotations

from exp.forecasting.keys import (
    ForecastingDataConfig,
    ForecastingModelConfig,
    IntervalKeys,
    ModuleForecasterConfig,
    NaiveConfig,
    PredictKeys,
    QuantilesConfig,
)
from exp.forecasting.tasks import Backtest, Calibrate
from exp.forecasting.timebridge.keys import TimeBridgeConfig, TimeBridgePriorConfig
from exp.plugins import Family, Plugin

_SMALL = (
    "data.lookback=96", "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "model.num_patches_out=null",
    "global_batch_size=32",
)  # fmt: skip
plugin = Plugin(
    structures={
        "model/forecaster": ModuleForecasterConfig,
        "model/naive": NaiveConfig,
        "model/output/quantiles": QuantilesConfig,
        "model/timebridge": TimeBridgeConfig,
        "model/timebridge_prior": TimeBridgePriorConfig,
        "data/forecasting": ForecastingDataConfig,
        "task/backtest": Backtest,
        "task/calibrate": Calibrate,
    },
    keys={"task/eval": IntervalKeys, "task/predict": PredictKeys},
    families={"forecasting": Family(ForecastingModelConfig, ForecastingDataConfig, "timebridge_small", _SMALL)},
    outputs=("forecasts",),
)
