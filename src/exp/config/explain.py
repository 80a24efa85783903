"""The text of ``--help``, and short messages for errors of Hydra, OmegaConf and YAML."""

from __future__ import annotations

import contextlib
import re
import textwrap
import warnings
from typing import Any, Iterable, Sequence

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from exp.config.compose import searchpath
from exp.errors import ConfigError, nearest

__all__ = ["default_keys", "explain", "help_text", "is_of_composition"]

_GROUPS = (
    "experiment", "task", "backend", "launcher", "wrapper", "data", "model", "optim", "schedule", "logger", "debug",
)  # fmt: skip
_TASKS = ("train", "eval", "predict", "report", "doctor")  # the common ones, which --help shows
_WIDTH = 80
_NO_CHOICE = "Config group override must be a string or a list"
_WORDS = {
    "accelerator": "backend=... (--help lists all)",
    "callbacks": "hooks=[{type: ...}], hooks of MMEngine",
    "checkpoint_callback": "checkpoint.every_epochs",
    "ckpt_path": "resume=<a run folder>, or init_from=<weights>",
    "deterministic": "seed=...; docs/guide/resume.md says what is reproducible",
    "device": "backend=... (--help lists all)",
    "devices": "nproc=...",
    "epochs": "max_epochs=...",
    "gpus": "nproc=...",
    "lr": "optim.lr=...",
    "num_nodes": "launcher.nnodes=..., or launcher.nodes=... with launcher=submitit",
    "num_workers": "data.num_workers=...",
    "reference": "it with task=parity",
    "run": "it with task=report, task=track or task=attach",
    "steps": "max_steps=..., or steps=... with task=parity",
    "strategy": "wrapper=ddp or wrapper=fsdp",
    "trainer": "a key of exp's own, such as max_epochs=...; debug=one_batch instead of fast_dev_run",
    "weight_decay": "optim.weight_decay=...",
}
"""Keys of other frameworks and likely mistakes, with what to write instead."""


def is_of_composition(error: Exception) -> bool:
    """Whether an error is one that Hydra, OmegaConf or YAML raises while a configuration is composed."""
    kinds = (HydraException, OmegaConfBaseException, MarkedYAMLError)
    return isinstance(error, kinds) or str(error).startswith(_NO_CHOICE)


def explain(error: Exception, known_keys: Iterable[str]) -> str:
    """The message for the user: one line, with details on further lines if they help.

    Args:
        error: the error that composing the configuration raised.
        known_keys: keys and groups (:func:`default_keys`), from which the nearest is suggested.
    """
    if isinstance(error, MissingConfigException) and isinstance(error.missing_cfg_file, str) and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if group == "hydra/launcher":
            return f"{group}={choice}: exp runs the jobs of a sweep itself; leave it out, and set launcher=... instead"
        options = [option for option in error.options if not option.startswith("__")]
        return f"{group}={choice} is not a choice{nearest(choice, options)}\n  choices of {group}: {', '.join(options)}"
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the argument '{error.override}': expected KEY=VALUE, and quotes around special characters; "
            "around a dictionary twice: 'KEY={name: \"value\"}'"
        )
    text, cause = str(error), error.__cause__
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}; indent with spaces"
    if text.startswith(_NO_CHOICE):
        return "a config group takes the name of a choice, such as debug=one_batch; --help lists them"
    match = re.match(r"Multiple values for (\S+)\. To override", text)
    if match:
        return f"{match.group(1)} is chosen already: leave out the '+' before {match.group(1)}="
    match = re.search(r"In 'experiment/([^']+)'.*?\n\s*(Key .*?)\n\s*full_key: (\S+)", text, re.DOTALL)
    if match:
        experiment, complaint, key = match.groups()
        if key == "experiment":
            return f"experiment={experiment}: its file lacks the line '# @package _global_' at its top"
        return (
            f"experiment={experiment} sets {key}, which the chosen data or model does not have; choose an experiment "
            f"for these data and this model (--help lists all)\n  {complaint}"
        )
    unknown = _unknown_key(text, error if cause is None else cause)
    if unknown is not None:
        return f"there is no key '{unknown}'{_hint(unknown, list(known_keys))}\n  --cfg job shows all keys"
    match = re.match(r"Error merging override ([^=]*)(?:=(.*))?", text)
    if match and isinstance(cause, OmegaConfBaseException):
        key, value = match.groups()
        complaint = str(cause.msg).splitlines()[0]
        if "is not a ListConfig, list or tuple" in complaint:
            complaint = f"a list is expected: '{key}=[{value}]'"
        return f"{key}={value}: {complaint}"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'configuration'}: {str(error.msg or error).splitlines()[0]}"
    details = [str(cause).splitlines()[0]] if cause is not None and str(cause) else []
    return "\n  ".join([*(line for line in text.splitlines() if line.strip()), *details])


def _unknown_key(text: str, cause: BaseException) -> str | None:
    """The unknown key that the error is about; None: the error is about something else."""
    below = str(getattr(cause, "full_key", None) or "")
    match = re.match(r"Could not override '([^'=]+)", text)
    if match:
        # If the value is a dictionary for a known key, its unknown member.
        return below if below.startswith(f"{match.group(1)}.") else match.group(1)
    match = re.match(r"Error merging override ([^=]+)\.[^.=]+=", text)
    if match and below == match.group(1) and "Value '{}'" in str(cause):  # a member of a key that takes a plain value
        return text[len("Error merging override ") :].partition("=")[0]
    return (
        below
        if isinstance(cause, OmegaConfBaseException) and re.search(r"Key '\S+' (is )?not in", str(cause))
        else None
    )


def _hint(unknown: str, known: Sequence[str]) -> str:
    """What to write instead of an unknown key: the nearest key, or another choice of a group that has the key."""
    group, _, last = unknown.partition(".")
    if group in _WORDS and group not in known:
        return f"; use {_WORDS[group]}"
    if unknown in known:
        return f": the chosen {group} does not have it; leave it out, or choose another {group}"
    elsewhere = [each for each in known if each.rpartition(".")[2] == last]
    return nearest(unknown, known) or (f"; did you mean '{elsewhere[0]}'?" if elsewhere else "")


def help_text(arguments: Sequence[str]) -> str:
    """The text of ``--help``: ``hydra.help.template``, with the choices of every folder in the search path.

    Not printed by Hydra, which would search all its groups even if the template does not use them. That takes seconds.

    Args:
        arguments: of the command line; only those that add folders of configurations matter.

    Raises:
        ConfigError: such a folder does not exist.
    """
    GlobalHydra.instance().clear()
    with initialize_config_module("exp.conf", version_base="1.3"), warnings.catch_warnings():
        warnings.filterwarnings("error", "provider=")
        OmegaConf.register_new_resolver("choices", lambda: _choices(searchpath(arguments)), replace=True)
        try:
            config = compose("config", searchpath(arguments), return_hydra_config=True)
        except UserWarning as warning:
            raise ConfigError(f"a folder of configurations does not exist: {warning}") from warning
        return str(config.hydra.help.template).replace("$$", "$")  # the template escapes $ for string.Template


def _choices(folders: list[str]) -> str:
    loader = GlobalHydra.instance().config_loader()
    lines: list[str] = []
    for group in _GROUPS:
        choices = loader.get_group_options(group, ObjectType.CONFIG, "config", folders)
        if group == "task":
            shipped = loader.get_group_options(group, ObjectType.CONFIG, "config", [])
            choices = [*_TASKS, *(each for each in choices if each not in shipped), "(task=list shows all)"]
        lines += textwrap.wrap(
            " ".join(choices),
            _WIDTH,
            initial_indent=f"  {group:<11}",
            subsequent_indent=" " * 13,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def default_keys(arguments: Sequence[str] = ()) -> list[str]:
    """The dotted keys of the default configuration, and its groups.

    Args:
        arguments: of the command line; its choices, such as ``launcher=submitit``, decide which keys there are. If they
            cannot be composed, choices are ignored.
    """

    def dotted(content: Any, prefix: str = "") -> list[str]:
        pairs = content.items() if isinstance(content, dict) else ()
        return [key for name, value in pairs for key in (f"{prefix}{name}", *dotted(value, f"{prefix}{name}."))]

    GlobalHydra.instance().clear()
    with initialize_config_module("exp.conf", version_base="1.3"):
        chosen = [each for each in arguments if re.fullmatch(rf"({'|'.join(_GROUPS)})=[\w./-]+", each)]
        for kept in (chosen, [each for each in chosen if not each.startswith("experiment=")], []):
            # The error to be explained may be caused by one of these choices.
            with contextlib.suppress(Exception):
                composed = compose("config", [*kept, *searchpath(arguments)])
                return [*dotted(OmegaConf.to_container(composed, resolve=False)), *_GROUPS]
    return list(_GROUPS)
