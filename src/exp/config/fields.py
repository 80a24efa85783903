"""Keys that a class of the user's has, and that the YAML file which names it does not list.

Hydra knows what is in files and in registered schemas alone, and would refuse such a key on the command line. The class
is found as Hydra finds the file: by the choice on the command line, in the user's folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from pathlib import Path
from typing import Any, Iterator, Sequence

from omegaconf import OmegaConf

from exp.config.resolve import resolve
from exp.config.schema import LauncherConfig
from exp.launcher.base import Launcher
from exp.task import Task

__all__ = ["admit", "fields_of_choices", "folders", "searched"]

_OVERRIDE = re.compile(r"(task|launcher)\.(\w+)=")


def admit(arguments: Sequence[str]) -> list[str]:
    """The command line, with ``++`` before keys that only the dataclass of a chosen task or launcher has.

    Types and defaults are the dataclass's, all the same: the composed configuration gets them
    (:func:`exp.config.structures.typed`).

    Args:
        arguments: of the command line.
    """
    if not any(map(_OVERRIDE.match, arguments)):
        return list(arguments)
    known = set(fields_of_choices(arguments))
    return [f"++{each}" if each.partition("=")[0] in known else each for each in arguments]


def fields_of_choices(arguments: Sequence[str]) -> list[str]:
    """Of the tasks and launchers that the command line takes from the user's folders, the dotted keys that their files
    do not list.

    Args:
        arguments: of the command line.
    """
    found: list[str] = []
    for argument in arguments:
        group, _, names = argument.partition("=")
        for name in re.findall(r"\w+", names) if group in ("task", "launcher") else ():
            for file in (folder / group / f"{name}.yaml" for folder in folders(arguments)):
                # Whatever is wrong with the file or its class is told where they are used.
                with contextlib.suppress(Exception):
                    found += [f"{group}.{key}" for key in _fields(group, file)]
    return found


def _fields(group: str, file: Path) -> Iterator[str]:
    content: Any = OmegaConf.load(file)
    cls = resolve(f"{group}._target_", content["_target_"], Task if group == "task" else Launcher)
    listed = {*content, *LauncherConfig.__dataclass_fields__}  # which a launcher's file takes from its schema
    for field in dataclasses.fields(getattr(cls, "keys", cls)):
        if field.name not in listed:
            yield field.name


def searched(arguments: Sequence[str]) -> list[str]:
    """The user's folders of configurations as ``hydra.searchpath`` has them, and ``--config-dir``, as a ``file://``.

    Args:
        arguments: of the command line.
    """
    given = [each.partition("=")[2].strip("[]") for each in arguments if each.startswith("hydra.searchpath=")]
    found = [part for each in given for part in each.split(",")]
    for number, word in enumerate(arguments):
        option, _, folder = word.partition("=")
        if option in ("--config-dir", "-cd"):
            folder = folder or "".join(arguments[number + 1 : number + 2])
            found.append(f"file://{os.path.abspath(folder)}")  # noqa: PTH100 - as the user wrote it
    return found


def folders(arguments: Sequence[str]) -> list[Path]:
    """Those of :func:`searched` that are folders, not packages."""
    found = [each.strip(" '\"") for each in searched(arguments)]
    plain = [each[len("file://") :] if each.startswith("file://") else each for each in found]
    return [Path(os.path.abspath(each)) for each in plain if each and "://" not in each]  # noqa: PTH100 - as written
