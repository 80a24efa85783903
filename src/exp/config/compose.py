"""Composes the typed configuration from a command line, with the model and data of the run in ``init_from``. No torch.

Hydra reads the schema, and those of plugins, as it reads files, so that it refuses a wrong key or type.
Dictionaries (``data.palette={road: "6EC1E4"}``) take any member. A dictionary of ``data`` or ``model`` on the command
line replaces the former one, like a list: a palette for other data must not keep the classes of the experiment.
``data.palette.road=...`` sets one member.

The tasks eval, predict and features use a run as it was trained: they start from the configuration of the run in
``init_from``. Its model and data are registered as choices of their config groups, and a primary configuration selects
them. Overrides therefore apply on top, with types, and sweeps work.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any, Sequence, cast

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Transformer
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.resolve import distrust, nodes, resolve
from exp.config.schema import ExpConfig, LauncherConfig
from exp.config.sources import choices, opened, own_files, structure_of, task_named
from exp.console import display_path
from exp.errors import ConfigError, nearest
from exp.runs.files import read_yaml
from exp.runs.folder import RunFolder

__all__ = [
    "OF_RUN", "base_of", "check_weights_there", "compose", "expand", "follows", "is_of_hub", "load", "refuse_empty",
    "replace_given", "run_folder_of", "sets_folder", "typed",
]  # fmt: skip

OF_RUN = "of_run"
"""Name of the primary configuration that starts from a run, and of the choices of data and model that it selects."""

_INTERFACES = {"launcher": "exp.launcher.base.Launcher", "task": "exp.task.Task"}
"""By name, since this package must not import the packages that implement them."""
_PATHS = ("data.root", "init_from", "resume", "task.input")
_WITH_THEM = ("name", "seed", "precision", "metric", "metrics", "published", "published_source", "published_for")
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")  # an interpolation of one other key, without other text


def typed(config: Any, of_others: bool = False) -> ExpConfig:
    """Add the types and the ``record`` to a configuration.

    Args:
        config: composed, or read from a file; not changed.
        of_others: the configuration is not trusted, so only modules of exp are imported for its types.

    Returns:
        A new configuration.

    Raises:
        OmegaConfBaseException: a key or a type is wrong.
        ConfigError: the class of the launcher or the task does not exist, or is not of this interface.
        UnavailableError: its module cannot be imported.
    """
    content: Any = OmegaConf.to_container(config, resolve=False)
    root = OmegaConf.structured(ExpConfig)
    for group in ("launcher", "task", "data", "model"):
        section = content.get(group)
        if not isinstance(section, dict):
            continue  # not chosen, as later checks report
        target = str(section.get("_target_") or MISSING)
        if target == MISSING:
            raise ConfigError(f"{group}._target_ must be set; give the path of a class, such as package.module.Class")
        keys: Any = LauncherConfig if target == "auto" else structure_of(target)
        unknown = keys is None and (target.startswith("exp.") or not of_others)
        if unknown and group in _INTERFACES:
            found = resolve(f"{group}._target_", target, _INTERFACES[group])
            keys = found.keys if group == "launcher" else found
        if keys is not None:
            root[group] = keys
    return cast(ExpConfig, OmegaConf.merge(root, content))  # the result has the types of root


def load(path: Path) -> ExpConfig:
    """The typed configuration in a ``config.yaml``.

    Raises:
        ConfigError: the file is not the configuration of a run.
        OmegaConfBaseException: it has keys that this version of exp no longer has.
    """
    return typed(_read(path, ("launcher",)), of_others=True)


def _read(path: Path, groups: Sequence[str]) -> DictConfig:
    """The content of a ``config.yaml``, which must have the ``groups``; raises ConfigError."""
    try:
        content = read_yaml(path, OmegaConf.create)
    except (ConfigError, OSError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path} is not the configuration of a run: {said}; use another run folder") from error
    if not isinstance(content, DictConfig) or any(not isinstance(content.get(each), DictConfig) for each in groups):
        raise ConfigError(f"{path} is not the configuration of a run; use another run folder")
    return content


def compose(primary: str, overrides: Sequence[str]) -> ExpConfig:
    """Compose a primary configuration and overrides with Hydra, without the node ``hydra``; not typed yet."""
    return cast(ExpConfig, hydra.compose(primary, list(overrides)))


def replace_given(config: Any, overrides: Sequence[str]) -> None:
    """Replace each dictionary of ``data`` and ``model`` that an override sets as a whole; Hydra would merge the two.

    Args:
        config: composed and typed; changed in place.
        overrides: the user's overrides.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        whole = key.startswith(("data.", "model.")) and isinstance(value, dict)
        if whole and isinstance(OmegaConf.select(config, key), DictConfig):
            OmegaConf.update(config, key, value, merge=False)


def follows(config: ExpConfig) -> dict[str, str]:
    """The keys of model and data that are interpolations of another key: ``{"model.channels": "data.channels"}``.

    A frozen configuration has values instead of interpolations. With this record, a later change of the other key still
    changes these keys, too.

    Args:
        config: composed, not resolved.
    """
    found = [(key, value) for group in ("data", "model") for key, _, _, value in nodes(config[group], group)]  # type: ignore[index]
    matches = [(key, _REFERENCE.fullmatch(value)) for key, value in found if isinstance(value, str)]
    return {key: match.group(1) for key, match in matches if match is not None}


def is_of_hub(weights: str | None) -> bool:
    """Whether ``init_from`` names weights of a hub instead of a file."""
    return weights is not None and weights.startswith(("hf:", "timm:"))


def expand(config: Any) -> None:
    """Make the paths in a configuration absolute, in place, so that the run can be used again from any folder.

    Every string that begins with ``~/`` is a path. Other strings are paths if their key is known to be one
    (``data.root``, ``init_from``, ``resume``, and ``paths`` of the task); they are relative to the current folder.

    Args:
        config: typed; changed in place.

    Raises:
        ConfigError: the value of such a key is empty.
    """
    for _, parent, key, value in nodes(config):
        if isinstance(value, str) and (value == "~" or value.startswith("~/")) and "${" not in value:
            parent[key] = str(Path(value).expanduser())
    task: Any = OmegaConf.get_type(config.task)
    for key in (*_PATHS, *(f"task.{name}" for name in task.paths)):
        value = OmegaConf.select(config, key)
        refuse_empty(key, value)
        if isinstance(value, str) and value != "auto" and not (key == "init_from" and is_of_hub(value)):
            OmegaConf.update(config, key, os.path.abspath(value))  # noqa: PTH100 - pathlib leaves `..` in it


def refuse_empty(key: str, value: Any) -> None:
    """Refuse an empty path, for example from an unset shell variable; it would mean the current folder.

    Args:
        key: the key of the configuration, for the message.
        value: a path, a list of paths, or None, which is allowed.

    Raises:
        ConfigError: a path or the list is empty.
    """
    each = value if isinstance(value, (list, ListConfig)) else [value]
    if not each or any(isinstance(path, str) and not path.strip() for path in each):
        raise ConfigError(f"{key} is empty, where a path is expected ('.' is the current folder)")


def sets_folder(config: Any) -> bool:
    """Whether the user has chosen ``output_dir``, on the command line or in a file; by default it has a random part.

    Args:
        config: composed, with interpolations.
    """
    written: Any = OmegaConf.to_container(config, resolve=False)
    return "${run_id:}" not in str(written["output_dir"])


def run_folder_of(weights: str | None) -> Path | None:
    """The run folder of weights: the path itself, or a parent if the path is in its ``checkpoints``; None: no run."""
    if not weights:
        return None
    path = Path(os.path.abspath(Path(weights).expanduser()))  # noqa: PTH100 - pathlib leaves `..` in it
    above = (path.parent, path.parent.parent) if "checkpoints" in path.parts else ()
    return next((folder for folder in (path, *above) if RunFolder(folder).config.is_file()), None)


def check_weights_there(value: str, key: str = "init_from") -> None:
    """Refuse a path that is neither a file nor a folder with a run or weights.

    Args:
        value: the path; of a file, only its first bytes are checked.
        key: the key of the configuration, for the message.

    Raises:
        ConfigError: the path is empty or does not exist, is a file of another kind, or is a folder with neither a
            configuration nor weights.
    """
    refuse_empty(key, value)
    path = Path(value).expanduser()
    if not path.exists():
        if key == "resume" and path.name.lower() == "true":
            raise ConfigError("resume=true: use resume=auto, or the path of a checkpoint or run folder")
        there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"{key}={display_path(path)}: there is no such file or folder{nearest(path.name, there)}")
    if path.is_file() and path.suffix != ".json":
        with path.open("rb") as file:
            start = file.read(9)
        if start and not start.startswith((b"PK", b"\x80")) and start[8:] != b"{":
            raise ConfigError(
                f"{key}={display_path(path)} is no file of weights: neither of torch (.pth) nor .safetensors"
            )
    if path.is_dir() and run_folder_of(value) is None:
        kinds = (
            "*.pth",
            "*.pt",
            "*.bin",
            "*.safetensors",
            "*.safetensors.index.json",
            "checkpoints/*.pth",
            "snapshots/*",
        )
        if not any(True for kind in kinds for _ in path.glob(kind)):
            raise ConfigError(f"{key}={display_path(path)} is not a run folder: it has neither config.yaml nor weights")


def base_of(arguments: Sequence[str], needs_weights: bool | None = None) -> tuple[str, list[str], str | None]:
    """What Hydra composes a configuration from; the run in ``init_from`` is registered with Hydra if the task uses it.

    Args:
        arguments: overrides, also with several values of a sweep.
        needs_weights: whether the task needs weights; None: look it up, which works for tasks of exp and of plugins.

    Returns:
        Name of the primary configuration; the overrides, without choices that the run made, too, since they would
        replace the values of the run with those of the file; and the folder of the run, or None.

    Raises:
        ConfigError: ``init_from`` does not exist, or the configuration of its run cannot be read.
    """
    given = _given(arguments)
    if needs_weights is None:
        needs_weights = any(getattr(task_named(task), "needs_weights", False) for task in given.get("task", []))
    if not needs_weights:
        return "config", list(arguments), None
    weights = [str(path) for path in given.get("init_from", []) if path is not None]
    folder = next((folder for folder in map(run_folder_of, weights) if folder is not None), None)
    if folder is None:
        for path in weights:
            if not is_of_hub(path) and "${" not in path:
                check_weights_there(path)  # first, because without the run, Hydra would complain about missing keys
        return "config", list(arguments), None
    chosen = _offer(folder)
    if given.get("experiment", [chosen.get("experiment")]) != [chosen.get("experiment")]:
        return "config", list(arguments), None
    repeated = [f"{group}={chosen.get(group)}" for group in ("experiment", "data", "model")]
    return OF_RUN, [argument for argument in arguments if argument not in repeated], str(folder)


def _given(arguments: Sequence[str]) -> dict[str, list[Any]]:
    """The values that overrides give to ``task``, ``init_from`` and ``experiment``: one, or those of a sweep."""
    found: dict[str, list[Any]] = {}
    for argument in arguments:
        if re.match(r"\+{0,2}(task|init_from|experiment)=", argument):
            with contextlib.suppress(HydraException):  # Hydra reports it later
                override = OverridesParser.create().parse_override(argument)
                sweep = override.is_sweep_override()
                values = override.sweep_iterator(Transformer.identity) if sweep else [override.value()]
                found[override.key_or_group] = list(values)
    return found


def _offer(folder: Path) -> dict[str, Any]:
    """Make a run's model and data choices of their groups, and a primary configuration that selects them.

    All are named :data:`OF_RUN`.

    Returns:
        The choice of the run in each config group.

    Raises:
        ConfigError: the run's configuration cannot be read, or another version of exp with other keys wrote it.
    """
    path, parts = RunFolder(folder).config, ("data", "model")
    config = _read(path, parts)
    distrust(config, "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in own_files()))
    for key, target in (OmegaConf.select(config, "record.follows") or {}).items():
        OmegaConf.update(config, key, f"${{{target}}}")
    # Record the choices of the run, since those of this composition are OF_RUN.
    chosen = {"experiment": config.get("name"), **(OmegaConf.select(config, "record.chosen") or {})}
    overrides: list[Any] = ["config", {"override experiment": None}]
    for part in parts:
        node: Any = OmegaConf.to_container(config[part], resolve=False)
        structure = structure_of(node.get("_target_"))
        try:
            choices()[f"{part}/{OF_RUN}"] = node if structure is None else OmegaConf.merge(opened(structure), node)
        except OmegaConfBaseException as error:
            said = str(error.msg).splitlines()[0]
            raise ConfigError(f"{path}: {part}.{error.key}: {said}; another version of exp wrote this run") from error
        overrides.append({f"override {part}": OF_RUN})
    rest = {key: config[key] for key in _WITH_THEM if key in config}
    record = {"trained_in": str(folder), "chosen": chosen}
    choices()[OF_RUN] = {"defaults": [*overrides, "_self_"], **rest, "record": record}
    return chosen
