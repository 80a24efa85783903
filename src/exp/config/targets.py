"""The class that a configuration names: looked for in files before anything starts, and imported where it is made."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import sys
from pathlib import Path
from typing import Any

from exp.config.explain import nearest
from exp.config.names import PATH, check_name
from exp.contract import page_of
from exp.errors import ConfigError, UnavailableError

__all__ = ["check_target", "find_module", "find_own_module", "resolve"]


def find_own_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """As :func:`find_module`, for a name that is the user's choice: the current folder counts, too, after all others.

    From then on it stays on the path, since a module of the user's may import its neighbours.
    """
    spec = find_module(name)
    here = str(Path.cwd())
    if spec is not None or here in sys.path or getattr(sys.flags, "safe_path", False):
        return spec
    sys.path.append(here)
    spec = find_module(name)
    if spec is None:
        sys.path.remove(here)
    return spec


def resolve(key: str, path: str, base: type | tuple[type, ...]) -> Any:
    """The class that a configuration names. Nothing of it is called.

    Args:
        key: that has it, for messages.
        path: ``package.module.Class``. Only modules are imported on the way: what a module has imported, or what an
            object has, is not reached.
        base: the interface of the key; what inherits none is refused.

    Raises:
        ConfigError: there is no such module, or no such class in it, or the user has not chosen its code.
        UnavailableError: the module is there, and does not import.
    """
    module, _, name = path.rpartition(".")
    if not PATH.fullmatch(path) or not module:
        raise ConfigError(f"{key}={path} is no path of a class, such as package.module.Class")
    check_name(key, path)
    find_own_module(path.partition(".")[0])
    found = _import(key, path, module)
    if not hasattr(found, name):
        _refuse_name(key, path, module, name, _names_of(found))
    found = getattr(found, name)
    if not (inspect.isclass(found) and issubclass(found, base)):
        wanted = " or ".join(f"{each.__module__}.{each.__qualname__}" for each in _tuple(base))
        raise ConfigError(f"{key}={path} is no subclass of {wanted}; see {page_of(key)}")
    return found


def _tuple(base: type | tuple[type, ...]) -> tuple[type, ...]:
    return base if isinstance(base, tuple) else (base,)


def _import(key: str, target: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # another's module may raise anything while it loads
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise _no_module(key, target, str(error.name)) from error
        raise _broken(key, target, name, error) from error


def _names_of(found: Any) -> list[str]:
    return [name for name in dir(found) if not name.startswith("_")]


def _no_module(key: str, target: str, name: str) -> ConfigError:
    parent, _, last = name.rpartition(".")
    hint = nearest(last, _siblings(parent)) if parent else ""
    return ConfigError(f"{key}={target}: there is no module {name}{hint or '; is its folder on PYTHONPATH?'}")


def _siblings(package: str) -> list[str]:
    spec = find_module(package)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return [file.stem for folder in folders for file in Path(folder).glob("[!_]*") if file.suffix in ("", ".py")]


def _broken(key: str, target: str, name: str, error: Exception) -> UnavailableError:
    return UnavailableError(f"{key}={target}: the module {name} does not import ({type(error).__name__}: {error})")


def _refuse_name(key: str, target: str, module: str, name: str, known: list[str]) -> None:
    raise ConfigError(f"{key}={target}: {module} has no {name}{nearest(name, known)}")


def check_target(key: str, target: str) -> None:
    """Look whether there is the module that ``target`` names, without importing it: it may import torch.

    Whether it has the class is found out by the worker that imports it.

    Raises:
        ConfigError: there is no such module, or the user has not chosen its code.
    """
    parts = target.split(".")
    if not PATH.fullmatch(target) or len(parts) < 2:
        raise ConfigError(f"{key}={target} is no path of a class, such as package.module.Class")
    check_name(key, target)
    find_own_module(parts[0])
    for number in range(1, len(parts)):
        module = ".".join(parts[:number])
        if find_module(module) is None:
            raise _no_module(key, target, module)


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module, found without importing the packages above it, as ``importlib.util.find_spec`` would."""
    above, _, _ = name.rpartition(".")
    loaded: importlib.machinery.ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None:
        return loaded
    if not above:
        return _spec(name, None)
    package = find_module(above)
    return None if package is None else _find_below(name, package)


def _find_below(name: str, package: importlib.machinery.ModuleSpec) -> importlib.machinery.ModuleSpec | None:
    if package.submodule_search_locations is None:
        return None
    return _spec(name, list(package.submodule_search_locations))


def _spec(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        found = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if found is not None:
            return found
    return None
