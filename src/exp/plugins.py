"""What packages add to exp: typed keys of the configuration, config groups, and which models and data go together.

A package names a :class:`Plugin` in the entry-point group ``exp.plugins``; exp's own experiments do the same. Imports
neither torch nor what an experiment is made of, and nor may the module that a package names: command line and
completion read it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Mapping, Sequence

from exp.errors import UnavailableError

__all__ = ["Family", "Plugin", "entry_points", "installed"]

GROUP = "exp.plugins"


@dataclass(frozen=True)
class Family:
    """Models and data that go together.

    Attributes:
        model: typed keys that all its models share.
        data: typed keys that all its data share.
        example: an experiment that has both.
        small: overrides that make the example small enough for a CPU, its way of computing left as it is; of
            ``task=qualify``.
    """

    model: type
    data: type
    example: str
    small: Sequence[str] = ()


@dataclass(frozen=True)
class Plugin:
    """What one package adds.

    Attributes:
        structures: dataclasses of typed keys, by ``<group>/<name>``; a YAML file takes one with
            ``defaults: [/schema/<group>/<name>@_here_, _self_]``. One whose ``_target_`` has a default also types the
            keys of configurations that name this class. That of a model without weights, such as a naive forecast, says
            ``has_weights: ClassVar[bool] = False``: task=eval and the like take it without ``init_from``.
        choices: choices that need no file, by ``<group>/<name>``: a dataclass of typed keys, or an object of one with
            the values of this choice.
        families: models and data that go together, by what they are for: ``"forecasting"``.
        keys: dataclasses of further keys for a structure of somebody else's, such as ``task/predict``; a value that is
            not the default is refused with data of another plugin's families.
        config: an importable package with config groups (``model/``, ``data/``, ``experiment/``); None: it has none.
    """

    structures: Mapping[str, type] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    families: Mapping[str, Family] = field(default_factory=dict)
    keys: Mapping[str, type] = field(default_factory=dict)
    config: str | None = None


@functools.lru_cache(maxsize=None)
def entry_points(group: str) -> Mapping[str, Any]:
    """The entry points of a group, by name; the files of all installed packages are read once."""
    points = _all_entry_points()
    # Python 3.8 and 3.9 give a dict by group.
    found = points.select(group=group) if hasattr(points, "select") else points.get(group, ())
    return {point.name: point for point in found}


@functools.lru_cache(maxsize=None)
def _all_entry_points() -> Any:
    return metadata.entry_points()


@functools.lru_cache(maxsize=None)
def installed() -> Mapping[str, Plugin]:
    """All plugins, by the names of their entry points.

    Raises:
        UnavailableError: one does not load, or is none.
    """
    found = {}
    for name, point in sorted(entry_points(GROUP).items()):
        try:
            plugin = point.load()
        except Exception as error:  # another's package may raise anything while it loads
            raise UnavailableError(
                f"the plugin '{name}' ({point.value}) does not load ({type(error).__name__}: {error}); mend or remove "
                "its package"
            ) from error
        if not isinstance(plugin, Plugin):
            raise UnavailableError(f"the plugin '{name}' ({point.value}) is no exp.plugins.Plugin; mend its package")
        found[name] = plugin
    return found
