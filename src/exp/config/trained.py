"""A run is used as it was trained: eval, predict and features begin with the configuration of the run in ``init_from``.

Hydra composes it as it composes any other: the run's model and data are offered as choices of their config groups, and
a primary configuration takes them, so that what the command line says comes on top, with types, and sweeps work.
Imports no torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Transformer
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.choices import folders
from exp.config.explain import nearest
from exp.config.paths import is_of_hub, refuse_empty
from exp.config.resolve import distrust
from exp.config.schema import ExpConfig
from exp.config.structures import opened, structure_of, task_named
from exp.config.walk import nodes, written
from exp.console import shown
from exp.errors import ConfigError
from exp.runs.folder import RunFolder

__all__ = [
    "GROUPS",
    "OF_RUN",
    "begin",
    "check_weights_there",
    "follows",
    "offer",
    "run_folder_of",
]

OF_RUN = "of_run"
"""Name of the primary configuration that begins with a run's own, and of the choices that it takes."""

GROUPS = ("experiment", "data", "model")
"""Config groups whose choices are the run's."""

_GROUPS = ("data", "model")
_WITH_THEM = ("name", "seed", "precision", "metric", "metrics", "published", "published_source", "published_for")
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")  # an interpolation that is another key and nothing else
_own_files: list[Path] = []
"""Folders of configurations on the command line: what they name is the user's choice, in the run's file, too."""


def run_folder_of(weights: str | None) -> Path | None:
    """The run folder that weights belong to: itself, or the one in whose ``checkpoints`` they lie; None: no run's."""
    if not weights:
        return None
    path = Path(os.path.abspath(Path(weights).expanduser()))  # noqa: PTH100 - pathlib leaves `..` in it
    for folder in (path, path.parent, path.parent.parent):
        if RunFolder(folder).config.is_file() and (folder == path or "checkpoints" in path.parts):
            return folder
    return None


def check_weights_there(value: str, key: str = "init_from") -> None:
    """Refuse a path that leads to nothing that a run leaves.

    Raises:
        ConfigError: it is empty, or leads to nothing, or to a folder that has neither a configuration nor weights.
    """
    refuse_empty({key: value})
    path = Path(value).expanduser()
    if not path.exists():
        if key == "resume" and path.name.lower() == "true":
            raise ConfigError("resume=true: use resume=auto, or the path of a checkpoint or run folder")
        there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"{key}={shown(path)}: there is no such file or folder{nearest(path.name, there)}")
    if path.is_dir() and run_folder_of(value) is None:
        kinds = ("*.pth", "*.safetensors", "*.safetensors.index.json", "checkpoints/*.pth")
        if not any(True for kind in kinds for _ in path.glob(kind)):
            raise ConfigError(f"{key}={shown(path)} is no run folder: it has neither config.yaml nor weights")


def begin(arguments: Sequence[str], needs_weights: bool | None = None) -> tuple[str, list[str]]:
    """What Hydra is to compose for a command line.

    Args:
        arguments: of the command line.
        needs_weights: whether the task does; None: as the tasks say that are known before anything is composed.

    Returns:
        The name of the primary configuration, and the arguments without choices that repeat those of the run: they
        would put a file's values in place of the run's.

    Raises:
        ConfigError: the run's configuration cannot be read.
    """
    _own_files[:] = folders(arguments)
    given = {key: values for key, values in map(_parsed, arguments) if key is not None}
    if needs_weights is None:
        needs_weights = any(getattr(task_named(task), "needs_weights", False) for task in given.get("task", []))
    weights = [str(path) for path in given.get("init_from", []) if path is not None]
    folder = next((folder for folder in map(run_folder_of, weights) if folder is not None), None)
    if folder is None and needs_weights:
        for path in weights:
            if not is_of_hub(path) and "${" not in path:
                check_weights_there(path)  # before what is composed without the run's configuration is found wanting
    if folder is None or not needs_weights:
        return "config", list(arguments)
    config = _read(folder)
    chosen = _chosen_in(config)
    if given.get("experiment", [chosen.get("experiment")]) != [chosen.get("experiment")]:
        return "config", list(arguments)
    _offer(folder, config)
    repeated = [f"{group}={chosen.get(group)}" for group in GROUPS]
    return OF_RUN, [argument for argument in arguments if argument not in repeated]


def _parsed(argument: str) -> tuple[str | None, list[Any]]:
    """The key of an override and its values, of a sweep all of them."""
    if not re.match(r"^\+{0,2}(task|init_from|experiment)=", argument):
        return None, []
    try:
        override = OverridesParser.create().parse_override(argument)
        sweep = override.is_sweep_override()
        values = list(override.sweep_iterator(Transformer.identity)) if sweep else [override.value()]
    except HydraException:  # which Hydra will say itself
        return None, []
    return override.key_or_group, values


def _chosen_in(config: DictConfig) -> dict[str, Any]:
    """The choice that a run made in each config group."""
    chosen = OmegaConf.select(config, "record.chosen") or {}
    return {"experiment": config.get("name"), **chosen}


def _read(folder: Path) -> DictConfig:
    path = RunFolder(folder).config
    try:
        config = OmegaConf.load(path)
    except Exception as error:  # whatever is wrong with the file
        raise ConfigError(f"{path} is not the configuration of a run: {str(error).splitlines()[0]}") from error
    if not isinstance(config, DictConfig) or any(not isinstance(config.get(group), DictConfig) for group in _GROUPS):
        raise ConfigError(f"{path} is not the configuration of a run: it has no model and data")
    return config


def offer(folder: Path) -> None:
    """Make a run's model and data choices of their groups, and :data:`OF_RUN` a primary configuration that takes them.

    Raises:
        ConfigError: the run's configuration cannot be read, or is of a version of exp that knew other keys.
    """
    _offer(folder, _read(folder))


def _offer(folder: Path, config: DictConfig) -> None:
    distrust(config, "\n".join(file.read_text() for own in _own_files for file in own.rglob("*.yaml")))
    for key, target in (OmegaConf.select(config, "record.follows") or {}).items():
        OmegaConf.update(config, key, f"${{{target}}}")
    store = ConfigStore.instance()
    for group in _GROUPS:
        node: Any = OmegaConf.to_container(config[group], resolve=False)
        structure = structure_of(node.get("_target_"))
        try:
            typed = node if structure is None else OmegaConf.merge(opened(structure), node)
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{RunFolder(folder).config}: {group}.{error.key}: {str(error.msg).splitlines()[0]}; the run is of "
                "another version of exp"
            ) from error
        store.store(group=group, name=OF_RUN, node=typed)
    rest = {key: config[key] for key in _WITH_THEM if key in config}
    # The run's choices are kept in the record, where those of this composition would only say OF_RUN.
    rest["record"] = {"trained_in": str(folder), "chosen": _chosen_in(config)}
    store.store(group="experiment", name=OF_RUN, node=rest, package="_global_")
    overrides = [{f"override {group}": OF_RUN} for group in (*_GROUPS, "experiment")]
    store.store(name=OF_RUN, node={"defaults": ["config", *overrides, "_self_"]})


def follows(config: ExpConfig) -> dict[str, str]:
    """The keys of model and data that refer to another key: ``{"model.channels": "data.channels"}``.

    A frozen configuration has values in their place; a change of the other key is to reach them all the same.

    Args:
        config: composed, not resolved.
    """
    found = {}
    for group in _GROUPS:
        for key, parent, name in nodes(getattr(config, group), group):
            value = written(parent, name)
            match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is not None:
                found[key] = match.group(1)
    return found
