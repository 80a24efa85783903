"""Where typed keys come from, and how a configuration gets its types: exp's own schema and those of plug-ins.

Registered in Hydra's ConfigStore, so that a wrong key or type is refused while the configuration is composed.

Keys that are dictionaries (``data.palette={road: "6EC1E4"}``) take any member, where Hydra's typed ones take only those
that are there. Of data and model, one that is given on the command line replaces what was there, as a list does: a
palette for other data is not to keep the classes of the experiment's. ``data.palette.road=...`` sets one member.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import TYPE_CHECKING, Any, Mapping, Sequence, cast

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, DictConfig, OmegaConf
from yaml import YAMLError

from exp import plugins
from exp.config.explain import no_key
from exp.config.resolve import resolve
from exp.config.schema import ExpConfig, LauncherConfig, RecordConfig, SubmititConfig
from exp.config.walk import nodes, written
from exp.errors import ConfigError
from exp.user_code import TASK_PAGE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load", "opened", "register", "replace_given", "structure_of", "task_named", "task_type", "typed"]

LAUNCHER = "exp.launcher.base.Launcher"
TASK = "exp.task.Task"
"""Interfaces by name: what implements them lies above this package."""
_REPLACED = ("data.", "model.")


def register() -> None:
    """Put the schema into Hydra's ConfigStore, and that of each plugin; calling it again changes nothing.

    A choice that sets no key needs no file: ``task=eval``, ``data=weather``.
    """
    # A file of the user's with the name of such a choice replaces it; Hydra warns that it also checks its keys.
    warnings.filterwarnings("ignore", message=r"(?s).*is validated against ConfigStore schema with the same name")
    store = ConfigStore.instance()
    store.store(name="exp_schema", node=opened(ExpConfig))
    structures = _structures()
    for place, structure in structures.items():
        group, _, name = place.rpartition("/")
        store.store(group=f"schema/{group}", name=name, node=opened(structure))
    for place, choice in plugins.choices().items():
        group, _, name = place.rpartition("/")
        store.store(group=group, name=name, node=opened(structures.get(place, choice)))
    # What launchers of others begin with: the same keys, beside which theirs may stand. They are typed when composed.
    common: Any = OmegaConf.to_container(OmegaConf.structured(LauncherConfig))
    store.store(group="schema/launcher", name="base", node=common)


@functools.lru_cache(maxsize=None)
def _structures() -> Mapping[str, type]:
    """The typed keys of launchers, and of plugins, of which exp's own tasks are one, by ``<group>/<name>``."""
    found = {"launcher/common": LauncherConfig, "launcher/submitit": SubmititConfig, **plugins.structures()}
    for place, keys in plugins.more_keys():
        made = dataclasses.make_dataclass(found[place].__name__, [], bases=(found[place], keys))
        found[place] = made
    return found


def structure_of(target: str | None) -> type | None:
    """The typed schema of what a ``_target_`` names; None: it has none."""
    for structure in _structures().values():
        if target is not None and getattr(structure, "_target_", MISSING) == target:
            return structure
    return None


def task_named(name: str) -> type | None:
    """The class of ``task=<name>``, where it is exp's own or a plugin's; None: it is in a file alone."""
    return _structures().get(f"task/{name}")


def task_type(target: str | None) -> Any:
    """The class that ``task._target_`` names.

    Raises:
        ConfigError: there is none, or it is no task.
        UnavailableError: its module does not import.
    """
    if not target or target == MISSING:
        raise ConfigError(f"task._target_ must be set: the path of a subclass of {TASK}; see {TASK_PAGE}")
    cls = resolve("task._target_", target, TASK)
    own = [name for name, kind in vars(cls).get("__annotations__", {}).items() if "ClassVar" not in str(kind)]
    if own and "__dataclass_fields__" not in vars(cls):  # one without fields of its own may inherit all
        raise ConfigError(f"task._target_={target} is no dataclass that inherits {TASK}; see {TASK_PAGE}")
    return cls


def typed(config: Any, of_others: bool = False) -> ExpConfig:
    """A configuration with the types of this module.

    Args:
        config: composed, or read from a file.
        of_others: it may be a stranger's: no module but exp's own is imported for its types.

    Raises:
        OmegaConfBaseException: a key or a type is wrong.
        ConfigError: the task is none, or a key is none.
    """
    root = OmegaConf.structured(ExpConfig)
    target = str(config.launcher.get("_target_", "auto"))
    if target not in ("auto", MISSING) and (target.startswith("exp.") or not of_others):
        root.launcher = resolve("launcher._target_", target, LAUNCHER).keys
    task = str((config.get("task") or {}).get("_target_", MISSING))
    if task != MISSING and (structure_of(task) or task.startswith("exp.") or not of_others):
        root.task = structure_of(task) or task_type(task)
    root.record = RecordConfig()
    merged: Any = OmegaConf.merge(root, config)
    if merged.record is None:
        merged.record = RecordConfig()
    below = ((place, written(parent, key)) for place, parent, key in nodes(merged))
    for place, node in [("", merged), *below]:
        kind: Any = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        # Beside a `_target_` of one's own, added keys are that class's: its constructor takes or refuses them.
        other = place in ("model", "data") and node.get("_target_") != getattr(kind, "_target_", None)
        if dataclasses.is_dataclass(kind) and not other:
            known = [field.name for field in dataclasses.fields(kind)]
            for key in node:
                if key not in known:  # merging takes in what +KEY=VALUE has added
                    prefix = f"{place}." if place else ""
                    raise ConfigError(no_key(f"{prefix}{key}", [f"{prefix}{name}" for name in known]))
    return cast(ExpConfig, merged)  # whose types it has


def load(path: Path) -> ExpConfig:
    """The typed configuration in a ``config.yaml``.

    Raises:
        ConfigError: it is not what a run leaves.
        OmegaConfBaseException: it has keys that are no more.
    """
    try:
        content = OmegaConf.load(path)
    except (OSError, ValueError, YAMLError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path} is not the configuration of a run: {said}; use another run folder") from error
    if not isinstance(content, DictConfig) or "launcher" not in content:
        raise ConfigError(f"{path} is not the configuration of a run; use another run folder")
    return typed(content, of_others=True)


def opened(structure: Any) -> DictConfig:
    """The node of a dataclass, or of an object of one, whose fields of type ``Dict`` take members on the command line.

    Such a field has to be a dictionary by default, not null: OmegaConf cannot merge into a typed one that is null.
    """
    node: DictConfig = OmegaConf.structured(structure)
    _open(node)
    return node


def _open(node: Any) -> None:
    for key in list(node):
        child = None if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) else node[key]
        if isinstance(child, DictConfig):
            if OmegaConf.get_type(child) is dict:
                OmegaConf.set_struct(child, False)
            else:
                _open(child)


def replace_given(config: Any, overrides: Sequence[str]) -> None:
    """Give each dictionary of data and model that the command line sets the value that it has there, and nothing else.

    Args:
        config: composed and typed; changed in place.
        overrides: the user's.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if override.is_add() or override.is_force_add() or override.is_delete() or not key.startswith(_REPLACED):
            continue
        value = override.value()
        if isinstance(value, dict) and isinstance(OmegaConf.select(config, key), DictConfig):
            OmegaConf.update(config, key, value, merge=False)
