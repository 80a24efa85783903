"""MMEngine's registries resolve what is registered, what is exp's own, and what the user has named in ``plugins``.

On their own they import any dotted path, any module of a plain name that nobody has registered, and a module
``<scope>.registry`` for a name before a dot.
"""

from __future__ import annotations

import importlib
from typing import Any, Sequence

import mmengine.registry.registry as implementation
from mmengine.registry import Registry

from exp.config.names import allow, check_name, check_object
from exp.config.targets import find_module
from exp.errors import ConfigError, UnavailableError

__all__ = ["choose_code"]

_get = Registry.get
_get_object = implementation.get_object_from_string


def choose_code(plugins: Sequence[str]) -> None:
    """Import the user's packages, and have registries resolve nothing else that is not registered.

    Args:
        plugins: modules and packages.

    Raises:
        ConfigError: there is no such module.
        UnavailableError: it does not import.
    """
    Registry.get = _checked_get
    implementation.get_object_from_string = _dotted_object
    allow(plugins)
    for name in plugins:
        if find_module(name) is None:
            raise ConfigError(f"plugins: there is no module {name}; is its folder on PYTHONPATH?")
        try:
            importlib.import_module(name)
        except Exception as error:  # another's module may raise anything while it loads
            raise UnavailableError(
                f"plugins: the module {name} does not import ({type(error).__name__}: {error})"
            ) from error


def _checked_get(self: Registry, key: str) -> Any:
    place = f"{self.name}: type"
    if isinstance(key, str) and key not in self.module_dict:
        check_name(place, key)
    found = _get(self, key)
    if isinstance(key, str) and "." in key and found is not None and found not in self.module_dict.values():
        check_object(place, key, found)
    return found


def _dotted_object(name: str) -> Any:
    """MMEngine's, but no module for the name that is none of a registered class."""
    return _get_object(name) if "." in name else None
