"""Finds and creates the classes that a configuration names; refuses code that the user has not chosen to run.

A configuration names a class by ``_target_`` or ``type``; some classes of MMEngine take a name under another key
(``ema_type``). :func:`check_names` checks a whole configuration before anything is imported; :func:`resolve` imports a
class and checks its interface; :func:`create` makes the object. Imports neither torch nor MMEngine.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

from omegaconf import OmegaConf

from exp.errors import ConfigError, UnavailableError, is_user_file, nearest, qualified_name, user_code_errors
from exp.plugins import entry_points

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_TRUSTED_PACKAGES = ("exp", "torch.nn", "torch.optim", "mmengine", "mmcv")
_FRAMEWORKS = {package.partition(".")[0] for package in _TRUSTED_PACKAGES}
_DOTTED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")  # an identifier or a dotted path


@dataclass
class UserChoices:
    """What the user of this process has chosen on the command line; empty in other processes.

    Attributes:
        arguments: all arguments, with Hydra's options, overrides last.
        folders: folders of configurations, and packages (``pkg://<name>``).
        plugins: modules and packages whose classes may be named (:func:`trust_packages`).
        untrusted_names: names in a run folder that somebody else may have written (:func:`mark_untrusted`).
        run_choices: configurations made of the run in ``init_from``, by ``<group>/<name>``
            (:func:`exp.config.compose.primary_config`).
        sweep: the :class:`exp.sweep.sweep.Sweep` that ``-m`` has started.
    """

    arguments: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)
    untrusted_names: set[str] = field(default_factory=set)
    run_choices: dict[str, Any] = field(default_factory=dict)
    sweep: Any = None


user = UserChoices()
"""A state of the process: Hydra makes its sources of configurations and its launcher itself, and classes are checked
wherever one is made, so none of them can be given what the user has chosen."""


def to_plain(config: Any) -> Any:
    """A node of a configuration as plain dicts and lists, without interpolations; plain dicts and lists are copied."""
    node = config if OmegaConf.is_config(config) else OmegaConf.create(config)
    return OmegaConf.to_container(node, resolve=True)


def walk(content: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Iterate over all members below ``content``, each before its own members.

    Args:
        content: a dict or a list; anything else has no members.
        prefix: the key of ``content``; empty for the root.

    Yields:
        The dotted key, the key or index in the container, and the value.
    """
    in_list = isinstance(content, list)
    for key, value in enumerate(content) if in_list else content.items() if isinstance(content, dict) else ():
        path = f"{prefix}[{key}]" if in_list else f"{prefix}.{key}" if prefix else str(key)
        yield path, key, value
        yield from walk(value, path)


def trust_packages(plugins: Sequence[str], overrides: Sequence[str] | None = None) -> None:
    """Allow names in these modules and packages, instead of those of an earlier call, in this process.

    Args:
        plugins: names of modules and packages.
        overrides: the user's overrides; ``plugins`` is allowed only there, not in a file. None: already checked.

    Raises:
        ConfigError: a file sets ``plugins``.
    """
    if overrides is not None and plugins and not any(o.lstrip("+").startswith("plugins=") for o in overrides):
        raise ConfigError(
            f"plugins=[{','.join(plugins)}] is set in a file, which another person may have written",
            "set it on the command line",
        )
    user.plugins = [*plugins]


def mark_untrusted(config: Any, user_text: str = "", groups: Sequence[str] = ("model", "data", "metrics")) -> None:
    """Require ``plugins`` for names in a run folder that lead to modules in the current folder or on the user's path.

    Somebody else may have written the run folder, and could name any of the user's modules.

    Args:
        config: the configuration of the run folder.
        user_text: text of the user's own configuration files; names in it stay allowed.
        groups: the parts of ``config`` that will be used.
    """
    names = {name for key, name in class_names(config) if re.split(r"[.\[]", key)[0] in groups}
    user.untrusted_names |= {name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}\b", user_text)}


def check_names(config: Any) -> None:
    """Refuse a configuration that names code which the user has not chosen, or names that are not valid in a path.

    Args:
        config: the whole configuration.

    Raises:
        ConfigError: there is such a name; the message has its key.
    """
    content = to_plain(config)
    for key, name in _names_in(content):
        _check_name(key, name)
    check_path_part("name", content["name"])
    for group in ("data", "task"):
        check_path_part(f"{group}.name", content[group].get("name"))


def _check_name(key: str, name: str) -> None:
    """Refuse a name that leads to code which the user has not chosen.

    Allowed are exp, torch.nn, torch.optim, MMEngine, MMCV and ``plugins``. For ``_target_`` also allowed are installed
    packages with backends or plugins of exp, since by installing them the user has chosen them; and the user's own
    modules, which are not installed, unless the name comes from a run folder (:func:`mark_untrusted`).

    Args:
        key: the key of the name.
        name: a plain name, which only a registry can resolve, or a dotted path.

    Raises:
        ConfigError: the name is not allowed.
    """
    is_target = key.endswith("_target_")
    if not (is_target or "." in name or key.endswith("_scope_")) or not _DOTTED_PATH.fullmatch(name):
        return
    top = name.partition(".")[0]
    allowed = any(f"{name}.".startswith(f"{package}.") for package in (*_TRUSTED_PACKAGES, *user.plugins))
    if is_target and not allowed:
        points = [point.value for group in ("exp.backends", "exp.plugins") for point in entry_points(group).values()]
        allowed = top in {re.split("[.:]", value)[0] for value in points} or (
            name not in user.untrusted_names and _is_user_module(top)
        )
    if not allowed or any(part.startswith("__") for part in name.split(".")):
        raise _not_trusted(key, name)


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
            f"{key}={value!r} cannot be the name of a folder",
            "leave out slashes and control characters, and do not begin it with '-', '.' or '~'",
        )


def class_names(config: Any) -> Iterator[tuple[str, str]]:
    """Iterate over the names of code in a configuration; yields the dotted key and the name. Follows interpolations."""
    return _names_in(to_plain(config))


def _names_in(content: Any) -> Iterator[tuple[str, str]]:
    for path, key, value in walk(content):
        if isinstance(value, str) and (key in ("_target_", "_scope_", "type") or str(key).endswith("_type")):
            yield path, value


@functools.lru_cache(maxsize=None)
def _is_user_module(top: str) -> bool:
    """Whether a top-level module or package is the user's own, not an installed one."""
    spec = find_user_module(top)
    if spec is None:
        return True  # check_target reports a missing module
    path = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    return path not in (None, "built-in", "frozen") and is_user_file(str(path))


def _not_trusted(key: str, name: str) -> ConfigError:
    """The error for a name that is not allowed."""
    packages = ",".join([*user.plugins, name.partition(".")[0]])
    return ConfigError(
        f"{key}={name} is neither part of exp nor in a registry, and its package is not in plugins",
        f"if you trust it, add plugins=[{packages}]",
    )


def find_user_module(name: str) -> ModuleSpec | None:
    """The spec of the top-level module or package of a name that the user has chosen. Imports nothing.

    The current folder is searched last. If it has the module, it stays in ``sys.path``, since the module may import
    others in it.
    """
    top = name.partition(".")[0]
    spec, current_dir = importlib.util.find_spec(top), str(Path.cwd())
    if spec is not None or current_dir in sys.path or getattr(sys.flags, "safe_path", False):
        return spec
    sys.path.append(current_dir)
    spec = importlib.util.find_spec(top)
    if spec is None:
        sys.path.remove(current_dir)
    return spec


def resolve(key: str, path: str, base: type | str | tuple[type, ...], functions: bool = False) -> Any:
    """Import the class that a configuration names, and check its interface. Does not call it.

    Args:
        key: the key of the name, for messages.
        path: ``package.module.Class``; not an attribute of a class or of another object.
        base: the interface of this key, or several; a dotted path where this package must not import the interface.
        functions: also accept a function of ``torch.nn.functional``, or one that the user's own package defines.

    Raises:
        ConfigError: the module or the class does not exist, the user has not chosen its code, or the class does not
            inherit ``base``.
        UnavailableError: the module exists, but importing it fails.
    """
    check_target(key, path)
    module, _, name = path.rpartition(".")
    imported = _import(key, path, module)
    if not hasattr(imported, name):
        raise ConfigError(f"{key}={path}: {module} has no {name}{nearest(name, dir(imported))}")
    cls = getattr(imported, name)
    if functions and _is_user_function(path, cls):
        return cls
    bases = [b if isinstance(b, str) else qualified_name(b) for b in (base if isinstance(base, tuple) else [base])]
    if not (inspect.isclass(cls) and {qualified_name(ancestor) for ancestor in cls.__mro__} & {*bases}):
        raise ConfigError(f"{key}={path} is not a subclass of {' or '.join(bases)}{', nor a function' * functions}")
    return cls


def _is_user_function(path: str, value: Any) -> bool:
    """Whether a value is a function of ``torch.nn.functional``, or one that the package in its path defines itself.

    What a package has imported is not meant: a configuration could name any function of Python by way of it.
    """
    package, _, name = path.rpartition(".")
    if package == "torch.nn.functional":
        return inspect.isroutine(value) and not name.startswith("_")
    top = path.partition(".")[0]
    return inspect.isfunction(value) and top not in _FRAMEWORKS and value.__module__.partition(".")[0] == top


def _import(key: str, path: str, module: str) -> Any:
    """Import the ``module`` of a name that the user has chosen; raises as :func:`resolve` does."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # the import of a user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise _no_module(key, path, str(error.name)) from error
        raise UnavailableError(
            f"{key}={path}: the module {module} does not import ({type(error).__name__}: {error})"
        ) from error


def _no_module(key: str, path: str, name: str) -> ConfigError:
    return ConfigError(f"{key}={path}: there is no module {name}", "is its folder on PYTHONPATH?")


def check_target(key: str, path: str) -> None:
    """Check the path of a class as far as this is possible without importing its module, which may import torch.

    Args:
        key: the key of the name, for messages.
        path: ``package.module.Class``.

    Raises:
        ConfigError: there is no such top-level module, or the user has not chosen its code.
    """
    if not _DOTTED_PATH.fullmatch(path) or "." not in path:
        raise ConfigError(f"{key}={path} is not the path of a class, such as package.module.Class")
    _check_name(key, path)
    if find_user_module(path) is None:
        raise _no_module(key, path, path.partition(".")[0])


def create(config: Any, base: type | tuple[type, ...], key: str, **arguments: Any) -> Any:
    """Make an object of the class in ``_target_``; the other keys are the arguments of its constructor.

    Arguments of a model may have a ``_target_``, too, if it is an ``nn.Module``; they are made first.

    Args:
        config: has ``_target_`` and arguments.
        base: the interface of this key, or several; other classes are refused.
        key: the key of ``config``, for messages.
        **arguments: further arguments of the constructor; those that it does not take are left out.

    Raises:
        ConfigError: the class does not exist, the user has not chosen its code, it does not inherit ``base``, lacks
            abstract methods, or does not take these arguments; or a user's constructor raises.
        UnavailableError: the module exists, but importing it fails.
    """
    content = to_plain(config)
    target = content.pop("_target_", None) if isinstance(content, dict) else None
    if target is None:
        raise ConfigError(f"{key} has no _target_", "give the path of a class, such as package.module.Class")
    return instantiate(resolve(f"{key}._target_", str(target), base), key, content, arguments)


def instantiate(cls: Any, key: str, content: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> Any:
    """Like :func:`create`, for a class that has been resolved.

    Args:
        cls: the class. The arguments named in its ``raw_arguments`` are passed as plain values; it makes objects of
            them itself.
        key: the key of the class, for messages.
        content: arguments in the configuration, with interpolations resolved.
        arguments: further arguments; those that the constructor does not take are left out.

    Raises:
        ConfigError: see :func:`create`.
        UnavailableError: see :func:`create`.
    """
    check_arguments(key, cls, content, dict.fromkeys(arguments or (), "exp sets it"))
    raw = {name: content[name] for name in getattr(cls, "raw_arguments", ()) if name in content}
    others = {name: value for name, value in content.items() if name not in raw}
    made = _arguments(others, key, may_use_registry=not is_exp_class(cls))
    taken = _parameters(cls) if arguments else None
    further = {name: value for name, value in (arguments or {}).items() if taken is None or name in taken}
    with user_code_errors(key, cls):
        return cls(**made, **raw, **further)


def check_arguments(key: str, cls: type, names: Iterable[str], reserved: Mapping[str, str] | None = None) -> None:
    """Refuse options that the constructor of a class does not take, or that exp sets itself.

    Args:
        key: the key of the options.
        cls: the class. If its constructor takes ``**kwargs``, Python checks the names when it is called.
        names: names of the options.
        reserved: names that an option must not have, with the reason.

    Raises:
        ConfigError: there is such an option; the message has the nearest valid name.
    """
    parameters, reserved = _parameters(cls), reserved or {}
    for name in names:
        if name in reserved:
            raise ConfigError(f"{key}.{name} cannot be set here: {reserved[name]}")
        if parameters is not None and name not in parameters:
            similar = nearest(f"{key}.{name}", [f"{key}.{valid}" for valid in parameters.difference(reserved)])
            raise ConfigError(f"{key}.{name}: {qualified_name(cls)} has no such argument{similar}")


def _parameters(cls: type) -> set[str] | None:
    """Names of a constructor's parameters; None: it may take any.

    Classes of MMEngine, and schedules of exp, pass ``**kwargs`` on to their bases. Others may use them themselves.
    """
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        try:
            parameters = [*inspect.signature(base.__init__).parameters.values()][1:]  # type: ignore[misc]
        except ValueError:  # a class in C
            return None
        names.update(parameter.name for parameter in parameters)
        if all(parameter.kind != inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return names
        if not qualified_name(base).startswith(("mmengine.", "exp.engine.optim.")):
            return None
    constructor: Any = cls.__new__
    return None if names or constructor is not object.__new__ else names


def _arguments(value: Any, key: str, may_use_registry: bool) -> Any:
    """A value of the configuration, with objects instead of the dictionaries that have ``_target_``.

    Args:
        value: the value.
        key: its key, for messages.
        may_use_registry: check names that the class may look up in a registry of MMEngine (:func:`check_type`).
    """
    if isinstance(value, list):
        return [_arguments(item, f"{key}[{number}]", may_use_registry) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "_target_" in value:
        if not key.startswith("model."):
            raise ConfigError(f"{key}._target_: only arguments of a model can be objects", "make it in the class above")
        from torch import nn

        return create(value, nn.Module, key)
    for name, item in value.items() if may_use_registry else ():
        if isinstance(item, str) and (name in ("type", "_scope_") or str(name).endswith("_type")):
            check_type(f"{key}.{name}", item)
    return {name: _arguments(item, f"{key}.{name}", may_use_registry) for name, item in value.items()}


def check_type(key: str, name: str) -> None:
    """Refuse a name that a class may look up in a registry of MMEngine, if that would run code the user has not chosen.

    A registry imports a name that it does not have.

    Args:
        key: the key of the name.
        name: the name of a class, or any other text, as the key may have another meaning.

    Raises:
        ConfigError: the lookup would import such code, or read a file that may run code.
    """
    from mmcv.transforms import BaseTransform
    from mmengine.hooks import Hook
    from torch import nn
    from torch.optim import Optimizer

    plain = without_scope(name)
    if plain in ("Pretrained", "PretrainedInit"):
        raise ConfigError(f"{key}={name} would open a file that may run code", "use init_from, which reads plain data")
    if key.endswith("_scope_"):
        _check_name(key, name)
    elif "." in plain:
        resolve(key, name, (nn.Module, BaseTransform, Hook, Optimizer))
    elif plain and plain not in sys.modules and importlib.util.find_spec(plain) is not None:
        raise _not_trusted(key, name)  # of a module that is imported already, a second import would run nothing


def without_scope(name: str) -> str:
    """``name`` without the scope ``mmengine.`` or ``mmcv.``, as registries have it."""
    scope, _, plain = name.partition(".")
    return plain if scope in ("mmengine", "mmcv") else name


def is_exp_class(value: Any) -> bool:
    """Whether a class, or the class of an object, is one of exp's."""
    return qualified_name(value).partition(".")[0] == "exp"


def import_plugins(plugins: Sequence[str]) -> None:
    """Import the modules and packages in ``plugins``, so that their classes are in MMEngine's registries.

    Raises:
        ConfigError: a module does not exist.
        UnavailableError: importing a module fails.
    """
    for name in plugins:
        if find_user_module(name) is None:
            raise _no_module("plugins", name, name)
        _import("plugins", name, name)
