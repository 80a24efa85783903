"""What exp registers as a plugin does: its tasks, its model of plain modules, and the keys of ``launcher=submitit``."""

from __future__ import annotations

from exp.launcher.slurm.keys import SubmititConfig
from exp.models.keys import PlainConfig
from exp.plugins import Plugin
from exp.tasks import checks, runs, train, why

__all__ = ["plugin"]

_TASKS = [getattr(module, name) for module in (checks, runs, train, why) for name in module.__all__]
_KEYS = {"launcher/submitit": SubmititConfig, "model/plain": PlainConfig}
plugin = Plugin(structures={**_KEYS, **{f"task/{task.name}": task for task in _TASKS}})
