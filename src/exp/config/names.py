"""Which packages a configuration may name: a file from a stranger is not to run what nobody here has chosen.

A class is named by ``_target_`` or ``type``, and some of MMEngine's classes take a name under another key
(``ema_type``). :func:`check_names` looks at all of a configuration before anything is imported;
:func:`exp.config.targets.resolve` imports a class and checks its interface. Imports neither torch nor MMEngine.
"""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any, Iterator, Sequence

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.walk import nodes
from exp.errors import ConfigError
from exp.plugins import entry_points

__all__ = [
    "PATH",
    "allow",
    "check_name",
    "check_names",
    "check_path_part",
    "distrust",
    "is_standard",
    "names_in",
    "refusal",
]

_OPEN = ("exp", "torch.nn", "torch.optim", "mmengine", "mmcv")
PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""The form of a name of Python's."""
_plugins: list[str] = []
"""What the user has named; of this process."""
_of_others: set[str] = set()
"""Names that stand in another's run folder: a module of the current folder is no choice of the user's then."""


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
    allow(_named_by_the_user(config, overrides))
    for key, name in names_in(config):
        check_name(key, name)
    if not re.match(r"^\w+$", str(config.task.name)):
        raise ConfigError(f"task.name={config.task.name} is no task")
    for key in ("name", "data.name"):
        check_path_part(key, OmegaConf.select(config, key, throw_on_missing=False))


def check_name(key: str, name: str) -> None:
    """Refuse a name that leads to code which the user has not chosen.

    Args:
        key: that has it; a ``_target_`` may also name the user's own modules, which are not installed, and packages
            that give exp backends.
        name: a plain name, which only a registry can resolve, or a dotted path.

    Raises:
        ConfigError: it does.
    """
    is_target = key.endswith("_target_")
    if not (is_target or "." in name or key.endswith("_scope_")) or not PATH.fullmatch(name):
        return
    top = name.partition(".")[0]
    chosen = _within(name, (*_OPEN, *_plugins))
    if is_target and not chosen:  # an installed package of plugins is the user's choice, whichever file names it
        chosen = top in _with_plugins() or (name not in _of_others and _is_own(top))
    if not chosen or any(part.startswith("__") for part in name.split(".")):
        raise refusal(key, name, top)


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


def _named_by_the_user(config: Any, overrides: Sequence[str] | None) -> list[str]:
    plugins = [str(name) for name in config.get("plugins") or ()]
    if overrides is not None and plugins and not any(_key_of(override) == "plugins" for override in overrides):
        raise ConfigError(
            f"plugins=[{','.join(plugins)}] stands in a file, which may be a stranger's; give it on the command line"
        )
    for name in plugins:
        if not PATH.fullmatch(name):
            raise ConfigError(f"plugins: {name} is no name of a module or package")
    return plugins


def _key_of(override: str) -> str:
    if "plugins" not in override:
        return ""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # takes its time to load

    return OverridesParser.create().parse_override(override).key_or_group


def names_in(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The names of code in a configuration, with their keys.

    Args:
        config: of OmegaConf; others have none.
        prefix: the key of ``config``; empty for the root.
    """
    for place, parent, key in nodes(config, prefix):
        name, leads_on = str(key), OmegaConf.is_interpolation(parent, key)
        wanted = name in ("_target_", "_scope_", "type") or name.endswith("_type")
        if not (wanted or leads_on):
            continue
        try:
            value = parent[key]
        except OmegaConfBaseException:
            continue  # which is told where it is wanted
        if leads_on:
            yield from names_in(value, place)
        if wanted and isinstance(value, str):
            yield place, value


def _within(name: str, places: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{place}.") for place in places)


@functools.lru_cache(maxsize=None)
def _is_own(top: str) -> bool:
    """Whether a module or package is the user's: not installed."""
    from exp.config.targets import find_own_module

    spec = find_own_module(top)
    if spec is None:
        return True  # there is none, which is told elsewhere
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if top == "exp" or is_standard(top) or place is None:
        return False
    return not {"site-packages", "dist-packages"} & set(Path(place).parts)


def is_standard(top: str) -> bool:
    """Whether a module is Python's own.

    Args:
        top: its name, without a dot.
    """
    if top in sys.builtin_module_names or top in getattr(sys, "stdlib_module_names", ()):
        return True
    from exp.config.targets import find_module

    spec = find_module(top)
    if spec is None or spec.origin is None:
        return False
    paths = sysconfig.get_paths()
    standard = any(spec.origin.startswith(f"{paths[place]}/") for place in ("stdlib", "platstdlib"))
    return spec.origin == "frozen" or (standard and "-packages/" not in spec.origin)


def _with_plugins() -> set[str]:
    """Packages that give exp backends or plugins: whoever has installed them has chosen them."""
    found = [point.value for group in ("exp.backends", "exp.plugins") for point in entry_points(group).values()]
    return {value.partition(":")[0].partition(".")[0] for value in found}


def refusal(key: str, name: str, top: str) -> ConfigError:
    """What is said of a name that the user has not chosen.

    Args:
        key: that has it.
        name: as it stands there, or what it leads to.
        top: the package that would have to be named.
    """
    named = ",".join([*_plugins, top])
    return ConfigError(
        f"{key}={name} is neither of exp nor in a registry, and you have not named its package; if you trust it, add "
        f"plugins=[{named}]"
    )
