"""How the command line sets keys that are dictionaries: ``data.palette={road: "6EC1E4"}``.

Hydra merges a dictionary into the one that is there, so that a palette given for other data would keep the classes of
the experiment's; it refuses members that are not there yet; and OmegaConf fails on a typed dictionary that is null.
Here a dictionary given for a key of type ``Dict`` replaces what it had, as a list does, and one that is null or empty
takes any member. ``+key.member=value`` adds a member to others; ``~key`` takes the value of a key away.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

__all__ = ["register"]

_apply_hydras = ConfigLoaderImpl._apply_overrides_to_config


class _Place(NamedTuple):
    """A key of a schema that an override means, or lies below.

    Attributes:
        parent: of the dataclass that has the key.
        name: of the key.
        node: what is there.
        members: the rest of the override's key, below a dictionary.
    """

    parent: DictConfig
    name: str
    node: Any
    members: list[str]


def register() -> None:
    """Have Hydra apply overrides in this way; calling it again changes nothing."""
    # The one function through which single runs, sweeps and `compose` apply overrides; Hydra offers no plug-in for it.
    ConfigLoaderImpl._apply_overrides_to_config = staticmethod(_apply)  # type: ignore[method-assign]


def _apply(overrides: list[Override], cfg: DictConfig) -> None:
    opened: set[str] = set()  # dictionaries that had no members before
    for override in overrides:
        place = None if override.package is not None else _find(cfg, override.key_or_group)
        try:
            done = place is not None and _apply_to(place, override, opened)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException(f"Error merging override {override.input_line}") from error
        if not done:
            _apply_hydras([override], cfg)


def _find(cfg: DictConfig, key: str) -> _Place | None:
    """The place of a key that is a field of a schema, or a member of a field of type ``Dict``; None: it is neither."""
    parent: Any = cfg
    names = key.split(".")
    for number, name in enumerate(names):
        if not isinstance(parent, DictConfig) or parent._is_none() or parent._is_missing():
            return None
        node = parent._get_node(name, validate_access=False)
        last = number == len(names) - 1
        if node is None or not (last or _is_dictionary(node) or isinstance(node, DictConfig)):
            return None
        if last or _is_dictionary(node):
            is_field = isinstance(OmegaConf.get_type(parent), type) and OmegaConf.get_type(parent) is not dict
            return _Place(parent, name, node, names[number + 1 :]) if is_field else None
        parent = node
    return None


def _is_dictionary(node: Any) -> bool:
    hint = node._metadata.ref_type if isinstance(node, DictConfig) else None
    return getattr(hint, "__origin__", None) in (dict, Dict)


def _apply_to(place: _Place, override: Override, opened: set[str]) -> bool:
    """Apply an override; false: Hydra's own way is the right one."""
    if not _is_dictionary(place.node):
        return bool(override.is_delete()) and not place.members and _delete(place, override)
    value = override.value()
    content: Any = {} if place.node._is_none() or place.node._is_missing() else None
    if content is None:
        if place.node._is_interpolation():
            return False
        content = OmegaConf.to_container(place.node, resolve=False)
    if not place.members:
        if override.is_delete():
            return _delete(place, override)
        if not isinstance(value, dict):
            if value is None or "${" in str(value):
                return False
            raise ConfigCompositionException(
                f"{override.input_line}: {override.key_or_group} is a dictionary; quote the whole argument, or the "
                f"shell takes its braces and quotes: '{override.key_or_group}={{name: \"value\"}}'"
            )
        place.parent[place.name] = {**content, **value} if override.is_add() else value
        return True
    full_key = override.key_or_group[: -len(".".join(place.members)) - 1]
    if not content:
        opened.add(full_key)
    names = [_converted(place.members[0], place.node), *place.members[1:]]
    if override.is_delete():
        if len(names) > 1 or names[0] not in content or value is not None:
            return False
        del content[names[0]]
    elif names[0] not in content and full_key not in opened and not (override.is_add() or override.is_force_add()):
        raise ConfigCompositionException(
            f"{override.input_line}: {full_key} has no {names[0]}, but {', '.join(map(str, content))}; "
            f"to add it: +{override.input_line}; to replace all: {full_key}={{{names[0]}: ...}}"
        )
    elif names[0] in content and override.is_add() and not isinstance(value, (dict, list)):
        return False  # it says so
    else:
        inner = content
        for name in names[:-1]:
            if not isinstance(inner.get(name), dict):
                inner[name] = {}
            inner = inner[name]
        inner[names[-1]] = value
    place.parent[place.name] = content
    return True


def _converted(name: str, node: DictConfig) -> Any:
    """A member's name as the keys of the dictionary are."""
    return int(name) if node._metadata.key_type is int and name.lstrip("-").isdigit() else name


def _delete(place: _Place, override: Override) -> bool:
    """``~key`` of a schema, whose keys are always there: it has no value any more.

    Raises:
        ConfigCompositionException: it must have one.
    """
    if override.value() is not None:
        return False
    if place.node._metadata.optional:
        place.parent[place.name] = None
    elif _is_dictionary(place.node):
        place.parent[place.name] = {}
    elif isinstance(place.node, ListConfig):
        place.parent[place.name] = []
    else:
        key = override.key_or_group
        raise ConfigCompositionException(f"{override.input_line}: {key} always has a value; set it with {key}=...")
    return True
