"""The command line as Hydra reads it: each of its options works, or is refused with what to write instead."""

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

from exp.config.sources import refuse_hydra, task_named
from exp.errors import ConfigError

__all__ = ["REFUSED", "Options", "expand_overrides", "read_options"]

REFUSED = {
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
        prints: whether an option, such as ``--cfg``, asks for text instead of a run.
    """

    flags: list[str]
    written: list[str]
    overrides: list[str]
    folders: list[str]
    help: bool
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
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = vars(parser.parse_intermixed_args(arguments))
    except SystemExit:
        problem = said.getvalue().rstrip().rpartition("error: ")[2]
        raise ConfigError(f"{problem}; --help has examples, and --hydra-help lists the options") from None
    overrides, folders = found.pop("overrides"), found.pop("folders")
    chosen = {name: value for name, value in found.items() if value not in (None, False)}
    for name in REFUSED.keys() & chosen.keys():
        raise ConfigError(f"{_option(name)} cannot be used with exp: {REFUSED[name]}")
    modes = [_option(name) for name in _MODES if name in chosen]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} exclude each other; give one of them")
    for name in ("resolve", "package"):
        if name in chosen and "cfg" not in chosen:
            raise ConfigError(f"{_option(name)} is for --cfg; add --cfg job")
    completes = "shell_completion" in chosen
    if completes and not any(re.match("(install|uninstall|query)=", each) for each in overrides):
        raise ConfigError("--shell-completion needs the name of a shell: --shell-completion install=bash")
    for each in overrides:
        key = each.lstrip("+~").partition("=")[0]
        if re.match(r"record\b", key):
            raise ConfigError(f"{key} is written by exp, and cannot be set; leave it out")
        refuse_hydra(key)
        if len(each) > _LONG:
            try:
                OverridesParser.create().parse_override(each)
            except (RecursionError, ValueError) as error:
                raise ConfigError(f"{key}: the value is nested too deeply, or a number is too long") from error
        folders += _folders_in(each) if key == "hydra.searchpath" else ()
    kept = [each for each in overrides if not each.lstrip("+~").startswith("hydra.searchpath=")]
    flags = [_option(name) + ("" if value is True else f"={value}") for name, value in chosen.items() if name != "help"]
    kept = kept if completes else expand_overrides(kept)
    prints = bool(chosen.keys() & {"cfg", "info", "shell_completion", "hydra_help"})
    return Options(flags, overrides, kept, folders, found["help"], prints)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _folders_in(override: str) -> list[str]:
    value: Any = OverridesParser.create().parse_override(override).value()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{override}: a list of folders is expected: 'hydra.searchpath=[<folder>]'")
    return value


def expand_overrides(overrides: Sequence[str]) -> list[str]:
    """Expand ``KEY=~/path``, which a shell does not (it expands ``~`` only at the beginning of a word), and short keys.

    ``task=parity reference=cpu`` is short for ``task=parity task.reference=cpu``, if the task has such a key.
    """
    task = next((task_named(each[5:]) for each in reversed(overrides) if each.startswith("task=")), None)
    short = {field.name for field in dataclasses.fields(task) if field.name in _SHORT} if task is not None else set()
    found = [re.sub(r"=~(?=/|$)", lambda _: f"={Path.home()}", each, count=1) for each in overrides]
    return [f"task.{each}" if each.partition("=")[0] in short else each for each in found]
