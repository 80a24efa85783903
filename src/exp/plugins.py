"""Plugins: packages that add typed keys of the configuration, config groups, models and data to exp.

A package names a :class:`Plugin` in the entry-point group ``exp.plugins``; exp's own experiments do the same. The
command line and its completion import the module that a package names, so it must import neither torch nor models and
data, as this module does not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Mapping, Sequence

from exp.console import warn
from exp.errors import typed_line


@dataclass(frozen=True)
class Family:
    """Models and data that can be combined.

    Attributes:
        model: dataclass of the typed keys that all models of the family share.
        data: dataclass of the typed keys that all data of the family share.
        example: name of an experiment with a model and data of the family.
        small: overrides that make the example small enough for a CPU, without changing the kinds of its computations;
            ``task=qualify`` uses them.
    """

    model: type
    data: type
    example: str
    small: Sequence[str] = ()


@dataclass(frozen=True)
class Plugin:
    """The additions of one package.

    Attributes:
        structures: dataclasses of typed keys, by ``<group>/<name>``. A YAML file includes one with
            ``defaults: [/schema/<group>/<name>@_here_, _self_]``. If ``_target_`` has a default, the dataclass also
            types the keys of all configurations with this ``_target_``. The dataclass of a model without weights, such
            as a naive forecast, sets ``has_weights: ClassVar[bool] = False``; then tasks such as ``task=eval`` do not
            need ``init_from``. That of a model names with ``paths: ClassVar[Sequence[str]]`` those of its keys that are
            paths. That of data names with ``preflight: ClassVar[str]`` a module that checks their files before a run
            (:func:`exp.config.check.preflight_of`), and with ``reference_key: ClassVar[str]`` its key on whose value
            the metrics of a publication depend (:class:`exp.config.schema.ReferenceConfig`).
        families: models and data that can be combined, by their purpose, such as ``"forecasting"``.
        keys: dataclasses of further keys for a structure of another package, by its name, such as ``task/predict``.
            With data of another plugin's families, a value other than the default is refused.
        config: an importable package with config groups (``model/``, ``data/``, ``experiment/``); None: no groups.
        outputs: files and folders that its tasks write to the run folder; ``overwrite=true`` removes earlier ones.
    """

    structures: Mapping[str, type] = field(default_factory=dict)
    families: Mapping[str, Family] = field(default_factory=dict)
    keys: Mapping[str, type] = field(default_factory=dict)
    config: str | None = None
    outputs: Sequence[str] = ()


@functools.lru_cache(maxsize=None)
def entry_points(group: str) -> Mapping[str, Any]:
    """The entry points of a group, by name."""
    points: Any = metadata.entry_points()
    # On Python 3.8 and 3.9 this is a dict by group.
    members = points.select(group=group) if hasattr(points, "select") else points.get(group, ())
    return {point.name: point for point in members}


@functools.lru_cache(maxsize=None)
def installed() -> Mapping[str, Plugin]:
    """All installed plugins, by the names of their entry points; each that cannot be used causes a warning."""
    plugins = {}
    for name, point in sorted(entry_points("exp.plugins").items()):
        try:
            plugin = point.load()
            problem = None if isinstance(plugin, Plugin) else f"is {type(plugin).__name__}, no exp.plugins.Plugin"
        except Exception as error:  # noqa: BLE001 - another package may raise anything at its import
            problem = f"does not load ({typed_line(error)})"
        if problem is None:
            plugins[name] = plugin
        else:
            warn(f"the plugin '{name}' ({point.value}) {problem}, and is left out; repair or remove its package")
    return plugins
