"""The command line: options as Hydra reads them, ``--help``, and short messages for errors of Hydra and OmegaConf."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import textwrap
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from hydra import initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.resolve import walk
from exp.config.schema import ExpConfig
from exp.config.sources import check_hydra_key, conf_folder, group_keys, task_class_by_name
from exp.config.words import translate
from exp.errors import ConfigError, nearest

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
        unknown = re.match(r"unrecognized arguments: (--?[a-zA-Z][\w.-]*)", problem)
        if unknown:
            raise _unknown_option(unknown[1], arguments, re.findall(r"--[\w-]+", parser.format_usage())) from None
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


def _unknown_option(option: str, arguments: Sequence[str], options: Sequence[str]) -> ConfigError:
    """The error of an option that does not exist: a key that is written as an option, or a misspelled one."""
    words = [part for argument in arguments for part in argument.split("=", 1)]
    following = "".join(words[words.index(option) + 1 :][:1])
    key, value = option.lstrip("-").replace("-", "_"), "true" if following[:1] in ("", "-") else following
    hint = translate(key, value)
    similar = "" if hint else nearest(option, options)
    if similar:
        return ConfigError(f"there is no option {option}{similar}")
    problem = f"there is no option {option}: keys are written without dashes{hint or f'; use {key}={value}'}"
    return ConfigError(problem, "--help has examples")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _searchpath_folders(override: str) -> list[str]:
    value: Any = OverridesParser.create().parse_override(override).value()
    if not isinstance(value, list) or not all(isinstance(folder, str) for folder in value):
        raise ConfigError(f"{override}: a list of folders is expected: 'hydra.searchpath=[<folder>]'")
    return value


def expand_overrides(overrides: Sequence[str]) -> list[str]:
    """Expand ``KEY=~/path``, which a shell does not (it expands ``~`` only at the beginning of a word), and short keys.

    ``task=parity reference=cpu`` is short for ``task=parity task.reference=cpu``, if the task has such a key;
    ``launcher.nnodes=2:4``, as torchrun writes it, for ``launcher.min_nnodes=2 launcher.nnodes=4``.
    """
    task = next((task_class_by_name(o[5:]) for o in reversed(overrides) if o.startswith("task=")), None)
    short = {field.name for field in dataclasses.fields(task) if field.name in _SHORT} if task is not None else set()
    expanded = [re.sub(r"=~(?=/|$)", lambda _: f"={Path.home()}", o, count=1) for o in overrides]
    expanded = [f"task.{o}" if o.partition("=")[0] in short else o for o in expanded]
    ranges = [re.fullmatch(r"(\+*launcher\.)nnodes=(\d+):(\d+)", o) for o in expanded]
    both = [[f"{m[1]}min_nnodes={m[2]}", f"{m[1]}nnodes={m[3]}"] if m else [o] for m, o in zip(ranges, expanded)]
    return list(itertools.chain.from_iterable(both))


_GROUPS = (
    "task", "experiment", "backend", "launcher", "wrapper", "data", "model", "optim", "schedule", "logger", "debug",
)  # fmt: skip
_NO_CHOICE = "Config group override must be a string or a list"
_MEMBERS = {"hooks": "{type: ...}", "metrics": "{_target_: ...}"}
"""Lists of dictionaries that users take for lists of names."""


def is_composition_error(error: Exception) -> bool:
    """Whether an error is one that Hydra or OmegaConf raises while a configuration is composed."""
    return isinstance(error, (HydraException, OmegaConfBaseException)) or str(error).startswith(_NO_CHOICE)


def explain_error(error: Exception) -> ConfigError:
    """An error of composition as an error of exp, which names the key and what to do."""
    text, cause = str(error), error.__cause__ or error
    if isinstance(error, MissingConfigException) and isinstance(error.missing_cfg_file, str) and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        options = ", ".join(error.options)
        hint = translate(group, choice, exact=True) or nearest(choice, error.options, f"{group}=")
        finding = f"{group}={choice} is not a choice{hint}"
        return ConfigError(finding, details=[f"choices of {group}: {options}"], key=group)
    if isinstance(error, OverrideParseException):
        if re.fullmatch(r"[\w.+~@/-]+", error.override):
            return ConfigError(
                f"the argument '{error.override}' has no value: write {error.override}=VALUE, without spaces"
            )
        return ConfigError(
            f"cannot read the argument '{error.override}': expected KEY=VALUE, and quotes around special characters",
            "around a dictionary twice: 'KEY={name: \"value\"}'",
        )
    if text.startswith(_NO_CHOICE):
        return ConfigError("a config group takes the name of a choice, such as debug=one_batch", "--help lists them")
    match = re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text)
    if match:
        key, values = match.groups()
        as_list = "" if key in _GROUPS else f", for a list write '{key}=[{values}]'"
        return ConfigError(f"{key}={values} has several values; for a sweep add -m{as_list}", key=key)
    match = re.match(r"Multiple values for (\S+)\. To override", text)
    if match:
        group = match.group(1)
        return ConfigError(f"{group} is chosen already: leave out the '+' before {group}=", key=group)
    match = re.search(r"In 'experiment/([^']+)'.*?\n\s*(Key .*?)\n\s*full_key: (\S+)", text, re.DOTALL)
    if match:
        experiment, complaint, key = match.groups()
        return ConfigError(
            f"experiment={experiment} sets {key}, which the chosen data or model does not have",
            "choose an experiment for these data and this model (--help lists all)",
            [complaint],
            key=key,
        )
    match = re.search(r"Missing mandatory value: (\S+)", text)
    if match:
        key = match.group(1)
        return ConfigError(f"{key} must be set", f"give {key}=..., or set it in the file of the experiment", key=key)
    complaint, full_key = (str(getattr(cause, name, None) or "") for name in ("msg", "full_key"))
    match = re.match(r"(?:Error merging override |Could not override ')([^=']+)(?:=(.*))?", text)
    key, value = match.groups() if match else (full_key, None)
    if "Value '{}'" in complaint or re.search(r"Key '\S+' (is )?not in", complaint):
        unknown = (
            full_key if full_key.startswith(f"{key}.") else key
        )  # a member of a dictionary, such as launcher={foo: 3}
        given = re.search(rf"use \+{re.escape(unknown)}=(.*)", text)
        finding = f"there is no key '{unknown}'{_hint(unknown, given and given[1], cause)}"
        return ConfigError(finding, details=["--cfg job shows the main keys"], key=unknown)
    if not isinstance(cause, OmegaConfBaseException):
        first, *details = text.splitlines()
        return ConfigError(first, details=[line.strip() for line in details])
    return ConfigError(_explain_value(key, value, (complaint or text).splitlines()[0]), key=key or None)


def _explain_value(key: str, value: str | None, complaint: str) -> str:
    """What is wrong with the value of a key, with the argument that would be right."""
    if value is None:  # the error of a section that is typed later
        value = (re.match(r"Value '([^']+)' ", complaint) or [None, None])[1]
    setting = f"{key or 'configuration'}{'' if value is None else f'={value}'}"
    hint = translate(key, value, exact=True) if value else ""
    if hint:
        return f"{setting} is no value of {key}{hint}"
    if value and ("is not a ListConfig, list or tuple" in complaint or "Cannot assign str to Dict" in complaint):
        member = _MEMBERS.get(key, "...").replace("...", value.strip("[]"))
        return f"{setting}: a list is expected: '{key}=[{member}]'"
    expected = re.search(r"(?:converted to|is not a valid) (Integer|Float|bool)", complaint)
    if not value or not expected:
        return f"{setting}: {complaint}"
    kind, example = {
        "Integer": ("a whole number", "10"), "Float": ("a number", "0.1"), "bool": ("true or false", "true"),
    }[expected[1]]  # fmt: skip
    if expected[1] == "Integer":
        with contextlib.suppress(ValueError, OverflowError):
            example = str(round(float(value)))
    return f"{setting}: {kind} is expected, such as {key}={example}"


def _hint(unknown: str, value: str | None, error: BaseException) -> str:
    """For an unknown key: another framework's word, a key of another node with the same name, or the nearest key."""
    group, _, last = unknown.partition(".")
    parent = str(getattr(error, "full_key", None) or "").rpartition(".")[0]
    nodes: Any = ((parent, getattr(error, "parent_node", None)), ("", OmegaConf.structured(ExpConfig)))
    contents = [(key, OmegaConf.to_container(node, resolve=False)) for key, node in nodes if OmegaConf.is_config(node)]
    keys = [key for prefix, content in contents for key, *_ in walk(content, prefix) if not key.startswith("hydra.")]
    keys += _GROUPS
    if unknown.lower() in keys:
        return nearest(unknown, keys)
    translated = translate(unknown, value)
    if translated:
        return translated
    if unknown in group_keys():
        return f": the chosen {group} does not have it; leave it out, or choose another {group}"
    nested = [key for key in group_keys() if key.count(".") > 1 and key.startswith(f"{group}.")]
    name = last.rpartition(".")[2] or group
    same_name = [key for key in [*keys, *nested] if key.rpartition(".")[2] == name]
    if same_name:
        return f"; did you mean '{same_name[0]}{'' if value is None else f'={value}'}'?"
    translated = translate(name, value)
    return translated if translated and f" {unknown}=" not in translated else nearest(unknown, keys)


def help_text() -> str:
    """The text of ``--help``: ``conf/help.txt``, with the choices of every folder in the search path.

    Not printed by Hydra, which would compose a configuration and search all its groups. That takes seconds.
    """
    lines = []
    with initialize_config_module("exp.conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for group in _GROUPS:
            choices = loader.get_group_options(group, ObjectType.CONFIG, "config")
            text = f"  {group:<11}{' '.join(choices)}"
            lines += textwrap.wrap(text, 80, subsequent_indent=" " * 13, break_on_hyphens=False)
    text = (conf_folder() / "help.txt").read_text(encoding="utf-8")
    return text.replace("CHOICES", "\n".join(lines)).rstrip()
