"""The typed keys of all forecasting models and data: each with its type, its default and its unit."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Dict, List, Optional

from omegaconf import MISSING

from exp.errors import ConfigError

FILE_KEYS = (
    "name", "root", "file", "archive_folder", "header", "date_column", "date_format", "allow_gaps", "id_column", "melt",
    "static", "missing", "split", "val_size", "test_size", "val_start", "test_start",
)  # fmt: skip
"""Keys of :class:`ForecastingDataConfig` that say where rows are, and which split they belong to."""
SPLITS = ("ett_hour", "ett_minute", "ratio", "pems", "test_only")
# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class ForecastingModelConfig:
    """Keys of every forecasting model; its YAML file takes their values from the data (``channels: ${data.channels}``).

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
class OutputKeys(ForecastingModelConfig):
    """Keys of a forecasting model with outputs (:class:`exp.forecasting.model.Forecaster`)."""

    output: Any = None
    """What the model gives, ``model/output=<choice>``, or {_target_: <path of a subclass of
    exp.forecasting.outputs.Output>, <its keys>}; null: points."""
    loss: Optional[str] = None
    """Loss of points: ``l1``, ``l2`` or ``huber`` (of standardized errors, linear from 1 on); null: that of the model's
    authors."""
    instance_norm: Optional[bool] = None
    """Whether each lookback is standardized by itself, and the forecast set back; null: as the model's authors do."""


@dataclass
class ModuleForecasterConfig(OutputKeys):
    """A torch module of anybody's as a forecaster (:class:`exp.forecasting.model.ModuleForecaster`)."""

    _target_: str = "exp.forecasting.model.ModuleForecaster"
    module: Dict[str, Any] = field(default_factory=lambda: {"_target_": MISSING})
    """``_target_``, a ``torch.nn.Module`` of a package in ``plugins`` or of yours, and its arguments."""


@dataclass
class QuantilesConfig:
    """Quantiles at some levels (:class:`exp.forecasting.outputs.Quantiles`)."""

    _target_: str = "exp.forecasting.outputs.Quantiles"
    levels: List[float] = field(default_factory=lambda: [0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975])
    """Levels of the quantiles, ascending; 0.5, the forecast, among them."""


@dataclass
class NaiveConfig(ForecastingModelConfig):
    """Keys of :class:`exp.forecasting.baselines.Naive`, which has nothing to train."""

    _target_: str = "exp.forecasting.baselines.Naive"
    kind: str = "last"
    """``last`` value, ``seasonal``, ``mean`` of the lookback, or ``drift``: the line through its ends."""
    season: Optional[int] = None
    """Rows of a season, for ``seasonal``."""

    has_weights: ClassVar[bool] = False


@dataclass
class ForecastingDataConfig:
    """A multivariate series on disk, cut into windows (:class:`exp.forecasting.data.dataset.ForecastingData`)."""

    preflight: ClassVar[str] = "exp.forecasting.data.files"
    """The module that checks the files before a run (:class:`exp.plugins.Plugin`)."""

    reference_key: ClassVar[str] = "horizon"
    """The key on which published metrics depend."""

    _target_: str = "exp.forecasting.data.dataset.ForecastingData"
    name: str = MISSING
    root: Optional[str] = None
    """Folder of the user's files; null: the sample data that come with exp."""
    file: str = MISSING
    """Path below ``root``: CSV (also ``.gz``), Parquet, or ``.npz`` with an array ``data``, the format of PEMS."""
    archive_folder: Optional[str] = None
    """Folder below ``root`` in which the Time-Series-Library's archive has the file; searched after ``root``."""
    split: str = "ratio"
    """``ett_hour``, ``ett_minute`` (12/4/4 months of 30 days), ``ratio`` (70/10/20 %), ``pems`` (60/20/20 %,
    without common rows), or ``test_only``: all rows are for testing, with the weights of another run. The following
    four keys replace it."""
    val_size: Optional[float] = None
    """Rows for validation, before those for testing; below 1: a share of all rows."""
    test_size: Optional[float] = None
    """The last rows, for testing; below 1: a share of all rows."""
    val_start: Optional[str] = None
    """Date of the first row for validation, in the time zone of the file."""
    test_start: Optional[str] = None
    """Date of the first row for testing."""
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
    """Empty cells, and missing rows of a table of many series: ``error`` raises; ``mask`` fills them in the inputs and
    leaves them out of loss and metrics."""
    lookback: int = 720
    horizon: int = 96
    id_column: Optional[str] = None
    """Column that names the series of each row, for tables of many series; null: the file is one series. Columns that
    are read are then, without ``inputs``, those of ``targets`` and ``future_covariates``."""
    melt: Optional[bool] = None
    """Whether each column of a file is a series of such a table, from its first cell that is not empty to its last;
    its values are column ``y``. null: no."""
    static: Optional[List[str]] = None
    """Columns of such a table that do not change within a series: numbers, or text."""
    sampling: Optional[str] = None
    """``series``: an epoch draws as many windows of each series of such a table; null: each window once."""
    header: bool = True
    """Whether the first row has the names of the columns; false: numbers only, without dates."""
    date_column: Optional[str] = "date"
    """Name of the column of dates, upper or lower case; null: the file has none."""
    date_format: Optional[str] = None
    """Format of the dates, as for strftime: ``%d/%m/%Y %H:%M``; ``%s``: seconds since 1970. null: inferred from the
    column."""
    allow_gaps: bool = True
    """Whether the time between rows may vary; if it does, the run logs a warning with the count and the first row."""
    scaling: Optional[str] = None
    """What series are standardized by: ``robust``, median and interquartile range (over a Gaussian's) of the training
    rows; ``none``, nothing; null: mean and standard deviation."""
    lower: Optional[float] = None
    """Least value of a target, in the units of the file, such as 0: forecasts, quantiles and ends of intervals below it
    are set to it; null: none."""
    upper: Optional[float] = None
    """Largest value of a target, likewise."""
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
    distribution; null: the model's own if its loss fits them, else ``conformal``."""
    intervals_calibrate: Optional[bool] = None
    """Whether the model's own quantiles are corrected on the validation split; null: if its loss does not fit them."""


@dataclass
class PredictKeys(IntervalKeys):
    """Keys of task=predict for forecasts."""

    num_windows: int = 4
    """Number of windows, spread evenly over the test split, that get a file and pictures of their own."""
    max_channels: int = 4
    """Channels per picture."""
    channels: Any = None
    """Channels that are drawn: ``all``, or names or numbers (from 0); null: the first ``max_channels``."""
    refit: bool = False
    """Whether the settings of the run train once more on all rows, for as many steps, and forecast what follows the
    last row; windows with truth are still forecast by the weights of the run."""


def check_task(task: Any) -> None:
    """Check the keys that forecasting adds to ``task``, before data and model are built.

    Args:
        task: ``config.task``.

    Raises:
        ConfigError: see :func:`interval_levels`.
    """
    interval_levels(task)


def interval_levels(task: Any) -> list[float]:
    """The coverages of ``task.intervals``, ascending, without duplicates; empty: no intervals.

    Args:
        task: ``config.task``; keys may be missing.

    Raises:
        ConfigError: a value is out of range, or a key is set that has no effect without ``task.intervals``.
    """
    levels = sorted({round(float(level), 6) for level in task.get("intervals") or ()})
    for level in levels:
        if not 0.0 < level < 1.0:
            raise ConfigError(f"task.intervals: {level:g} must be between 0 and 1, such as [0.8,0.95]")
    method = task.get("intervals_method")
    if method not in (None, "conformal", "model"):
        raise ConfigError(f"task.intervals_method={method} must be conformal or model (null: as the model allows)")
    for key in fields(IntervalKeys):
        value = task.get(key.name)
        if not levels and value is not None and value != key.default:
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(f"task.{key.name}={text} needs task.intervals, such as task.intervals=[0.8,0.95]")
    return levels
