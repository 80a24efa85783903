"""exp's own tasks and its model of plain modules, registered in the same way as those of a plugin."""

from __future__ import annotations

from exp.models.keys import PlainConfig
from exp.plugins import Plugin
from exp.tasks import checks, runs, train

__all__ = ["plugin"]

_TASKS = [getattr(module, name) for module in (checks, runs, train) for name in module.__all__]
plugin = Plugin(structures={**{f"task/{task.name}": task for task in _TASKS}, "model/plain": PlainConfig})
