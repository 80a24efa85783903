"""Checks of the keys of ``task`` for intervals, before data and model are built. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from exp.errors import ConfigError
from exp.forecasting.config import IntervalKeys

__all__ = ["check_keys"]


def check_keys(task: Any) -> list[float]:
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
