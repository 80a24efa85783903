"""Which of MMEngine's own hooks a configuration may name. Imports neither torch nor MMEngine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

from exp.errors import ConfigError

__all__ = ["REFUSED", "check_hooks", "check_schedulers", "refusal"]

REFUSED = {
    "Hook": "it is the base class and does nothing; name a class derived from it",
    "CheckpointHook": "checkpoints are written already, as plain data from which a run goes on exactly; set "
    "checkpoint.every_epochs, checkpoint.every_steps, checkpoint.keep_last and checkpoint.keep_best",
    "LoggerHook": "it reads the losses from the device at every step and closes the visualiser before the test; "
    "metrics.jsonl, the console and logs/ have the same: set log_every and logger",
    "ParamSchedulerHook": "it is there already, and two of them would step every schedule twice; set schedule",
    "DistSamplerSeedHook": "each epoch has an order of its own already, made from seed and epoch; leave it out",
    "NaiveVisualizationHook": "its authors note in MMEngine 0.10.7 that it no longer works; use plots=true, or "
    "task=predict for pictures of what the weights say",
    "PrepareTTAHook": "it needs a test pipeline that gives each sample several times, which the data of exp do not; "
    "set model.tta_scales and model.tta_flip where the model has them",
    "NPUProfilerHook": "it needs a profiler of one vendor that no backend of exp has, and ends the process; use "
    "ProfilerHook, or the vendor's profiler around the command",
}
"""Why, and what to use instead, by the name of the class; docs/hooks.md has the whole table."""


def refusal(name: str) -> str:
    """The message for a hook of :data:`REFUSED`."""
    return f"hooks: {name} cannot be used here: {REFUSED[name]}"


def check_hooks(hooks: Sequence[Any]) -> None:
    """Refuse what is no hook, what would write elsewhere, and MMEngine's hooks that cannot do here what they say.

    Args:
        hooks: ``config.hooks``; each has ``type``, the name or dotted path of a class.

    Raises:
        ConfigError: there is one.
    """
    for index, hook in enumerate(hooks):
        name = hook.get("type") if hasattr(hook, "get") else None
        if not isinstance(name, str):
            raise ConfigError(f"hooks[{index}] has no type; write it as {{type: <name of a hook>, <its arguments>}}")
        module, _, last = name.rpartition(".")
        if last in REFUSED and module.split(".")[0] in ("", "mmengine"):
            raise ConfigError(refusal(last))
        ready = hook.get("on_trace_ready")
        written = {"json_trace_path": hook.get("json_trace_path")}
        written["on_trace_ready.dir_name"] = ready.get("dir_name") if hasattr(ready, "get") else None
        for key, path in written.items():
            if isinstance(path, str) and (Path(path).is_absolute() or ".." in Path(path).parts):
                raise ConfigError(f"hooks[{index}].{key}={path} is to lie below the run folder")


def check_schedulers(schedulers: Sequence[Any]) -> None:
    """Refuse what is no scheduler.

    Args:
        schedulers: ``config.schedule.param_scheduler``; each has ``type``, the name of one of MMEngine's.

    Raises:
        ConfigError: there is one.
    """
    for index, scheduler in enumerate(schedulers):
        if not isinstance(scheduler.get("type") if hasattr(scheduler, "get") else None, str):
            raise ConfigError(
                f"schedule.param_scheduler[{index}] has no type; write it as {{type: <name of a scheduler>, <its "
                "arguments>}"
            )
