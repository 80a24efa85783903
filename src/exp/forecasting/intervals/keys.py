"""The keys of ``task`` that ask for intervals, checked by themselves. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from exp.errors import ConfigError
from exp.forecasting.config import EvalKeys

__all__ = ["check_keys"]


def check_keys(task: Any) -> list[float]:
    """The coverages that ``task`` asks for, ascending and each once; empty: no intervals.

    Args:
        task: ``config.task``, which need not have such keys.

    Raises:
        ConfigError: a value cannot be, or a key is set that needs ``task.intervals``, which is not.
    """
    given = task.get("intervals")
    if isinstance(given, (int, float)) and 0.0 < given < 1.0:
        raise ConfigError(f"task.intervals={given:g} must be a list: task.intervals=[{given:g}]")
    levels: list[Any] = [] if given is None else [given] if isinstance(given, (str, bool, int, float)) else list(given)
    if any(isinstance(level, (str, bool)) for level in levels):
        raise ConfigError(f"task.intervals={given} must be a list of shares between 0 and 1, such as [0.8,0.95]")
    for level in levels:
        if not 0.0 < level < 1.0:
            meant = f"; 0.{level:g} for {level:g} %" if level in range(10, 100) else ""
            raise ConfigError(f"task.intervals: {level:g} is no share between 0 and 1, such as [0.8,0.95]{meant}")
    levels = sorted({round(float(level), 6) for level in levels})
    wanted, memory = task.get("intervals_from"), task.get("intervals_memory_mb", 1)
    if wanted not in (None, "residuals", "model"):
        raise ConfigError(f"task.intervals_from={wanted} must be residuals or model (null: as the model allows)")
    if memory < 1:
        raise ConfigError(f"task.intervals_memory_mb={memory} must be at least 1")
    rate = float(task.get("intervals_adapt") or 0.0)
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"task.intervals_adapt={rate:g} must be from 0 (off) to below 1, such as 0.01")
    for key in fields(EvalKeys):
        value = task.get(key.name)
        if not levels and value is not None and value != key.default:
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(f"task.{key.name}={text} needs task.intervals, such as task.intervals=[0.8,0.95]")
    return levels
