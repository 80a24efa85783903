"""Paths in the configuration: a leading ``~`` is the home folder; relative ones begin where exp was started."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, Mapping, Sequence

from omegaconf import ListConfig, OmegaConf

from exp.config.structures import task_named
from exp.config.walk import nodes, written
from exp.errors import ConfigError

__all__ = ["expand", "expand_arguments", "is_of_hub", "refuse_empty"]

_RELATIVE = ("data.root", "init_from", "resume", "task.input")
_OF_TASKS = ("reference", "run", "steps")
"""Keys of tasks that are written without ``task.``, where the command line names a task that has them."""


def is_of_hub(weights: str | None) -> bool:
    """Whether ``init_from`` names weights of a hub, and no file."""
    return weights is not None and weights.startswith(("hf:", "timm:"))


def expand_arguments(arguments: Sequence[str]) -> list[str]:
    """``KEY=~/path`` with the home folder in the tilde's place: a shell expands it at the beginning of words only.

    ``task=parity reference=cpu`` is short for ``task.reference=cpu``.
    """
    task = next((task_named(each[5:]) for each in reversed(arguments) if each.startswith("task=")), None)
    known = {field.name for field in dataclasses.fields(task)} if task is not None else set()
    short = known.intersection(_OF_TASKS)
    found = [re.sub(r"=~(?=/|$)", lambda _: f"={Path.home()}", argument, count=1) for argument in arguments]
    return [f"task.{each}" if each.partition("=")[0] in short else each for each in found]


def expand(config: Any) -> None:
    """Make the paths in a configuration absolute, in place: a run may be used again from any folder.

    A string that begins with ``~/`` is taken for a path wherever it stands; of the others, the keys of
    :class:`exp.config.schema.ExpConfig` that are known to be paths.

    Args:
        config: typed.

    Raises:
        ConfigError: one of these is empty.
    """
    _expand_home(config)
    task: Any = OmegaConf.get_type(config.task)
    keys = (*_RELATIVE, *(f"task.{name}" for name in task.paths))
    refuse_empty({key: OmegaConf.select(config, key) for key in keys})
    for key in keys:
        value = OmegaConf.select(config, key)
        if isinstance(value, str) and value != "auto" and not (key == "init_from" and is_of_hub(value)):
            OmegaConf.update(config, key, os.path.abspath(value))  # noqa: PTH100 - pathlib leaves `..` in it


def refuse_empty(values: Mapping[str, Any]) -> None:
    """Refuse paths that are empty, as of a shell's variable that is not set: they would stand for the current folder.

    Args:
        values: a path, a list of them, or None, by key.

    Raises:
        ConfigError: one is empty.
    """
    for key, value in values.items():
        each = value if isinstance(value, (list, ListConfig)) else [value]
        if not each or any(isinstance(path, str) and not path.strip() for path in each):
            raise ConfigError(f"{key} is empty, where a path is expected ('.' is the current folder)")


def _expand_home(config: Any) -> None:
    for _, parent, key in nodes(config):
        value = written(parent, key)
        if isinstance(value, str) and (value == "~" or value.startswith("~/")) and "${" not in value:
            parent[key] = str(Path(value).expanduser())
