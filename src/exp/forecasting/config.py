"""The typed keys of forecasting: each with its type, its default and its unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Mapping, Optional

from omegaconf import MISSING

from exp.plugins import Family, Plugin

__all__ = [
    "DATASETS", "SPLITS", "ForecastingDataConfig", "ForecastingModelConfig", "IntervalKeys", "PredictKeys",
    "TimeBridgeConfig", "TimeBridgePriorConfig", "plugin",
]  # fmt: skip

SPLITS = ("ett_hour", "ett_minute", "ratio", "pems", "test_only")
# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class ForecastingModelConfig:
    """Keys of every forecasting model; ``conf/model/timebridge.yaml`` takes their values from the data.

    ``forward`` gets ``x`` (B, lookback, channels), ``marks`` (B, lookback, time features), ``y`` (B, horizon, channels)
    and ``index`` (B,), and predicts (B, horizon, channels). Where some cells of ``y`` have no truth
    (``data.targets``, ``data.future_covariates``, ``data.missing``), it also gets ``observed`` (B, horizon,
    channels): 1 where ``y`` has a truth, else 0. ``y`` is NaN where ``observed`` is 0, so that a loss that ignores
    ``observed`` fails. With ``data.future_covariates`` it also gets ``future`` (B, horizon, covariates +
    time features).
    """

    _target_: str = MISSING
    channels: int = MISSING
    lookback: int = MISSING
    horizon: int = MISSING


@dataclass
class TimeBridgeConfig(ForecastingModelConfig):
    """TimeBridge (:class:`exp.forecasting.timebridge.TimeBridge`; Liu et al., arXiv 2410.04442)."""

    _target_: str = "exp.forecasting.timebridge.TimeBridge"
    time_features: int = 4
    """Number of time-feature channels."""
    period: int = 24
    """Patch length in time steps if it divides the lookback L; otherwise the length is ``L // (L // period)``."""
    num_patches_out: Optional[int] = None
    """Patches after down-sampling (``num_p`` in the authors' code); null: no fewer than before."""
    d_model: int = 128
    """Elements of a token."""
    d_ff: int = 128
    """Hidden units of the feed-forward layers."""
    num_heads: int = 8
    """Attention heads; must divide ``d_model``."""
    integrated_layers: int = 3
    """Layers of integrated attention (``ia_layers``): within a channel, between its patches."""
    downsampling_layers: int = 1
    """Layers that reduce the patches to ``num_patches_out`` (``pd_layers``)."""
    cointegrated_layers: int = 0
    """Layers of cointegrated attention (``ca_layers``): between channels."""
    stable_len: int = 6
    """Length of the moving average that detrends queries and keys."""
    attention_dropout: float = 0.15
    """Dropout probability of the attention weights."""
    dropout: float = 0.0
    """Dropout probability of all other layers."""
    alpha: float = 0.35
    """Weight of the frequency part of the loss."""
    quantiles: Optional[List[float]] = None
    """Quantile levels with a head each, such as ``[0.025,0.1,0.5,0.9,0.975]``; 0.5 is the forecast. null: the forecast
    alone."""


@dataclass
class TimeBridgePriorConfig(TimeBridgeConfig):
    """TimeBridge with a transition prior (:class:`exp.forecasting.timebridge.TimeBridgePrior`)."""

    _target_: str = "exp.forecasting.timebridge.TimeBridgePrior"
    prior: bool = True
    """Whether the model has a transition prior and regimes."""
    stationary_ratio: float = 0.7
    """Fraction of the channels, in [0, 1], whose latents are stationary; their number is rounded down."""
    lags: int = 1
    """Past steps that a stationary latent depends on."""
    regimes: int = 4
    """Number of regimes (states of the hidden Markov model)."""
    regime_channels: int = 4
    """Number of channels, from the first on, that the hidden Markov model observes."""
    regime_epochs: int = 1
    """Epochs before the regimes are frozen."""
    regime_embedding_dim: int = 2
    """Elements of a regime's embedding."""
    prior_hidden: Optional[int] = None
    """Units of the hidden layer of a stationary latent's MLP; null: 384, and 3 from 100 channels on."""
    nonstationary_hidden: Optional[int] = None
    """Units of the hidden layer of a nonstationary latent's MLP; null: ``prior_hidden`` if set, else 384."""
    prior_layers: int = 1
    """Hidden layers of both kinds of MLP."""
    prior_context: Optional[int] = None
    """Size to which a linear layer compresses the lagged latents before the MLPs; null: no compression for up to 100
    stationary latents, 10 for more."""
    reconstruction_weight: float = 1.0
    """Weight of the loss over the lookback."""
    stationary_kl_weight: float = 1e-3
    """Weight of the KL term of the stationary latents, per time step."""
    nonstationary_kl_weight: float = 1e-3
    """Weight of the KL term of the nonstationary latents, per time step."""
    hmm_weight: float = 1.0
    """Weight of the regimes' negative log-likelihood per time step. No other term trains the regimes."""
    initial_log_variance: float = -4.0
    """Added to the network's log-variance, so that training begins with little noise. It is a buffer: a checkpoint
    restores its own value."""
    sampling: bool = True
    """Whether training draws the latents; false: it uses their mean. Each device draws from its own generator, as for
    dropout, so losses are the same for any number of devices only with false."""


@dataclass
class ForecastingDataConfig:
    """A multivariate series on disk, cut into windows (:class:`exp.forecasting.data.dataset.ForecastingData`)."""

    preflight: ClassVar[str] = "exp.forecasting.data.preflight"
    """The module that checks the files before a run (:class:`exp.plugins.Plugin`)."""

    _target_: str = "exp.forecasting.data.dataset.ForecastingData"
    name: str = MISSING
    root: Optional[str] = None
    """Folder of the user's files; null: the sample data that come with exp."""
    file: str = MISSING
    """Path below ``root``: CSV (also ``.gz``), or ``.npz`` with an array ``data``, the format of PEMS."""
    archive_folder: Optional[str] = None
    """Folder below ``root`` in which the Time-Series-Library's archive has the file; searched after ``root``."""
    split: str = "ratio"
    """``ett_hour``, ``ett_minute`` (12/4/4 months of 30 days), ``ratio`` (70/10/20 %), ``pems`` (60/20/20 %,
    without common rows), or ``test_only``: all rows are for testing, with the weights of another run."""
    channels: int = MISSING
    """Number of series that are read."""
    derived_columns: Dict[str, Any] = field(default_factory=dict)
    """Columns that are computed: name -> {_target_: <path of a subclass of exp.forecasting.data.series.Column>, <its
    arguments>}. ``channels`` counts them."""
    inputs: Optional[List[str]] = None
    """Columns that are read, in this order; null: all."""
    targets: Optional[List[str]] = None
    """Columns of ``inputs`` that are forecast and scored; null: all but the covariates."""
    future_covariates: Optional[List[str]] = None
    """Columns whose future values are known. They are inputs and not scored; ``future`` has their values over the
    horizon beside its time features. ``[]``: the time features alone."""
    missing: str = "error"
    """Empty cells: ``error`` raises; ``mask`` fills them in the inputs and leaves them out of loss and metrics."""
    lookback: int = 720
    horizon: int = 96
    header: bool = True
    """Whether the first row has the names of the columns; false: numbers only, without dates."""
    date_column: Optional[str] = "date"
    """Name of the column of dates, upper or lower case; null: the file has none."""
    date_format: Optional[str] = None
    """Format of the dates, as for strftime: ``%d/%m/%Y %H:%M``; ``%s``: seconds since 1970. null: inferred from the
    column."""
    allow_gaps: bool = True
    """Whether the time between rows may vary; if it does, the run logs a warning with the count and the first row."""
    season: Optional[int] = None
    """Rows per season, for the seasonal naive forecast and the scale of MASE; null: by the calendar of the dates."""
    device_cache: Any = "auto"
    """Whether a card keeps the series and cuts windows: true, false, or ``auto``: if it takes little memory."""
    eval_batch_size: int = 128
    num_workers: int = 0


@dataclass
class IntervalKeys:
    """Keys of task=eval and task=predict for intervals around forecasts (``docs/guide/intervals.md``)."""

    intervals: Optional[List[float]] = None
    """Coverages of the intervals around forecasts, such as ``[0.8,0.95]``; null: no intervals."""
    intervals_method: Optional[str] = None
    """``conformal``: from the residuals of the validation split, for any model; ``model``: the model's own quantiles or
    standard deviations; null: the model's quantiles if it has any, else ``conformal``."""
    intervals_calibrate: Optional[bool] = None
    """Whether the model's own quantiles or standard deviations are corrected on the validation split; null: standard
    deviations are, since a loss need not have fitted them to errors, and quantiles are not."""
    intervals_symmetric: bool = True
    """Whether the lower and the upper end use the same quantile of the absolute residual; false: separate quantiles of
    the signed residual."""


@dataclass
class PredictKeys(IntervalKeys):
    """Keys of task=predict for forecasts."""

    num_windows: int = 4
    """Number of windows, spread evenly over the test split, that get a file and pictures of their own."""
    backtest_file: Optional[str] = None
    """Name of a file in ``forecasts/`` for all windows of the test split as one long table: ``backtest.csv`` or
    ``backtest.parquet`` (needs pyarrow); null: no such file."""
    backtest_windows: Optional[int] = None
    """Number of windows in that table, spread evenly; null: all."""
    max_channels: int = 4
    """Channels per picture."""
    channels: Any = None
    """Channels that are drawn: ``all``, or names or numbers (from 0); null: the first ``max_channels``."""


def _published(name: str, folder: str, channels: int, file: str = "", **keys: Any) -> ForecastingDataConfig:
    return ForecastingDataConfig(
        name=name, file=file or f"{name}.csv", archive_folder=folder, channels=channels, **keys
    )


_ETT = "ETT-small"  # Zhou et al., Informer, arXiv 2012.07436; CC BY-ND 4.0, github zhouhaoyi/ETDataset
# Traffic flow in California, every 5 minutes, no dates; horizons 12, 24, 48, 96 in iTransformer's scripts (2310.06625).
_PEMS: Mapping[str, Any] = {"split": "pems", "header": False, "lookback": 96, "horizon": 12}
# The choices of `data=`: `csv` for any file, and the published data sets with the names, folders and splits of the
# Time-Series-Library's archive.
DATASETS: Mapping[str, ForecastingDataConfig] = {
    "csv": ForecastingDataConfig(),
    "electricity": _published("electricity", "electricity", 321),  # hourly
    "etth1": _published("ETTh1", _ETT, 7, split="ett_hour"),  # comes with exp
    "etth2": _published("ETTh2", _ETT, 7, split="ett_hour"),
    "ettm1": _published("ETTm1", _ETT, 7, split="ett_minute"),
    "ettm2": _published("ETTm2", _ETT, 7, split="ett_minute"),
    "exchange": _published("exchange_rate", "exchange_rate", 8),  # daily; Lai et al., arXiv 1703.07015
    # Weekly, 966 rows: the lookback and a horizon (24, 36, 48, 60) of the Time-Series-Library's scripts.
    "illness": _published("illness", "illness", 7, "national_illness.csv", lookback=36, horizon=24),
    "pems03": _published("PEMS03", "PEMS", 358, "PEMS03.npz", **_PEMS),
    "pems04": _published("PEMS04", "PEMS", 307, "PEMS04.npz", **_PEMS),
    "pems07": _published("PEMS07", "PEMS", 883, "PEMS07.npz", **_PEMS),
    "pems08": _published("PEMS08", "PEMS", 170, "PEMS08.npz", **_PEMS),
    "solar": _published("solar", "Solar", 137, "solar_AL.txt", header=False),  # 137 plants in Alabama, every 10 minutes
    "traffic": _published("traffic", "traffic", 862),  # hourly
    "weather": _published("weather", "weather", 21),  # every 10 minutes
}

_SMALL = (
    "data.lookback=96", "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "model.num_patches_out=null",
    "global_batch_size=32",
)  # fmt: skip
plugin = Plugin(
    structures={
        "model/timebridge": TimeBridgeConfig,
        "model/timebridge_prior": TimeBridgePriorConfig,
        "data/forecasting": ForecastingDataConfig,
    },
    choices={f"data/{choice}": keys for choice, keys in DATASETS.items()},
    keys={"task/eval": IntervalKeys, "task/predict": PredictKeys},
    families={"forecasting": Family(ForecastingModelConfig, ForecastingDataConfig, "timebridge_small", _SMALL)},
)
