"""Find the data file and check its first row against the keys, in the parent before any process starts.

Imports neither torch nor pandas nor numpy.
"""

from __future__ import annotations

import os
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping

from exp.data.places import content_of, sample_folder
from exp.errors import ConfigError, DataError, UnavailableError
from exp.forecasting.config import SPLITS, ForecastingDataConfig, IntervalKeys
from exp.forecasting.data.header import choose, layout, read_header

__all__ = ["check_task", "interval_levels", "locate", "preflight", "take_input"]


def preflight(data: Mapping[str, Any]) -> None:
    """Refuse keys out of range, a missing file, and a CSV file whose first row does not fit the keys.

    Args:
        data: ``config.data``.

    Raises:
        DataError: a value is out of range; or see :func:`locate`, :func:`exp.forecasting.data.header.read_header` and
            :func:`exp.forecasting.data.header.choose`.
    """
    config = ForecastingDataConfig(**data)
    for key, known in (("split", SPLITS), ("missing", ("refuse", "mask")), ("on_device", (True, False, "auto"))):
        value = getattr(config, key)
        if value not in known:
            raise DataError(f"data.{key}={value} is not one of {', '.join(map(str, known))}")
    for key, least in (("lookback", 1), ("horizon", 1), ("eval_batch_size", 1), ("num_workers", 0)):
        if getattr(config, key) < least:
            raise DataError(f"data.{key}={getattr(config, key)} must be at least {least}")
    if config.date_format is not None and "%" not in config.date_format:
        raise DataError(
            f"data.date_format={config.date_format} has no directive of strftime; write it like %d/%m/%Y %H:%M "
            "(%s: seconds since 1970)"
        )
    path = locate(config)
    if path.suffix != ".npz":
        choose(path, read_header(path, config).series, config)


def check_task(task: Any) -> None:
    """Check the keys that forecasting adds to ``task``, before data and model are built.

    Args:
        task: ``config.task``.

    Raises:
        ConfigError: ``backtest`` is not a file name that ends in .csv or .parquet; ``backtest_windows`` is below 1 or
            set without ``backtest``; or see :func:`interval_levels`.
        UnavailableError: ``backtest`` is a Parquet file, and pyarrow is not installed.
    """
    interval_levels(task)
    name, windows = task.get("backtest"), task.get("backtest_windows")
    if name is not None and (Path(name).name != name or Path(name).suffix not in (".csv", ".parquet")):
        raise ConfigError(f"task.backtest={name} must be the name of a file that ends in .csv or .parquet")
    if windows is not None and (windows < 1 or name is None):
        raise ConfigError(f"task.backtest_windows={windows} must be at least 1, and needs task.backtest")
    if name is not None and name.endswith(".parquet") and not find_spec("pyarrow"):
        raise UnavailableError(f"task.backtest={name} needs pyarrow: pip install pyarrow, or take a name in .csv")


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
    wanted = task.get("intervals_from")
    if wanted not in (None, "residuals", "model"):
        raise ConfigError(f"task.intervals_from={wanted} must be residuals or model (null: as the model allows)")
    for key in fields(IntervalKeys):
        value = task.get(key.name)
        if not levels and value is not None and value != key.default:
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(f"task.{key.name}={text} needs task.intervals, such as task.intervals=[0.8,0.95]")
    return levels


def take_input(data: Any, wanted: str) -> None:
    """Replace the data file by ``task.input``, with ``split=new``.

    Args:
        data: ``config.data``; changed in place.
        wanted: path of a file, relative to the current folder.
    """
    data.root, data.file, data.split = None, str(Path(wanted).expanduser().absolute()), "new"
    data.archive_folder = None


def locate(config: ForecastingDataConfig) -> Path:
    """The path of the data file: ``file`` below ``root``, or below ``archive_folder`` in ``root``.

    Raises:
        DataError: there is no such file; the message lists the folder's content.
    """
    folder = sample_folder("ett") if config.root is None else Path(config.root).expanduser().absolute()
    path = folder / Path(config.file).expanduser()
    in_archive = folder / (config.archive_folder or "") / config.file
    for each in (path, in_archive):
        if os.path.isfile(each):  # noqa: PTH113 - Path.is_file raises where a folder above may not be entered
            return each
    what = f"data.file={config.file} (data set {config.name}): there is no file {path}"
    if in_archive != path:
        what += f", nor {in_archive}; set data.root to the folder that holds it"
    if config.root is None and not Path(config.file).expanduser().is_absolute():
        what = (
            f"data.root is not set, and {config.file} is not among the sample data of exp; set data.root to the folder "
            "that holds it"
        )
    raise DataError(f"{what}\n  expected: {layout(config)}\n  {content_of(path.parent)}")
