"""What a ``_target_`` names: looked for in files before anything starts, and loaded where it is wanted."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import inspect
import sys
from pathlib import Path
from typing import Any, Iterator

from exp.config.explain import nearest
from exp.config.names import check_name, check_object
from exp.errors import ConfigError, UnavailableError

__all__ = ["check_target", "find_module", "load_target", "use_working_directory"]

# What can give a module names that are not written in it.
_DYNAMIC = {
    "__getattr__",
    "globals",
    "vars",
    "locals",
    "setattr",
    "exec",
    "eval",
    "__dict__",
    "modules",
    "import_module",
}


def use_working_directory() -> None:
    """Find modules of the current folder, as ``python -m exp`` does, also when started as ``exp``."""
    here = str(Path.cwd())
    if not getattr(sys.flags, "safe_path", False) and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def load_target(key: str, target: str) -> Any:
    """Import what ``target`` names.

    Args:
        key: that has it, for messages.
        target: ``package.module.Name``; further parts are attributes of that.

    Raises:
        ConfigError: there is no such module, or no such name in it, or the user has not chosen its code.
        UnavailableError: the module is there, and does not import.
    """
    parts = target.split(".")
    if not all(parts) or len(parts) < 2:
        raise ConfigError(f"{key}={target} is no path of a class, such as package.module.Class")
    check_name(key, target)
    found = _import(key, target, parts[0])
    for number, part in enumerate(parts[1:], 1):
        name = ".".join(parts[:number])
        if not hasattr(found, part):
            if not hasattr(found, "__path__") or number == len(parts) - 1:
                _refuse_name(key, target, name, part, _names_of(found))
            found = _import(key, target, f"{name}.{part}")
        else:
            found = getattr(found, part)
            if inspect.ismodule(found) and found.__name__.partition(".")[0] != parts[0]:
                check_name(key, f"{found.__name__}.{parts[-1]}")  # a module that this one has imported
    check_object(key, target, found)
    return found


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
    """Look whether there is what ``target`` names, without running any of it: it may import torch.

    Where a module's names cannot be told from its text, it is left to the worker that loads it.

    Raises:
        ConfigError: there is no such module, or no such name in it.
        UnavailableError: the module cannot be read as Python.
    """
    parts = target.split(".")
    if not all(parts) or len(parts) < 2:
        raise ConfigError(f"{key}={target} is no path of a class, such as package.module.Class")
    spec, name = find_module(parts[0]), parts[0]
    if spec is None:
        raise _no_module(key, target, name)
    for number, part in enumerate(parts[1:], 2):
        loaded = sys.modules.get(name)
        if loaded is not None and hasattr(loaded, part) and not hasattr(getattr(loaded, part), "__path__"):
            return
        below = _find_below(f"{name}.{part}", spec)
        if below is None:
            _check_name(key, target, name, part, spec, last=number == len(parts))
            return
        spec, name = below, f"{name}.{part}"
    raise ConfigError(f"{key}={target} is a module; name the class in it")


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


def _check_name(
    key: str, target: str, module: str, name: str, spec: importlib.machinery.ModuleSpec, last: bool
) -> None:
    if spec.origin is None or not spec.origin.endswith(".py") or not Path(spec.origin).is_file():
        if spec.origin is None and spec.submodule_search_locations is not None:  # a folder without __init__.py
            raise _no_module(key, target, f"{module}.{name}")
        return
    try:
        known = _names_written(spec.origin, Path(spec.origin).stat().st_mtime_ns)
    except (SyntaxError, ValueError) as error:
        raise _broken(key, target, module, error) from error
    if name in known or "*" in known or known & _DYNAMIC:
        return
    if spec.submodule_search_locations is not None and not last:
        raise _no_module(key, target, f"{module}.{name}")
    _refuse_name(key, target, module, name, sorted(word for word in known if not word.startswith("_")))


@functools.lru_cache(maxsize=64)
def _names_written(path: str, changed: int) -> frozenset[str]:
    """What :func:`_bound` finds in a file; a sweep asks for the same one again and again."""
    del changed  # when the file was changed last: another time, another answer
    return frozenset(_bound(ast.parse(Path(path).read_bytes())))


def _bound(tree: ast.AST) -> Iterator[str]:
    """Every name that a module may have, and more: those of its functions, too, and ``*`` for what it cannot tell."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store) or node.id in _DYNAMIC:
                yield node.id
        elif isinstance(node, ast.Attribute):
            if node.attr in _DYNAMIC:
                yield node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.Global):
            yield from node.names
