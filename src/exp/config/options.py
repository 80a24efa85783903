"""The command line as Hydra reads it: each option works, or is refused with a replacement."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from exp.config.sources import check_hydra_key, task_class_by_name
from exp.errors import ConfigError

__all__ = ["UNSUPPORTED_OPTIONS", "Options", "expand_overrides", "read_options"]

UNSUPPORTED_OPTIONS = {
    "config_name": "write the file <folder>/experiment/<name>.yaml, and use --config-dir=<folder> experiment=<name>",
    "config_path": "use --config-dir=<folder>, which adds your configurations to those of exp",
    "experimental_rerun": "it would run code that the file contains; use resume=<run folder>",
}
"""Hydra's options that cannot be used with exp, each with the way to do it."""
_MODES = ("run", "multirun", "cfg", "info", "shell_completion")
_LONG = 400  # characters; a shorter override cannot exhaust Hydra's parser
_SHORT = ("reference", "run", "steps")  # keys of tasks that users may write without ``task.``


@dataclass(frozen=True)
class Options:
    """A command line.

    Attributes:
        flags: options for Hydra, in their long form.
        written: the overrides as the user wrote them.
        overrides: the overrides for Hydra.
        folders: the user's folders of configurations, and packages (``pkg://<name>``).
        help: whether ``--help`` is asked for.
        multirun: whether ``-m`` asks for a sweep.
        prints: whether an option, such as ``--cfg``, asks for text instead of a run.
    """

    flags: list[str]
    written: list[str]
    overrides: list[str]
    folders: list[str]
    help: bool
    multirun: bool
    prints: bool


def read_options(arguments: Sequence[str]) -> Options:
    """Read the arguments of a command line; options and overrides may be in any order.

    Raises:
        ConfigError: an option does not exist, cannot be used with exp, or lacks its value; or an override is of a key
            of Hydra that has no effect.
    """
    # No abbreviations: --exp would mean --experimental-rerun.
    parser = ArgumentParser(
        "exp", parents=[get_args_parser()], add_help=False, allow_abbrev=False, conflict_handler="resolve"
    )
    # Hydra's own option takes the last folder only.
    parser.add_argument("--config-dir", "-cd", dest="folders", action="append", default=[])
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parsed = vars(parser.parse_intermixed_args(arguments))
    except SystemExit:
        problem = stderr.getvalue().rstrip().rpartition("error: ")[2]
        raise ConfigError(f"{problem}", "--help has examples, and --hydra-help lists the options") from None
    overrides, folders = parsed.pop("overrides"), parsed.pop("folders")
    chosen = {name: value for name, value in parsed.items() if value not in (None, False)}
    for name in UNSUPPORTED_OPTIONS.keys() & chosen.keys():
        raise ConfigError(f"{_option(name)} cannot be used with exp: {UNSUPPORTED_OPTIONS[name]}")
    modes = [_option(name) for name in _MODES if name in chosen]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} exclude each other", "give one of them")
    for name in ("resolve", "package"):
        if name in chosen and "cfg" not in chosen:
            raise ConfigError(f"{_option(name)} is for --cfg", "add --cfg job")
    completes = "shell_completion" in chosen
    if completes and not any(re.match("(install|uninstall|query)=", override) for override in overrides):
        raise ConfigError("--shell-completion needs the name of a shell: --shell-completion install=bash")
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if re.match(r"record\b", key):
            raise ConfigError(f"{key} is written by exp, and cannot be set", "leave it out")
        check_hydra_key(key)
        if len(override) > _LONG:
            try:
                OverridesParser.create().parse_override(override)
            except (RecursionError, ValueError) as error:
                raise ConfigError(f"{key}: the value is nested too deeply, or a number is too long") from error
        folders += _searchpath_folders(override) if key == "hydra.searchpath" else ()
    for_hydra = [o for o in overrides if not o.lstrip("+~").startswith("hydra.searchpath=")]
    flags = [_option(name) + ("" if value is True else f"={value}") for name, value in chosen.items() if name != "help"]
    for_hydra = for_hydra if completes else expand_overrides(for_hydra)
    prints = bool(chosen.keys() & {"cfg", "info", "shell_completion", "hydra_help"})
    return Options(flags, overrides, for_hydra, folders, parsed["help"], "multirun" in chosen, prints)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _searchpath_folders(override: str) -> list[str]:
    value: Any = OverridesParser.create().parse_override(override).value()
    if not isinstance(value, list) or not all(isinstance(folder, str) for folder in value):
        raise ConfigError(f"{override}: a list of folders is expected: 'hydra.searchpath=[<folder>]'")
    return value


def expand_overrides(overrides: Sequence[str]) -> list[str]:
    """Expand ``KEY=~/path``, which a shell does not (it expands ``~`` only at the beginning of a word), and short keys.

    ``task=parity reference=cpu`` is short for ``task=parity task.reference=cpu``, if the task has such a key.
    """
    task = next((task_class_by_name(o[5:]) for o in reversed(overrides) if o.startswith("task=")), None)
    short = {field.name for field in dataclasses.fields(task) if field.name in _SHORT} if task is not None else set()
    expanded = [re.sub(r"=~(?=/|$)", lambda _: f"={Path.home()}", o, count=1) for o in overrides]
    return [f"task.{o}" if o.partition("=")[0] in short else o for o in expanded]
