"""The keys of ``task`` that ask for intervals, checked by themselves. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Sequence

from exp.errors import ConfigError
from exp.forecasting.config import EvalKeys

__all__ = ["MODEL", "RESIDUALS", "check_keys", "check_levels"]

RESIDUALS = "residuals"
"""``task.intervals_from``: the residuals of the validation part."""
MODEL = "model"
"""``task.intervals_from``: what the model itself says of how sure it is."""


def check_keys(task: Any) -> list[float]:
    """The coverages that ``task`` asks for, ascending and each once; empty: no intervals.

    Args:
        task: ``config.task``, which need not have such keys.

    Raises:
        ConfigError: a value cannot be, or a key is set that needs ``task.intervals``, which is not.
    """
    given = task.get("intervals")
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        meant = check_levels([given])  # 80 first
        raise ConfigError(f"task.intervals={given:g} must be a list: task.intervals=[{meant[0]:g}]")
    if isinstance(given, (str, bool)) or any(isinstance(each, (str, bool)) for each in given or ()):
        raise ConfigError(f"task.intervals={given} must be a list of shares between 0 and 1, such as [0.8,0.95]")
    levels = check_levels(given or [])
    wanted = task.get("intervals_from")
    if wanted not in (None, RESIDUALS, MODEL):
        raise ConfigError(f"task.intervals_from={wanted} must be {RESIDUALS} or {MODEL} (null: as the model allows)")
    memory = task.get("intervals_memory_mb")
    if memory is not None and memory < 1:
        raise ConfigError(f"task.intervals_memory_mb={memory} must be at least 1")
    rate = float(task.get("intervals_adapt") or 0.0)
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"task.intervals_adapt={rate:g} must be from 0 (off) to below 1, such as 0.01")
    for key in fields(EvalKeys):
        value = task.get(key.name)
        if not levels and value is not None and key.name != "intervals" and value != key.default:
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(f"task.{key.name}={text} needs task.intervals, such as task.intervals=[0.8,0.95]")
    return levels


def check_levels(levels: Sequence[float]) -> list[float]:
    """Coverages to aim at, ascending and each once.

    Args:
        levels: ``task.intervals``.

    Raises:
        ConfigError: one is not between 0 and 1, such as 80 for 0.8.
    """
    for level in levels:
        if not 0.0 < level < 1.0:
            meant = f"; 0.{level:g} for {level:g} %" if level in range(10, 100) else ""
            raise ConfigError(f"task.intervals: {level:g} is no share between 0 and 1, such as 0.8{meant}")
    return sorted({round(float(level), 6) for level in levels})
