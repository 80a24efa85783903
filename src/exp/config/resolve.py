"""The way from a name in a configuration to a class: what nobody chose is refused before it is imported or called.

A class is named by ``_target_`` or ``type``, and some of MMEngine's classes take a name under another key
(``ema_type``). :func:`check_names` looks at all of a configuration before anything is imported; :func:`resolve` imports
a class and checks its interface; :func:`create` makes the object. Imports neither torch nor MMEngine.
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

from exp.errors import ConfigError, UnavailableError, asked, nearest, owner_of, page_of, shown
from exp.plugins import entry_points

__all__ = [
    "PATH", "allow", "check_names", "check_path_part", "check_target", "check_type", "create", "distrust",
    "find_module", "find_own_module", "is_own", "made", "make", "names_in", "nodes", "resolve", "without_scope",
]  # fmt: skip

_REGISTERING = ("mmengine.hooks", "mmengine.optim", "mmengine.model", "mmengine.visualization")
_OPEN = ("exp", "torch.nn", "torch.optim", "mmengine", "mmcv")
PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""The form of a name of Python's."""
_plugins: list[str] = []
"""What the user has named; of this process."""
_of_others: set[str] = set()
"""Names that stand in another's run folder: a module of the current folder is no choice of the user's then."""


def nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Every member below ``config``; what is below a member comes after it. Interpolations are not followed.

    Args:
        config: of OmegaConf; others have no members, and neither have null, ``???`` and an interpolation.
        prefix: the key of ``config``; empty for the root.

    Yields:
        The dotted key, the container, the key or index in it, and the value as it is written: an interpolation is its
        text, and what is missing ``???``.
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
    """From now on, names in these modules and packages resolve."""
    _plugins[:] = plugins


def distrust(config: Any, chosen: str = "", groups: Sequence[str] = ("model", "data", "metrics")) -> None:
    """From now on, what a run folder names needs ``plugins`` where it leads to the user's modules.

    Args:
        config: of the run folder.
        chosen: text of the user's own files; the names in it are his choice.
        groups: what of the configuration is used.
    """
    for group in groups:
        names = {name for _, name in names_in(config.get(group))}
        _of_others.update(name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}\b", chosen))


def check_names(config: Any, overrides: Sequence[str] | None = None) -> None:
    """Refuse a configuration that names code which the user has not chosen, or a path that leads elsewhere.

    Args:
        config: composed; interpolations are looked through.
        overrides: the user's: ``plugins`` counts there only. None: it has been checked, and is read from a run folder.

    Raises:
        ConfigError: it does; the key is named.
    """
    plugins = [str(name) for name in config.get("plugins") or ()]
    if overrides is not None and plugins and not any(each.lstrip("+").startswith("plugins=") for each in overrides):
        raise ConfigError(
            f"plugins=[{','.join(plugins)}] stands in a file, which may be a stranger's; give it on the command line"
        )
    for name in plugins:
        if not PATH.fullmatch(name):
            raise ConfigError(f"plugins: {name} is no name of a module or package")
    allow(plugins)
    for key, name in names_in(config):
        _check_name(key, name)
    if not re.match(r"^\w+$", str(config.task.name)):
        raise ConfigError(f"task.name={config.task.name} is no task")
    for key in ("name", "data.name"):
        check_path_part(key, OmegaConf.select(config, key, throw_on_missing=False))


def _check_name(key: str, name: str) -> None:
    """Refuse a name that leads to code which the user has not chosen.

    Args:
        key: that has it; a ``_target_`` may also name the user's own modules, which are not installed, and packages
            that give exp backends or plugins: who installs one chooses it, whichever file names it.
        name: a plain name, which only a registry can resolve, or a dotted path.

    Raises:
        ConfigError: it does.
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
    """Refuse a name that would not be one folder below ``outputs`` where ``output_dir`` is made of it.

    Raises:
        ConfigError: it has a separator or control characters, or begins as an option or a hidden file does.
    """
    if not isinstance(value, str) or value == "???":
        return
    if not value.strip() or re.search(r"[/\\\x00-\x1f\x7f]", value) or value[0] in "-.~":
        raise ConfigError(
            f"{key}={value!r} is no name for a folder; leave out slashes and control characters, and begin it with "
            "none of '-', '.' and '~'"
        )


def names_in(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The names of code in a configuration, with their keys.

    Args:
        config: of OmegaConf; others have none.
        prefix: the key of ``config``; empty for the root.
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
    """Whether a module or package is the user's: not installed."""
    spec = find_own_module(top)
    return spec is None or _owner(spec) == "user"  # there is no such module: check_target reports it


def _owner(spec: importlib.machinery.ModuleSpec) -> str | None:
    """As :func:`exp.errors.owner_of`, of a module."""
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    return None if place in (None, "built-in", "frozen") else owner_of(str(place))


def _refusal(key: str, name: str) -> ConfigError:
    """The error for a name that the user has not chosen."""
    named = ",".join([*_plugins, name.partition(".")[0]])
    return ConfigError(
        f"{key}={name} is neither of exp nor in a registry, and you have not named its package; if you trust it, add "
        f"plugins=[{named}]"
    )


def find_own_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """As :func:`find_module`, for a name that is the user's choice: the current folder counts, too, after all others.

    From then on it stays on the path, since a module of the user's may import its neighbors.
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
    """The class that a configuration names. Nothing of it is called.

    Args:
        key: that has it, for messages.
        path: ``package.module.Class``. Only modules are imported on the way: what a module has imported, or what an
            object has, is not reached.
        base: the interface of the key, or its dotted path where importing it would lead up; what inherits none is
            refused.

    Raises:
        ConfigError: there is no such module, or no such class in it, or the user has not chosen its code.
        UnavailableError: the module is there, and does not import.
    """
    _check_path(key, path)
    module, _, name = path.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # another's module may raise anything while it loads
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
        raise ConfigError(f"{key}={path} is no subclass of {' or '.join(wanted)}; see {page_of(key)}")
    return found


def _check_path(key: str, path: str) -> None:
    if not PATH.fullmatch(path) or "." not in path:
        raise ConfigError(f"{key}={path} is no path of a class, such as package.module.Class")
    _check_name(key, path)
    find_own_module(path.partition(".")[0])


def _no_module(key: str, target: str, name: str) -> ConfigError:
    return ConfigError(f"{key}={target}: there is no module {name}; is its folder on PYTHONPATH?")


def check_target(key: str, target: str) -> None:
    """Look whether there is the module that ``target`` names, without importing it: it may import torch.

    Whether it has the class is found out by the worker that imports it.

    Raises:
        ConfigError: there is no such module, or the user has not chosen its code.
    """
    _check_path(key, target)
    parts = target.split(".")
    for number in range(1, len(parts)):
        module = ".".join(parts[:number])
        if find_module(module) is None:
            raise _no_module(key, target, module)


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module, found without importing the packages above it, as ``importlib.util.find_spec`` would."""
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
    """The object of the class in ``_target_``, with the other keys as its arguments.

    Parts of a model may be named by ``_target_``, too, where they are modules of torch.

    Args:
        config: has ``_target_`` and arguments.
        base: the interface of the key; no class but one that inherits it is called.
        key: of ``config``, for messages.
        **arguments: further ones.

    Raises:
        ConfigError: there is no such class, the user has not chosen its code, it is none of the interface, it does not
            take these arguments, or it lacks members that its interface asks for.
        UnavailableError: the module is there, and does not import.
    """
    content: Any = OmegaConf.to_container(
        config if OmegaConf.is_config(config) else OmegaConf.create(config), resolve=True
    )
    target = str(content.pop("_target_"))
    return make(resolve(f"{key}._target_", target, base), key, content, arguments)


def make(cls: Any, key: str, content: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> Any:
    """An object of a class that a configuration has named.

    Args:
        cls: the class; it makes parts under the keys in its ``makes`` itself, by :func:`resolve`.
        key: that has it, for messages.
        content: the arguments in the configuration, resolved.
        arguments: further ones.

    Raises:
        ConfigError: as :func:`create`.
    """
    parts = {name: content[name] for name in getattr(cls, "makes", ()) if name in content}
    others = {name: value for name, value in content.items() if name not in parts}
    given = {**_arguments(others, key, asks_registries=not is_own(cls)), **parts}
    return made(cls, key, **given, **(arguments or {}))


def _arguments(value: Any, key: str, asks_registries: bool) -> Any:
    """A value of the configuration, with the parts that it names made; of the names that a registry may be asked for,
    none leads to code that is not chosen.
    """
    if isinstance(value, list):
        return [_arguments(item, f"{key}[{number}]", asks_registries) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "_target_" in value:
        if not key.startswith("model."):
            raise ConfigError(f"{key}._target_: only parts of a model are named so; have the class above it make this")
        from torch import nn

        return create(value, nn.Module, key)
    for name, item in value.items() if asks_registries else ():
        if isinstance(item, str) and (name in ("type", "_scope_") or str(name).endswith("_type")):
            check_type(f"{key}.{name}", item)
    return {name: _arguments(item, f"{key}.{name}", asks_registries) for name, item in value.items()}


def check_type(key: str, name: str) -> None:
    """Refuse a name that a class may hand to a registry, where that would import what is not chosen.

    Args:
        key: that has it.
        name: of a class, or whatever else the key may hold.

    Raises:
        ConfigError: it would.
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
    else:
        spec = find_module(name)
        if spec is not None and _owner(spec) is not None:  # a module of Python's own does nothing
            raise _refusal(key, name)


def without_scope(name: str) -> str:
    """The name that a registry has, of one with or without ``mmengine.`` or ``mmcv.`` in front."""
    scope, _, plain = name.partition(".")
    return plain if scope in ("mmengine", "mmcv") else name


def is_own(thing: Any) -> bool:
    """Whether a class, or that of an object, is exp's own."""
    return shown(thing).partition(".")[0] == "exp"


def made(cls: Any, key: str, *arguments: Any, **keywords: Any) -> Any:
    """An object of a class, or what a function gives, named in a configuration.

    Args:
        cls: the class.
        key: that names it, such as ``model`` or ``metrics[0]``.
        *arguments: for it.
        **keywords: likewise.

    Raises:
        ConfigError: its constructor does not take these arguments, or members are missing that its interface asks for,
            or it raises; what that of a class of exp's own raises comes as it is.
    """
    if is_own(cls):
        try:
            inspect.signature(cls).bind(*arguments, **keywords)
        except TypeError as error:
            raise ConfigError(f"{key}: {shown(cls)}: {error}") from error
        return cls(*arguments, **keywords)
    with asked(key, cls):
        return cls(*arguments, **keywords)
