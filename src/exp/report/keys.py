"""What tells runs apart: the keys of their configurations that differ, less those that differ as a consequence."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Collection, Hashable, Sequence

from exp.report.runs import is_number, natural

if TYPE_CHECKING:
    from exp.report.runs import Run

__all__ = [
    "apart", "by_size", "column", "differing", "is_seed", "is_silent", "meaning", "short_names", "value_text",
]  # fmt: skip

_GROUPS = ("experiment", "task", "backend", "launcher", "wrapper", "data", "model", "optim", "schedule", "logger")
# Say nothing about what was computed.
_SILENT = ("output_dir", "overwrite", "plots", "report_placement", "resume", "resume_changed_data", "run")
_SILENT_BELOW = ("launcher.", "published", "hydra.", "logger.", "record.", "sweep.")


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
    words = [override.lstrip("+~") for run in runs for override in run.overrides]
    named = dict.fromkeys(re.split("[=@]", word)[0].replace("/", ".") for word in words)
    groups = [group for group in _GROUPS if _differ(column(runs, group))]
    unequal = [key for key in dict.fromkeys(key for run in runs for key in run.config)
               if not is_silent(key) and _differ(column(runs, key))]  # fmt: skip
    kept: dict[str, list[Any]] = {}
    for key in named:  # the key itself, or those below it
        below = [key] if key in groups else [one for one in unequal if one == key or one.startswith(f"{key}.")]
        kept.update((one, column(runs, one)) for one in below)
    for key in groups + unequal:  # no override names them
        values = column(runs, key)
        if key not in kept and key != "batch_size" and not _follows(values, key, kept):
            kept[key] = values
    if "batch_size" in kept and "global_batch_size" not in named:
        kept.pop("global_batch_size", None)  # one of them is derived from the other
    return list(kept)


def column(runs: Sequence[Run], key: str) -> list[Any]:
    """The value of ``key`` in each run; None where a run has no such key.

    Args:
        runs: any number.
        key: dotted, or the name of a config group: then the choice that the configuration records.
    """
    name = f"record.chosen.{key}" if key in _GROUPS else key
    return [run.config.get(name) for run in runs]


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
    return {name: f"{prefix}{name}" if name in taken else name for name in names}


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
    if value is None or isinstance(value, (bool, list, tuple, dict)):
        return json.dumps(value, default=str)
    return str(value)


def by_size(value: Any) -> tuple[bool, float, list[Any]]:
    """A sort key: numbers by their size, then anything else as people sort it."""
    return (False, value, []) if is_number(value) else (True, 0.0, natural(value_text(value)))


def _follows(values: list[Any], key: str, kept: dict[str, list[Any]]) -> bool:
    """Whether the values of a key are a consequence: of the choice of a group, or of a key that it refers to."""
    known = list(map(meaning, values))
    for cause in {"experiment", key.partition(".")[0]} & set(kept) - {key}:
        choices = list(map(meaning, kept[cause]))
        if len(set(zip(choices, known))) == len(set(choices)):  # equal choices, equal values
            return True
    return any(known == list(map(meaning, each)) for each in kept.values())


def _differ(values: Sequence[Any]) -> bool:
    return len(set(map(meaning, values))) > 1
