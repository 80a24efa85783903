"""exp's own tasks, registered in the same way as those of a plugin."""

from __future__ import annotations

from exp.plugins import Plugin
from exp.tasks import checks, runs, train

__all__ = ["plugin"]

_TASKS = [getattr(module, name) for module in (checks, runs, train) for name in module.__all__]
_BY_PLACE = {f"task/{task.name}": task for task in _TASKS}
plugin = Plugin(structures=_BY_PLACE, choices={k: task for k, task in _BY_PLACE.items() if k != "task/doctor"})
"""``task=doctor`` is not among the choices: it has a file in ``conf/task``, which also sets a key of the launcher."""
