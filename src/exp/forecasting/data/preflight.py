"""Check the keys of data and task, and the data file, in the parent before any process starts.

Imports neither torch nor pandas nor numpy.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping

from exp.errors import ConfigError, DataError, UnavailableError
from exp.forecasting.data.files import find_file, read_header, select_columns
from exp.forecasting.keys import SPLITS, ForecastingDataConfig, IntervalKeys

__all__ = ["check_task", "interval_levels", "preflight", "take_input"]


def preflight(data: Mapping[str, Any]) -> None:
    """Refuse keys out of range, a missing file, and a CSV file whose first row does not fit the keys.

    Args:
        data: ``config.data``.

    Raises:
        DataError: a value is out of range; or see :mod:`exp.forecasting.data.files`.
    """
    config = ForecastingDataConfig(**data)
    for key, choices in (("split", SPLITS), ("missing", ("error", "mask")), ("device_cache", (True, False, "auto"))):
        value = getattr(config, key)
        if value not in choices:
            raise DataError(f"data.{key}={value} is not one of {', '.join(map(str, choices))}")
    for key, minimum in (("lookback", 1), ("horizon", 1), ("eval_batch_size", 1), ("num_workers", 0)):
        if getattr(config, key) < minimum:
            raise DataError(f"data.{key}={getattr(config, key)} must be at least {minimum}")
    if config.season is not None and config.season < 1:
        raise DataError(f"data.season={config.season} must be at least 1 (null: by the calendar of the dates)")
    path = find_file(config)
    if path.suffix != ".npz":
        header = read_header(path, config)
        select_columns(path, [name for name in header.names if name != header.date], config)


def check_task(task: Any) -> None:
    """Check the keys that forecasting adds to ``task``, before data and model are built.

    Args:
        task: ``config.task``.

    Raises:
        ConfigError: ``backtest_file`` is not a file name that ends in .csv or .parquet; ``backtest_windows`` is below 1
            or set without ``backtest_file``; or see :func:`interval_levels`.
        UnavailableError: ``backtest_file`` is a Parquet file, and pyarrow is not installed.
    """
    interval_levels(task)
    name, windows = task.get("backtest_file"), task.get("backtest_windows")
    if name is not None and (Path(name).name != name or Path(name).suffix not in (".csv", ".parquet")):
        raise ConfigError(f"task.backtest_file={name} must be the name of a file that ends in .csv or .parquet")
    if windows is not None and (windows < 1 or name is None):
        raise ConfigError(f"task.backtest_windows={windows} must be at least 1, and needs task.backtest_file")
    if name is not None and name.endswith(".parquet") and not find_spec("pyarrow"):
        raise UnavailableError(f"task.backtest_file={name} needs pyarrow: pip install pyarrow, or take a name in .csv")


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


def take_input(data: Any, file: str) -> None:
    """Replace the data file by ``task.input``, with ``split=test_only``.

    Args:
        data: ``config.data``; changed in place.
        file: path of a file, relative to the current folder.
    """
    data.root, data.file, data.split = None, str(Path(file).expanduser().absolute()), "test_only"
    data.archive_folder = None
