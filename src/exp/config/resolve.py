"""Finds and creates the classes that a configuration names; refuses code that the user has not chosen to run.

A configuration names a class by ``_target_`` or ``type``; some classes of MMEngine take a name under another key
(``ema_type``). :func:`check_names` checks a whole configuration before anything is imported; :func:`resolve` imports a
class and checks its interface; :func:`create` makes the object. Imports neither torch nor MMEngine.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import inspect
import re
import sys
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.errors import ConfigError, UnavailableError, asked, is_users, nearest, page_of, shown
from exp.plugins import entry_points

__all__ = [
    "PATH", "allow", "check_names", "check_path_part", "check_target", "check_type", "create", "distrust",
    "find_module", "find_own_module", "is_own", "make", "names_in", "nodes", "resolve", "without_scope",
]  # fmt: skip

_REGISTERING = ("mmengine.hooks", "mmengine.optim", "mmengine.model", "mmengine.visualization")
_OPEN = ("exp", "torch.nn", "torch.optim", "mmengine", "mmcv")
PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""A Python identifier or a dotted path."""
_plugins: list[str] = []
"""The modules and packages of ``plugins``, in this process (:func:`allow`)."""
_of_others: set[str] = set()
"""Names in the configuration of a run folder, which may be a stranger's (:func:`distrust`)."""


def nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Iterate over all members below ``config``, each before its own members. Interpolations are not followed.

    Args:
        config: a node of OmegaConf; anything else has no members.
        prefix: the key of ``config``; empty for the root.

    Yields:
        The dotted key, the container, the key or index in it, and the value as it is written: the text of an
        interpolation, and ``???`` for a missing value.
    """
    if not OmegaConf.is_config(config):
        return
    in_list = isinstance(config, ListConfig)
    for key in range(len(config)) if in_list else list(config):
        place = f"{prefix}[{key}]" if in_list else f"{prefix}.{key}" if prefix else str(key)
        if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
            content: Any = OmegaConf.to_container(config, resolve=False)
            yield place, config, key, content[key]
        else:
            yield place, config, key, config[key]
            yield from nodes(config[key], place)


def allow(plugins: Sequence[str]) -> None:
    """Allow names in these modules and packages, instead of those of an earlier call, in this process."""
    _plugins[:] = plugins


def distrust(config: Any, chosen: str = "", groups: Sequence[str] = ("model", "data", "metrics")) -> None:
    """Require ``plugins`` for names in a run folder that lead to modules in the current folder or on the user's path.

    The run folder may be a stranger's, who could name any of the user's modules.

    Args:
        config: the configuration of the run folder.
        chosen: text of the user's own configuration files; names in it stay allowed.
        groups: the parts of ``config`` that will be used.
    """
    for group in groups:
        names = {name for _, name in names_in(config.get(group))}
        _of_others.update(name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}\b", chosen))


def check_names(config: Any, overrides: Sequence[str] | None = None) -> None:
    """Refuse a configuration that names code which the user has not chosen, or names that are not valid in a path.

    Args:
        config: composed; interpolations are followed.
        overrides: the user's overrides; ``plugins`` is allowed only there, not in a file. None: the configuration comes
            from a run folder, and its ``plugins`` were checked before.

    Raises:
        ConfigError: there is such a name; the message has its key.
    """
    plugins = [str(name) for name in config.get("plugins") or ()]
    if overrides is not None and plugins and not any(each.lstrip("+").startswith("plugins=") for each in overrides):
        raise ConfigError(
            f"plugins=[{','.join(plugins)}] is set in a file, which somebody else may have written; set it on the "
            "command line"
        )
    allow(plugins)
    for key, name in names_in(config):
        _check_name(key, name)
    for key in ("name", "data.name", "task.name"):
        check_path_part(key, OmegaConf.select(config, key, throw_on_missing=False))


def _check_name(key: str, name: str) -> None:
    """Refuse a name that leads to code which the user has not chosen.

    Allowed are exp, torch.nn, torch.optim, MMEngine, MMCV and ``plugins``. For ``_target_`` also allowed are installed
    packages with backends or plugins of exp, since by installing them the user has chosen them; and the user's own
    modules, which are not installed, unless the name comes from a run folder (:func:`distrust`).

    Args:
        key: the key of the name.
        name: a plain name, which only a registry can resolve, or a dotted path.

    Raises:
        ConfigError: the name is not allowed.
    """
    is_target = key.endswith("_target_")
    if not (is_target or "." in name or key.endswith("_scope_")) or not PATH.fullmatch(name):
        return
    top = name.partition(".")[0]
    chosen = any(f"{name}.".startswith(f"{place}.") for place in (*_OPEN, *_plugins))
    if is_target and not chosen:
        points = [point.value for group in ("exp.backends", "exp.plugins") for point in entry_points(group).values()]
        chosen = top in {re.split("[.:]", value)[0] for value in points} or (name not in _of_others and _is_own(top))
    if not chosen or any(part.startswith("__") for part in name.split(".")):
        raise _refusal(key, name)


def check_path_part(key: str, value: Any) -> None:
    """Refuse a name that is not valid as the name of one folder, because ``output_dir`` may contain it.

    Args:
        key: the key of the name, for the message.
        value: the name; anything but a string is allowed.

    Raises:
        ConfigError: the name is empty, has a slash or control characters, or begins with ``-``, ``.`` or ``~``.
    """
    if not isinstance(value, str) or value == "???":
        return
    if not value.strip() or re.search(r"[/\\\x00-\x1f\x7f]", value) or value[0] in "-.~":
        raise ConfigError(
            f"{key}={value!r} cannot be the name of a folder; leave out slashes and control characters, and do not "
            "begin it with '-', '.' or '~'"
        )


def names_in(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Iterate over the names of code in a configuration; interpolations are followed.

    Args:
        config: a node of OmegaConf; anything else has no names.
        prefix: the key of ``config``; empty for the root.

    Yields:
        The dotted key and the name.
    """
    for place, parent, key, _ in nodes(config, prefix):
        name, leads_on = str(key), OmegaConf.is_interpolation(parent, key)
        wanted = name in ("_target_", "_scope_", "type") or name.endswith("_type")
        if not (wanted or leads_on):
            continue
        try:
            value = parent[key]
        except OmegaConfBaseException:
            continue  # reported where the value is used
        if leads_on:
            yield from names_in(value, place)
        if wanted and isinstance(value, str):
            yield place, value


@functools.lru_cache(maxsize=None)
def _is_own(top: str) -> bool:
    """Whether a top-level module or package is the user's own, not an installed one."""
    spec = find_own_module(top)
    if spec is None:
        return True  # check_target reports a missing module
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    return place not in (None, "built-in", "frozen") and is_users(str(place))


def _refusal(key: str, name: str) -> ConfigError:
    """The error for a name that is not allowed."""
    named = ",".join([*_plugins, name.partition(".")[0]])
    return ConfigError(
        f"{key}={name} is neither part of exp nor in a registry, and its package is not in plugins; if you trust it, "
        f"add plugins=[{named}]"
    )


def find_own_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """Like :func:`find_module`, for a name that the user has chosen: also looks in the current folder, last of all.

    If the module is there, the current folder stays in ``sys.path``, since the module may import others beside it.
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


def resolve(key: str, path: str, base: type | str | tuple[type, ...]) -> Any:
    """Import the class that a configuration names, and check its interface. Does not call it.

    Args:
        key: the key of the name, for messages.
        path: ``package.module.Class``; not an attribute of a class or of another object.
        base: the interface of this key, or several; a dotted path where this package must not import the interface.

    Raises:
        ConfigError: the module or the class does not exist, the user has not chosen its code, or the class does not
            inherit ``base``.
        UnavailableError: the module exists, but importing it fails.
    """
    _check_path(key, path)
    module, _, name = path.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # importing somebody's module may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise _no_module(key, path, str(error.name)) from error
        raise UnavailableError(
            f"{key}={path}: the module {module} does not import ({type(error).__name__}: {error})"
        ) from error
    if not hasattr(found, name):
        raise ConfigError(f"{key}={path}: {module} has no {name}{nearest(name, dir(found))}")
    found = getattr(found, name)
    wanted = [each if isinstance(each, str) else shown(each) for each in (base if isinstance(base, tuple) else [base])]
    if not (inspect.isclass(found) and {shown(each) for each in found.__mro__} & {*wanted}):
        raise ConfigError(f"{key}={path} is not a subclass of {' or '.join(wanted)}; see {page_of(key)}")
    return found


def _check_path(key: str, path: str) -> None:
    if not PATH.fullmatch(path) or "." not in path:
        raise ConfigError(f"{key}={path} is not the path of a class, such as package.module.Class")
    _check_name(key, path)
    find_own_module(path.partition(".")[0])


def _no_module(key: str, target: str, name: str) -> ConfigError:
    return ConfigError(f"{key}={target}: there is no module {name}; is its folder on PYTHONPATH?")


def check_target(key: str, target: str) -> None:
    """Check that the module in ``target`` exists, without importing it, since it may import torch.

    The worker, which imports it, checks that it has the class.

    Args:
        key: the key of the name, for messages.
        target: ``package.module.Class``.

    Raises:
        ConfigError: the module does not exist, or the user has not chosen its code.
    """
    _check_path(key, target)
    module = target.rpartition(".")[0]
    if find_module(module) is None:
        raise _no_module(key, target, module)


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module, or None. Unlike ``importlib.util.find_spec``, does not import the parent packages."""
    spec: importlib.machinery.ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    if spec is not None:
        return spec
    above, places = name.rpartition(".")[0], None
    if above:
        package = find_module(above)
        if package is None or package.submodule_search_locations is None:
            return None
        places = list(package.submodule_search_locations)
    found = (each.find_spec(name, places) for each in sys.meta_path if hasattr(each, "find_spec"))
    return next(filter(None, found), None)


def create(config: Any, base: type | tuple[type, ...], key: str, **arguments: Any) -> Any:
    """Make an object of the class in ``_target_``; the other keys are the arguments of its constructor.

    Arguments of a model may have a ``_target_``, too, if it is an ``nn.Module``; they are made first.

    Args:
        config: has ``_target_`` and arguments.
        base: the interface of this key, or several; other classes are refused.
        key: the key of ``config``, for messages.
        **arguments: further arguments of the constructor.

    Raises:
        ConfigError: the class does not exist, the user has not chosen its code, it does not inherit ``base``, lacks
            abstract methods, or does not take these arguments; or a user's constructor raises.
        UnavailableError: the module exists, but importing it fails.
    """
    content: Any = OmegaConf.to_container(
        config if OmegaConf.is_config(config) else OmegaConf.create(config), resolve=True
    )
    target = str(content.pop("_target_"))
    return make(resolve(f"{key}._target_", target, base), key, content, arguments)


def make(cls: Any, key: str, content: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> Any:
    """Like :func:`create`, for a class that has been resolved.

    Args:
        cls: the class. Arguments whose names are in its ``makes`` are passed as they are; it makes these parts itself.
        key: the key of the class, for messages.
        content: arguments in the configuration, with interpolations resolved.
        arguments: further arguments.

    Raises:
        ConfigError: see :func:`create`.
        UnavailableError: see :func:`create`.
    """
    parts = {name: content[name] for name in getattr(cls, "makes", ()) if name in content}
    others = {name: value for name, value in content.items() if name not in parts}
    given = {**_arguments(others, key, asks_registries=not is_own(cls)), **parts}
    with asked(key, cls):
        return cls(**given, **(arguments or {}))


def _arguments(value: Any, key: str, asks_registries: bool) -> Any:
    """A value of the configuration, with objects instead of the dictionaries that have ``_target_``.

    Args:
        value: the value.
        key: its key, for messages.
        asks_registries: check names that the class may look up in a registry of MMEngine (:func:`check_type`).
    """
    if isinstance(value, list):
        return [_arguments(item, f"{key}[{number}]", asks_registries) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "_target_" in value:
        if not key.startswith("model."):
            raise ConfigError(f"{key}._target_: only arguments of a model can be objects; make it in the class above")
        from torch import nn

        return create(value, nn.Module, key)
    for name, item in value.items() if asks_registries else ():
        if isinstance(item, str) and (name in ("type", "_scope_") or str(name).endswith("_type")):
            check_type(f"{key}.{name}", item)
    return {name: _arguments(item, f"{key}.{name}", asks_registries) for name, item in value.items()}


def check_type(key: str, name: str) -> None:
    """Refuse a name that a class may look up in a registry, if that would import code that the user has not chosen.

    Args:
        key: the key of the name.
        name: the name of a class, or any other text, as the key may have another meaning.

    Raises:
        ConfigError: the lookup would import such code, or read a file that may run code.
    """
    import mmengine.registry
    from mmcv.transforms import BaseTransform
    from mmengine.hooks import Hook
    from torch import nn
    from torch.optim import Optimizer

    for module in _REGISTERING:
        importlib.import_module(module)
    registries = [each for each in vars(mmengine.registry).values() if isinstance(each, mmengine.registry.Registry)]
    if without_scope(name) in ("Pretrained", "PretrainedInit"):
        raise ConfigError(f"{key}={name} would open a file that may run code; use init_from, which reads plain data")
    if key.endswith("_scope_"):
        _check_name(key, name)
    elif any(without_scope(name) in each.module_dict for each in registries):
        return
    elif "." in name:
        resolve(key, name, (nn.Module, BaseTransform, Hook, Optimizer))
    elif name not in sys.modules and find_module(name) is not None:  # a second import runs nothing
        raise _refusal(key, name)


def without_scope(name: str) -> str:
    """``name`` without the scope ``mmengine.`` or ``mmcv.``, as registries have it."""
    scope, _, plain = name.partition(".")
    return plain if scope in ("mmengine", "mmcv") else name


def is_own(thing: Any) -> bool:
    """Whether a class, or the class of an object, is exp's own."""
    return shown(thing).partition(".")[0] == "exp"
