"""The text of ``--help``, and short messages for errors of Hydra, OmegaConf and YAML."""

from __future__ import annotations

import re
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.resolve import walk
from exp.config.schema import ExpConfig
from exp.config.sources import group_keys
from exp.errors import ConfigError, nearest

__all__ = ["explain_error", "help_text", "is_composition_error"]

_GROUPS = (
    "task", "experiment", "backend", "launcher", "wrapper", "data", "model", "optim", "schedule", "logger", "debug",
)  # fmt: skip
_NO_CHOICE = "Config group override must be a string or a list"
_FOREIGN_KEYS = {
    **dict.fromkeys(("accelerator", "device"), "backend=... (--help lists all)"),
    **dict.fromkeys(("devices", "gpus"), "nproc=..."),
    "callbacks": "hooks=[{type: ...}], hooks of MMEngine",
    "ckpt_path": "resume=<a run folder>, or init_from=<weights>",
    "deterministic": "seed=...; docs/guide/resume.md says what is reproducible",
    "epochs": "max_epochs=...",
    "reference": "it with task=parity",
    "run": "it with task=report, task=track or task=attach",
    "steps": "max_steps=..., or steps=... with task=parity",
    "strategy": "wrapper=ddp or wrapper=fsdp",
    "trainer": "a key of exp's own, such as max_epochs=...; debug=one_batch instead of fast_dev_run",
}
"""Keys of other frameworks and likely mistakes, each with its replacement."""


def is_composition_error(error: Exception) -> bool:
    """Whether an error is one that Hydra or OmegaConf raises while a configuration is composed."""
    return isinstance(error, (HydraException, OmegaConfBaseException)) or str(error).startswith(_NO_CHOICE)


def explain_error(error: Exception) -> ConfigError:
    """An error of composition as an error of exp, which names the key and what to do."""
    text, cause = str(error), error.__cause__ or error
    if isinstance(error, MissingConfigException) and isinstance(error.missing_cfg_file, str) and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        options = ", ".join(error.options)
        finding = f"{group}={choice} is not a choice{nearest(choice, error.options)}"
        return ConfigError(finding, details=[f"choices of {group}: {options}"], key=group)
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"cannot read the argument '{error.override}': expected KEY=VALUE, and quotes around special characters",
            "around a dictionary twice: 'KEY={name: \"value\"}'",
        )
    if text.startswith(_NO_CHOICE):
        return ConfigError("a config group takes the name of a choice, such as debug=one_batch", "--help lists them")
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
        finding = f"there is no key '{unknown}'{_hint(unknown, cause)}"
        return ConfigError(finding, details=["--cfg job shows the main keys"], key=unknown)
    if not isinstance(cause, OmegaConfBaseException):
        first, *details = text.splitlines()
        return ConfigError(first, details=[line.strip() for line in details])
    if "is not a ListConfig, list or tuple" in complaint:
        complaint = f"a list is expected: '{key}=[{value}]'"
    setting = f"{key or 'configuration'}{'' if value is None else f'={value}'}"
    return ConfigError(f"{setting}: {(complaint or text).splitlines()[0]}", key=key or None)


def _hint(unknown: str, error: BaseException) -> str:
    """A suggestion for an unknown key: the nearest key, or a key of another node with the same name."""
    group, _, last = unknown.partition(".")
    parent = str(getattr(error, "full_key", None) or "").rpartition(".")[0]
    nodes: Any = {parent: getattr(error, "parent_node", None), "": OmegaConf.structured(ExpConfig)}
    contents = {
        key: OmegaConf.to_container(node, resolve=False) for key, node in nodes.items() if OmegaConf.is_config(node)
    }
    keys = [key for prefix, content in contents.items() for key, *_ in walk(content, prefix)]
    keys = [*(key for key in keys if not key.startswith("hydra.")), *_GROUPS]
    if group in _FOREIGN_KEYS and group not in keys:
        return f"; use {_FOREIGN_KEYS[group]}"
    if unknown in group_keys():
        return f": the chosen {group} does not have it; leave it out, or choose another {group}"
    nested = [key for key in group_keys() if key.count(".") > 1 and key.startswith(f"{group}.")]
    same_name = [key for key in [*keys, *nested] if key.rpartition(".")[2] == (last or group)]
    return f"; did you mean '{same_name[0]}'?" if same_name else nearest(unknown, keys)


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
    text = (Path(str(import_module("exp.conf").__file__)).parent / "help.txt").read_text(encoding="utf-8")
    return text.replace("CHOICES", "\n".join(lines)).rstrip()
