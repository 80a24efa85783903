"""Turns Hydra's and OmegaConf's errors into one line that says what is wrong and what would be right."""

from __future__ import annotations

import difflib
import re
from typing import Any, Iterable, Sequence

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

__all__ = ["config_keys", "explain", "is_of_composition", "nearest", "no_key"]

_NO_CHOICE = "Config group override must be a string or a list"
_WORDS = {
    "accelerator": "backend=..., of which --help lists all",
    "callbacks": "hooks=[{type: ...}], hooks of MMEngine",
    "checkpoint_callback": "checkpoint.every_epochs",
    "ckpt_path": "resume=<a run folder>, or init_from=<weights>",
    "deterministic": "seed=...; docs/guide/resume.md says what is equal",
    "device": "backend=..., of which --help lists all",
    "devices": "nproc=...",
    "epochs": "max_epochs=...",
    "gpus": "nproc=...",
    "lr": "optim.lr=...",
    "num_nodes": "launcher.nnodes=..., or launcher.nodes=... with launcher=submitit",
    "num_workers": "data.num_workers=...",
    "reference": "task=parity with it",
    "run": "task=report, task=track or task=attach with it",
    "steps": "max_steps=..., or task=parity with it",
    "strategy": "wrapper=ddp or wrapper=fsdp",
    "trainer": "a key of exp's own, such as max_epochs=...; debug=one_batch instead of fast_dev_run",
    "weight_decay": "optim.weight_decay=...",
}
"""Keys that people bring along from elsewhere, and what to write instead."""


def nearest(wrong: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the closest of ``known``, or nothing where none is close."""
    matches = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def config_keys(config: Any, prefix: str = "") -> list[str]:
    """All keys of a configuration, dotted."""
    content = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else config
    keys: list[str] = []
    for key, value in content.items() if isinstance(content, dict) else ():
        keys += [f"{prefix}{key!s}", *config_keys(value, f"{prefix}{key!s}.")]
    return keys


def is_of_composition(error: Exception) -> bool:
    """Whether Hydra, OmegaConf or YAML raised it while a configuration was composed."""
    kinds = (HydraException, OmegaConfBaseException, MarkedYAMLError)
    return isinstance(error, kinds) or str(error).startswith(_NO_CHOICE)


def explain(error: Exception, known_keys: Iterable[str]) -> str:
    """One line for the user, details below it where they help.

    Args:
        error: what composition raised.
        known_keys: the keys of the default configuration, to find the nearest.
    """
    if isinstance(error, MissingConfigException) and isinstance(error.missing_cfg_file, str) and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if group == "hydra/launcher":
            return f"{group}={choice}: exp runs the jobs of a sweep itself; leave it out, and choose launcher=..."
        options = [option for option in error.options if not option.startswith("__")]
        return f"{group}={choice} is not a choice{nearest(choice, options)}\n  choices of {group}: {', '.join(options)}"
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the argument '{error.override}': expected KEY=VALUE, and quotes around special characters; "
            "around a dictionary twice: 'KEY={name: \"value\"}'"
        )
    text = str(error)
    cause = error.__cause__
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
            f"experiment={experiment} sets {key}, which the data or model chosen beside it does not have; choose an "
            f"experiment that is made for them (--help lists all)\n  {complaint}"
        )
    unknown = _unknown_key(text, cause)
    if unknown is not None:
        return no_key(unknown, known_keys)
    match = re.match(r"Error merging override (.*)", text)
    if match and isinstance(cause, OmegaConfBaseException):
        below_a_value = _below_a_value(match.group(1).partition("=")[0], cause, list(known_keys))
        if below_a_value is not None:
            return below_a_value
        complaint = str(cause.msg).splitlines()[0]
        if "is not a ListConfig, list or tuple" in complaint:
            key, _, value = match.group(1).partition("=")
            complaint = f"a list is expected: '{key}=[{value}]'"
        return f"{match.group(1)}: {complaint}"
    if isinstance(error, (ConfigCompositionException, HydraException)):
        lines = [line for line in text.splitlines() if line.strip()]
        details = [str(cause).splitlines()[0]] if cause is not None and str(cause) else []
        return "\n  ".join([*lines, *details])
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'configuration'}: {str(error.msg or error).splitlines()[0]}"
    return text


def no_key(unknown: str, known_keys: Iterable[str]) -> str:
    """The message for a key that is in no schema.

    Args:
        unknown: the key, dotted.
        known_keys: among which the nearest is looked for.
    """
    return f"there is no key '{unknown}'{_hint(unknown, known_keys)}\n  --cfg job shows all keys"


def _hint(unknown: str, known_keys: Iterable[str]) -> str:
    """The nearest key; or, where other choices have a key of this name, that the one chosen has not."""
    known = list(known_keys)
    word = _WORDS.get(unknown.partition(".")[0])
    if word is not None and unknown.partition(".")[0] not in known:
        return f"; use {word}"
    if unknown not in known:
        return nearest(unknown, known)
    group = unknown.partition(".")[0]
    return f": the {group} that is chosen has none of this name; leave it out, or choose another {group}"


def _below_a_value(key: str, cause: OmegaConfBaseException, known_keys: Sequence[str]) -> str | None:
    """Of a key below one that has a value and no keys: where one of that name is."""
    above, _, last = key.rpartition(".")
    if not above or str(cause.full_key) != above or not str(cause.msg).startswith("Value '{}'"):
        return None
    elsewhere = next((known for known in known_keys if known.rpartition(".")[2] == last), None)
    hint = nearest(key, known_keys) if elsewhere is None else f"; did you mean '{elsewhere}'?"
    return f"there is no key '{key}', for '{above}' has none below it{hint}\n  --cfg job shows all keys"


def _unknown_key(text: str, cause: BaseException | None) -> str | None:
    """The key that is in no schema, where that is what the error is about."""
    match = re.match(r"Could not override '([^']+)'", text)
    if match:
        if "No match in the defaults list" in text:
            return match.group(1).split("=")[0]
        # Of a dictionary given for a key that there is, the member that there is not.
        below = str(getattr(cause, "full_key", None) or "")
        return below if below.startswith(f"{match.group(1)}.") else match.group(1)
    if isinstance(cause, OmegaConfBaseException) and re.search(r"Key '\S+' (is )?not in", str(cause)):
        return str(cause.full_key)
    return None
