"""exp's own tasks, registered in the same way as those of a plugin."""

from __future__ import annotations

from exp.plugins import Plugin
from exp.task import Task
from exp.tasks.checks import Collectives, Doctor, Env, Operators, Parity, Qualify, Speed, Trace
from exp.tasks.runs import Attach, Report, Track
from exp.tasks.train import Estimate, Eval, Predict, Train

__all__ = ["plugin"]

_TASKS: tuple[type[Task], ...] = (
    Attach, Collectives, Doctor, Env, Estimate, Eval, Operators, Parity, Predict, Qualify, Report, Speed, Trace, Track,
    Train,
)  # fmt: skip
_BY_PLACE = {f"task/{task.name}": task for task in _TASKS}
plugin = Plugin(structures=_BY_PLACE, choices={k: task for k, task in _BY_PLACE.items() if k != "task/doctor"})
"""``task=doctor`` is not among the choices: it has a file in ``conf/task``, which also sets a key of the launcher."""
