"""The user's packages, and what the names of a configuration lead to where MMEngine's registries look them up.

MMEngine's registries import any dotted path, and for a plain name that is not registered any module of that name. So
a name is checked here before MMEngine sees it.
"""

from __future__ import annotations

import importlib
from typing import Any, Sequence

from mmengine.registry import Registry

from exp.config.explain import nearest
from exp.config.resolve import allow, find_own_module, resolve, without_scope
from exp.errors import ConfigError, UnavailableError

__all__ = ["import_plugins", "registered"]


def import_plugins(plugins: Sequence[str]) -> None:
    """Import the packages in ``plugins``, whose names resolve from now on.

    Raises:
        ConfigError: there is no such package.
        UnavailableError: a module does not import.
    """
    allow(plugins)
    for name in plugins:
        if find_own_module(name) is None:
            raise ConfigError(f"plugins: there is no module {name}; is its folder on PYTHONPATH?")
        try:
            importlib.import_module(name)
        except Exception as error:  # another's module may raise anything while it loads
            raise UnavailableError(
                f"plugins: the module {name} does not import ({type(error).__name__}: {error})"
            ) from error


def registered(key: str, name: str, registry: Registry, base: type | tuple[type, ...]) -> Any:
    """The class that ``type`` names: one of a registry, or by its path.

    Args:
        key: that has it, for messages.
        name: registered, perhaps with ``mmengine.`` in front, or ``package.module.Class``.
        registry: MMEngine's for this key.
        base: what a class that is named by its path has to inherit.

    Raises:
        ConfigError: there is none, or it is none of the interface.
        UnavailableError: its module does not import.
    """
    registry.import_from_location()
    known = registry.module_dict
    found = known.get(without_scope(name))
    if found is not None:
        return found
    if "." not in name:
        public = sorted(each for each in known if not each.startswith("_"))
        raise ConfigError(f"{key}={name} is not known{nearest(name, public)}; known are {', '.join(public)}")
    return resolve(key, name, base)
