"""What Hydra's search path offers: the choices of each group for ``--help``, the default keys for error messages."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import warnings
from pathlib import Path
from typing import Sequence

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf

from exp.config.explain import config_keys
from exp.errors import ConfigError

__all__ = ["default_keys", "folders", "help_text", "register_resolvers", "wants_help"]

_GROUPS = (
    "experiment",
    "task",
    "backend",
    "launcher",
    "wrapper",
    "data",
    "model",
    "optim",
    "schedule",
    "logger",
    "debug",
)
_TASKS = ("train", "eval", "predict", "report", "doctor")
_WIDTH = 80
_HELP = {"--help", "-h"}


def register_resolvers() -> None:
    """Register ``${run_id:}`` (a short id, the same wherever one configuration uses it) and ``${choices:}``, which only
    :func:`help_text` fills in: Hydra resolves both with every file that it merges.
    """
    OmegaConf.register_new_resolver("run_id", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("choices", str, replace=True)


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return not _HELP.isdisjoint(arguments)


def help_text(arguments: Sequence[str]) -> str:
    """What ``--help`` prints: ``hydra.help.template``, with the choices of every folder in the search path.

    Hydra would list all its groups beside, whether the template has them or not: seconds.

    Args:
        arguments: of the command line; those that add folders count.

    Raises:
        ConfigError: a folder is not there.
    """
    searched = _searched(arguments)
    GlobalHydra.instance().clear()
    with initialize_config_module("exp.conf", version_base="1.3"), warnings.catch_warnings():
        warnings.filterwarnings("error", "provider=")
        try:
            config = compose("config", searched, return_hydra_config=True)
        except UserWarning as warning:
            raise ConfigError(f"a folder of configurations is not there: {warning}") from warning
        OmegaConf.register_new_resolver("choices", lambda: _describe_choices(searched), replace=True)
        return str(config.hydra.help.template).replace("$$", "$")  # which is written for string.Template


def _describe_choices(searched: list[str]) -> str:
    loader = GlobalHydra.instance().config_loader()
    lines: list[str] = []
    for group in _GROUPS:
        line = f"  {group:<11}"
        choices = loader.get_group_options(group, ObjectType.CONFIG, "config", searched)
        if group == "task":  # those of every day, and the user's own
            shipped = loader.get_group_options(group, ObjectType.CONFIG, "config", [])
            own = [choice for choice in choices if choice not in shipped]
            choices = [*_TASKS, *own, "(task=list shows all)"]
        for choice in choices:
            if len(line) + len(choice) + 1 > _WIDTH:
                lines.append(line.rstrip())
                line = " " * 13
            line += f"{choice} "
        lines.append(line.rstrip())
    return "\n".join(lines)


def default_keys(arguments: Sequence[str] = ()) -> list[str]:
    """The dotted keys of a configuration, and its groups.

    Args:
        arguments: of the command line; choices such as ``launcher=submitit`` count, also those in the user's folders.
    """
    GlobalHydra.instance().clear()
    with initialize_config_module("exp.conf", version_base="1.3"):
        chosen = [each for each in arguments if re.fullmatch(rf"({'|'.join(_GROUPS)})=[\w./-]+", each)]
        for kept in (chosen, [each for each in chosen if not each.startswith("experiment=")], []):
            # What is to be explained may be in these very choices.
            with contextlib.suppress(Exception):
                composed = config_keys(compose("config", [*kept, *_searched(arguments)]))
                return [*composed, *_GROUPS]
    return list(_GROUPS)


def _searched(arguments: Sequence[str]) -> list[str]:
    """The user's folders, as an override."""
    found = searched(arguments)
    return [f"hydra.searchpath=[{','.join(found)}]"] if found else []


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
