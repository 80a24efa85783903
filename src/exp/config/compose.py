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
import dataclasses
import os
import re
from pathlib import Path
from typing import Any, Sequence, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Transformer
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.resolve import mark_untrusted, resolve, user, walk
from exp.config.schema import ExpConfig, LauncherConfig
from exp.config.sources import nested_groups, open_dicts, structure_of, task_class_by_name, user_config_files
from exp.console import display_path
from exp.errors import ConfigError, first_line, nearest
from exp.runs.files import read_yaml
from exp.runs.folder import RunFolder
from exp.runs.record import read_record

RUN_CONFIG = "of_run"
"""Name of the primary configuration that starts from a run, and of the choices of data and model in it."""

_INTERFACES = {"launcher": "exp.launcher.base.Launcher", "task": "exp.task.Task"}
"""Dotted paths, since this package must not import the packages that implement these interfaces."""
_PATH_KEYS = ("data.root", "init_from", "resume", "task.input")
_INHERITED_KEYS = ("name", "seed", "precision", "metric", "metrics", "reference")
_WEIGHTS = ("*.pth", "*.pt", "*.bin", "*.safetensors", "*.safetensors.index.json", "checkpoints/*.pth", "snapshots/*")
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")  # an interpolation of one other key, without other text


def typed(config: Any, untrusted: bool = False) -> ExpConfig:
    """Add the types and the ``record`` to a configuration.

    Args:
        config: composed, or read from a file; not changed.
        untrusted: the configuration is not trusted, so only modules of exp are imported for its types.

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
            raise ConfigError(f"{group}._target_ must be set", "give the path of a class, such as package.module.Class")
        keys: Any = LauncherConfig if target == "auto" else structure_of(target)
        unknown = keys is None and (target.startswith("exp.") or not untrusted)
        if unknown and group in _INTERFACES:
            cls = resolve(f"{group}._target_", target, _INTERFACES[group])
            keys = cls.keys if group == "launcher" else cls
        if keys is not None:
            root[group] = keys
    config = OmegaConf.merge(root, content)  # the result has the types of root
    _type_parts(config)
    return cast(ExpConfig, config)


def _type_parts(config: Any) -> None:
    """Add the types of the parts of a model, such as its backbone and its head, in place.

    A part is a section below ``model`` with a ``_target_`` whose keys a plugin types; those of other classes stay open.
    """
    for group in nested_groups():
        key = group.replace("/", ".")
        value, section = OmegaConf.select(config, key), OmegaConf.select(config, key.rpartition(".")[0])
        structure: Any = (
            structure_of(OmegaConf.select(section, "_target_")) if isinstance(section, DictConfig) else None
        )
        types = {field.name: field.type for field in dataclasses.fields(structure)} if structure is not None else {}
        if isinstance(value, str) and types.get(key.rpartition(".")[2]) in (None, Any, "Any"):  # no key of another kind
            raise ConfigError(f"{key}={value} is no section of keys; choose one with {group}={value}", key=key)
    _type_sections(config.get("model"))


def _type_sections(node: Any) -> None:
    content: Any = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else {}
    for key, part in enumerate(content) if isinstance(content, list) else content.items():
        structure = structure_of(part.get("_target_")) if isinstance(part, dict) else None
        if structure is not None and OmegaConf.get_type(node[key]) is not structure:
            node[key] = structure
            node[key].merge_with(part)
        if isinstance(part, (dict, list)):
            _type_sections(node[key])


def load(path: Path) -> ExpConfig:
    """The typed configuration in a ``config.yaml``, with the record in the ``env.json`` beside it.

    Raises:
        ConfigError: the file is not the configuration of a run.
        OmegaConfBaseException: it has keys that this version of exp no longer has.
    """
    config: Any = typed(_read(path, ("launcher",)), untrusted=True)
    OmegaConf.update(config, "record", read_record(path.with_name("env.json")))
    return cast(ExpConfig, config)


def _read(path: Path, groups: Sequence[str]) -> DictConfig:
    """The content of a ``config.yaml``, which must have the ``groups``; raises ConfigError."""
    try:
        content = read_yaml(path, OmegaConf.create)
    except (ConfigError, OSError) as error:
        reason = first_line(error) or type(error).__name__
        raise ConfigError(f"{path} is not the configuration of a run: {reason}", "use another run folder") from error
    if not isinstance(content, DictConfig) or any(not isinstance(content.get(group), DictConfig) for group in groups):
        raise ConfigError(f"{path} is not the configuration of a run", "use another run folder")
    return content


def compose(primary: str, overrides: Sequence[str]) -> ExpConfig:
    """Compose a primary configuration and overrides with Hydra, without the node ``hydra``; not typed yet."""
    return cast(ExpConfig, hydra.compose(primary, list(overrides)))


def compose_job(primary: str, overrides: Sequence[str]) -> ExpConfig:
    """Compose the configuration of a single run, once; not typed yet.

    ``hydra.main`` would compose it twice, the first time only to read ``hydra.mode``, which no file may set.
    """
    config = hydra.compose(primary, list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    return cast(ExpConfig, OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))


def finish(config: ExpConfig, overrides: Sequence[str], task_paths: Sequence[str]) -> ExpConfig:
    """Type a composed configuration, record how it was composed, and make its paths absolute.

    Args:
        config: composed by Hydra, without the node ``hydra``; it may have its types already.
        overrides: the user's overrides.
        task_paths: the keys of the task that are paths (:class:`exp.task.Task`).
    """
    if OmegaConf.get_type(config) is not ExpConfig:
        replace_dict_overrides(config, overrides)
        config = typed(config)  # checks what +KEY=VALUE added, too
    # The record has the choices of the run in init_from already.
    groups = HydraConfig.get().runtime.choices.items()
    chosen = {group: name for group, name in groups if "/" not in group and name not in (None, RUN_CONFIG)}
    config.record.chosen = {**config.record.chosen, **chosen, "backend": config.backend.name}
    # A frozen configuration has values instead of interpolations. A later change of the other key still changes these.
    for group in ("data", "model"):
        for key, _, value in walk(OmegaConf.to_container(config[group], resolve=False), group):  # type: ignore[index]
            match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if match is not None:
                config.record.follows[key] = match.group(1)
    make_paths_absolute(config, task_paths)
    return config


def replace_dict_overrides(config: Any, overrides: Sequence[str]) -> None:
    """Replace each dictionary of ``data`` and ``model`` that an override sets; Hydra has merged the two.

    Args:
        config: composed; changed in place.
        overrides: the user's overrides.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        is_dict = key.startswith(("data.", "model.")) and isinstance(value, dict)
        if is_dict and isinstance(OmegaConf.select(config, key), DictConfig):
            OmegaConf.update(config, key, value, merge=False)


def is_hub_source(weights: str | None) -> bool:
    """Whether ``init_from`` names weights of a hub instead of a file."""
    return weights is not None and weights.startswith(("hf:", "ms:", "timm:"))


def make_paths_absolute(config: Any, task_paths: Sequence[str] = ()) -> None:
    """Make the paths in a configuration absolute, in place, so that the run can be used again from any folder.

    Every string that begins with ``~/`` is a path. Other strings are paths if their key is known to be one
    (``data.root``, ``init_from``, ``resume``, and ``paths`` of the task and of the typed keys of the model); they are
    relative to the current folder.

    Args:
        config: typed; changed in place.
        task_paths: the keys of the task that are paths.

    Raises:
        ConfigError: the value of such a key is empty.
    """
    _expand_home(config, OmegaConf.to_container(config, resolve=False))
    sources = [f"data.sources[{number}].root" for number in range(len(config.data.get("sources") or ()))]
    model_paths = getattr(structure_of(config.model.get("_target_")), "paths", ())
    of_parts = [*(f"task.{name}" for name in task_paths), *(f"model.{name}" for name in model_paths)]
    for key in (*_PATH_KEYS, *sources, *of_parts):
        value = OmegaConf.select(config, key)
        check_not_empty(key, value)
        if isinstance(value, str) and value != "auto" and not (key.endswith("init_from") and is_hub_source(value)):
            OmegaConf.update(config, key, os.path.abspath(value))  # noqa: PTH100 - pathlib leaves `..` in it


def _expand_home(node: Any, content: Any) -> None:
    """Replace ``~`` in paths of a node; ``content``: the node as plain values."""
    for key, value in enumerate(content) if isinstance(content, list) else content.items():
        if isinstance(value, (dict, list)):
            _expand_home(node[key], value)
        elif isinstance(value, str) and (value == "~" or value.startswith("~/")) and "${" not in value:
            node[key] = str(Path(value).expanduser())


def check_not_empty(key: str, value: Any) -> None:
    """Refuse an empty path, for example from an unset shell variable; it would mean the current folder.

    Args:
        key: the key of the configuration, for the message.
        value: a path, a list of paths, or None, which is allowed.

    Raises:
        ConfigError: a path or the list is empty.
    """
    paths = value if isinstance(value, (list, ListConfig)) else [value]
    if not paths or any(isinstance(path, str) and not path.strip() for path in paths):
        raise ConfigError(f"{key} is empty, where a path is expected ('.' is the current folder)")


def sets_output_dir(config: Any) -> bool:
    """Whether the user has chosen ``output_dir``, on the command line or in a file; by default it has a random part.

    Args:
        config: composed, with interpolations.
    """
    unresolved: Any = OmegaConf.to_container(config, resolve=False)
    return "${run_id:}" not in str(unresolved["output_dir"])


def run_folder_of(weights: str | None) -> Path | None:
    """The run folder of weights: the path itself, or a parent if the path is in its ``checkpoints``; None: no run."""
    if not weights:
        return None
    path = Path(os.path.abspath(Path(weights).expanduser()))  # noqa: PTH100 - pathlib leaves `..` in it
    parents = (path.parent, path.parent.parent) if "checkpoints" in path.parts else ()
    return next((folder for folder in (path, *parents) if RunFolder(folder).config.is_file()), None)


def check_weights_exist(value: str, key: str = "init_from") -> None:
    """Refuse a path that is neither a file nor a folder with a run or weights.

    Args:
        value: the path; of a file, only its first bytes are checked.
        key: the key of the configuration, for the message.

    Raises:
        ConfigError: the path is empty or does not exist, is a file of another kind, or is a folder with neither a
            configuration nor weights.
    """
    check_not_empty(key, value)
    path = Path(value).expanduser()
    if not path.exists():
        if key == "resume" and path.name.lower() == "true":
            raise ConfigError("resume=true: use resume=auto, or the path of a checkpoint or run folder")
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        similar = nearest(path.name, siblings)
        raise ConfigError(f"{key}={display_path(path)}: there is no such file or folder{similar}")
    if path.is_file() and path.suffix != ".json":
        with path.open("rb") as file:
            start = file.read(9)
        if start and not start.startswith((b"PK", b"\x80")) and start[8:] != b"{":
            raise ConfigError(
                f"{key}={display_path(path)} is no file of weights: neither of torch (.pth) nor .safetensors"
            )
    has_weights = any(True for pattern in _WEIGHTS for _ in path.glob(pattern))
    if path.is_dir() and run_folder_of(value) is None and not has_weights:
        raise ConfigError(f"{key}={display_path(path)} is not a run folder: it has neither config.yaml nor weights")


def primary_config(arguments: Sequence[str], needs_weights: bool | None = None) -> tuple[str, list[str], str | None]:
    """The primary configuration and its overrides; registers the run in ``init_from`` with Hydra if the task uses it.

    Args:
        arguments: overrides, also with several values of a sweep.
        needs_weights: whether the task needs weights; None: look it up, which works for tasks of exp and of plugins.

    Returns:
        Name of the primary configuration; the overrides, without choices that are those of the run, since they would
        replace the values of the run with those of the file; and the folder of the run, or None.

    Raises:
        ConfigError: ``init_from`` does not exist, or the configuration of its run cannot be read.
    """
    values = _override_values(arguments)
    if needs_weights is None:
        needs_weights = any(
            getattr(task_class_by_name(task), "needs_weights", False) for task in values.get("task", [])
        )
    if not needs_weights:
        return "config", list(arguments), None
    weights = [str(path) for path in values.get("init_from", []) if path is not None]
    folder = next((folder for folder in map(run_folder_of, weights) if folder is not None), None)
    if folder is None:
        for path in weights:
            if not is_hub_source(path) and "${" not in path:
                check_weights_exist(path)  # before Hydra, which would complain about missing keys
        return "config", list(arguments), None
    run_choices = _register_run_config(folder)
    if values.get("experiment", [run_choices.get("experiment")]) != [run_choices.get("experiment")]:
        return "config", list(arguments), None
    repeated = [f"{group}={run_choices.get(group)}" for group in ("experiment", "data", "model")]
    return RUN_CONFIG, [argument for argument in arguments if argument not in repeated], str(folder)


def _override_values(arguments: Sequence[str]) -> dict[str, list[Any]]:
    """The values that overrides give to ``task``, ``init_from`` and ``experiment``: one, or those of a sweep."""
    values: dict[str, list[Any]] = {}
    for argument in arguments:
        if re.match(r"\+{0,2}(task|init_from|experiment)=", argument):
            with contextlib.suppress(HydraException):  # Hydra reports it later
                override = OverridesParser.create().parse_override(argument)
                sweep = override.is_sweep_override()
                sweep_values = override.sweep_iterator(Transformer.identity) if sweep else [override.value()]
                values[override.key_or_group] = list(sweep_values)
    return values


def _register_run_config(folder: Path) -> dict[str, Any]:
    """Make a run's model and data choices of their groups, and a primary configuration that selects them.

    All are named :data:`RUN_CONFIG`.

    Returns:
        The choice of the run in each config group.

    Raises:
        ConfigError: the run's configuration cannot be read, or another version of exp with other keys wrote it.
    """
    path, parts = RunFolder(folder).config, ("data", "model")
    config = _read(path, parts)
    mark_untrusted(
        config, "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in user_config_files())
    )
    record = read_record(path.with_name("env.json"))
    for key, target in record.get("follows", {}).items():
        OmegaConf.update(config, key, f"${{{target}}}")
    # Record the choices of the run; those of this composition are all RUN_CONFIG.
    chosen = {"experiment": config.get("name"), **record.get("chosen", {})}
    overrides: list[Any] = ["config", {"override experiment": None}]
    for part in parts:
        node: Any = OmegaConf.to_container(config[part], resolve=False)
        structure = structure_of(node.get("_target_"))
        try:
            user.run_choices[f"{part}/{RUN_CONFIG}"] = (
                node if structure is None else OmegaConf.merge(open_dicts(structure), node)
            )
        except OmegaConfBaseException as error:
            reason = str(error.msg).splitlines()[0]
            raise ConfigError(
                f"{path}: {part}.{error.key}: {reason}", "another version of exp wrote this run"
            ) from error
        overrides.append({f"override {part}": RUN_CONFIG})
    inherited = {key: config[key] for key in _INHERITED_KEYS if key in config}
    inherited["record"] = {"trained_in": str(folder), "chosen": chosen}
    user.run_choices[RUN_CONFIG] = {"defaults": [*overrides, "_self_"], **inherited}
    return chosen
