"""What tells runs apart: the keys of their configurations that differ, less those that differ as a consequence."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Collection, Hashable, Sequence

if TYPE_CHECKING:
    from exp.report.run import Run

__all__ = [
    "apart", "column", "differing", "is_seed", "is_silent", "meaning", "short_names", "unlike", "value_text",
]  # fmt: skip

# Config groups, and the key that names the choice where no override does. None: nothing does.
_GROUPS: dict[str, str | None] = {
    "experiment": "name",
    "task": "task.name",
    "backend": "backend.name",
    "launcher": None,
    "wrapper": "wrapper.kind",
    "data": "data.name",
    "model": None,
    "optim": "optim.type",
    "schedule": None,
    "logger": None,
}
# Say nothing about what was computed.
_SILENT = ("output_dir", "overwrite", "plots", "report_placement", "resume", "resume_changed_data", "run")
_SILENT_BELOW = ("launcher.", "published", "hydra.", "logger.", "record.", "sweep.")
_OVERRIDE = re.compile(r"^(?:\+\+|\+|~)?([^=@]+)(?:@[^=]*)?(?:=(.*))?$", re.DOTALL)


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys that tell the runs apart: those that their overrides name first, in that order.

    Left out is what differs only as a consequence: what a swept config group brings along (``backend``, not all of
    ``backend.*``), what refers to another key (``model.lookback`` to ``data.lookback``), a batch size per device
    beside an equal global one; and what says nothing about the computation, such as ``output_dir`` and ``launcher.*``.

    Args:
        runs: any number.

    Returns:
        Dotted keys, and names of config groups (``backend``, ``experiment``, ...). :func:`column` has their values.
    """
    overridden = [_overridden(run) for run in runs]
    named = list(dict.fromkeys(key for overrides in overridden for key in overrides))
    unequal = unlike(runs)
    candidates = [key for key in unequal if not is_silent(key)]
    groups = {}
    for group in _GROUPS:
        everywhere = all(group in overrides for overrides in overridden)
        if everywhere or group == "experiment" or any(key.startswith(f"{group}.") for key in unequal):
            labels = column(runs, group)
            if _differ(labels):
                groups[group] = labels
    kept: dict[str, list[Any]] = {}
    for key in named:
        if key in groups:
            kept[key] = groups.pop(key)
        else:  # the key itself, or those below it
            for below in [one for one in candidates if one == key or one.startswith(f"{key}.")]:
                kept[below] = column(runs, below)
    # An experiment in a file of the user's own, a backend that auto chose: no override names them.
    for group, labels in groups.items():
        if not _follows(labels, kept, [*_above(group), _GROUPS[group] or group]):
            kept[group] = labels
    for key in candidates:
        values = column(runs, key)
        known = key in kept or key in _GROUPS.values() or key == "batch_size"
        if not known and not _follows(values, kept, _above(key)) and not _repeats(values, list(kept.values())):
            kept[key] = values
    if "batch_size" in kept and "global_batch_size" not in named:
        kept.pop("global_batch_size", None)  # one of them is derived from the other
    return list(kept)


def column(runs: Sequence[Run], key: str) -> list[Any]:
    """The value of ``key`` in each run; None where a run has no such key.

    Args:
        runs: any number.
        key: dotted, or the name of a config group: then the choice that the overrides made, or, where one of the runs
            has no such override, the name that the configuration itself has for it, or the choice that it records.
    """
    if key not in _GROUPS:
        return [run.config.get(key) for run in runs]
    chosen = [_overridden(run).get(key) for run in runs]
    identity = _GROUPS[key]
    if key != "backend" and all(choice is not None for choice in chosen):
        return chosen
    if identity is not None:
        return [run.config.get(identity) for run in runs]  # for the backend always: auto says less than what it became
    recorded = [run.config.get(f"record.chosen.{key}") for run in runs]
    return [record or choice or "(default)" for record, choice in zip(recorded, chosen)]


def unlike(runs: Sequence[Run]) -> list[str]:
    """All dotted keys that have not the same value in every run, consequences included, in their order."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [key for key in keys if _differ([run.config.get(key) for run in runs])]


def is_seed(key: str) -> bool:
    """Whether a key repeats a run instead of changing it: ``seed``, and any other whose last part is that."""
    return key.rpartition(".")[2] == "seed"


def is_silent(key: str) -> bool:
    """Whether a key says nothing about what was computed, such as ``output_dir``."""
    return key in _SILENT or key.startswith(_SILENT_BELOW)


def meaning(value: Any) -> Hashable:
    """Equal for values of the configuration that mean the same: 1 and 1.0, but not 1 and true."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:  # no nan
        return value
    return type(value), json.dumps(value, sort_keys=True, default=str)


def apart(names: Sequence[str], taken: Collection[str], prefix: str) -> dict[str, str]:
    """A title for each name that nothing else has: the name, or, where that is taken, the name behind a prefix.

    Args:
        names: of metrics, or of keys; none twice.
        taken: titles that mean something else.
        prefix: ``metrics.`` or ``config.``, as the name stands in ``result.json`` or ``config.yaml``.
    """
    found = {}
    others = {*taken, *names}
    for name in names:
        title = name
        while title in taken or (title != name and title in others):
            title = f"{prefix}{title}"
        found[name] = title
    return found


def short_names(keys: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """Every key's last part, or as many of its last parts as tell it from the others, and from what is ``taken``."""
    names = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if name not in taken and sum(other == name or other.endswith(f".{name}") for other in keys) == 1:
                break
        names[key] = f"config.{name}" if name in taken else name
    return names


def value_text(value: Any) -> str:
    """A value of the configuration as a person would write it on the command line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, bool):
        return str(json.dumps(value))
    if isinstance(value, (list, dict)):
        return json.dumps(value, default=str)
    return str(value)


def _overridden(run: Run) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for override in run.overrides:
        match = _OVERRIDE.match(override)
        if match:
            found[match[1].replace("/", ".")] = match[2]
    return found


def _above(key: str) -> list[str]:
    """The groups whose choice may have brought this key along."""
    group = key.partition(".")[0]
    return ["experiment"] if key == group else ["experiment", group]


def _follows(values: list[Any], kept: dict[str, list[Any]], causes: Sequence[str]) -> bool:
    """Whether one of the causes that are kept determines the values: equal causes, equal values."""
    for cause in causes:
        if cause in kept:
            pairs = {(meaning(one), meaning(value)) for one, value in zip(kept[cause], values)}
            if len(pairs) == len({one for one, _ in pairs}):
                return True
    return False


def _repeats(values: list[Any], columns: Sequence[list[Any]]) -> bool:
    """Whether all that differs in the values is the same as in other columns, as where the configuration refers."""
    known = {tuple(map(meaning, each)) for each in columns}
    parts = [_parts(value) for value in values]
    for place in dict.fromkeys(place for each in parts for place in each):
        found = tuple(meaning(each.get(place)) for each in parts)
        if len(set(found)) > 1 and found not in known:
            return False
    return True


def _parts(value: Any, place: str = "") -> dict[str, Any]:
    """What a list or a mapping is made of, by place; any other value is its own only part."""
    if isinstance(value, (list, dict)) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: part for name, one in pairs for key, part in _parts(one, f"{place}/{name}").items()}
    return {place: value}


def _differ(values: Sequence[Any]) -> bool:
    first = meaning(values[0]) if values else None
    return any(meaning(value) != first for value in values)
