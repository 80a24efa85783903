"""What tells runs apart, and runs ranked by their metric on validation: one by one, or as means over seeds.

Runs belong together where their frozen configurations are the same without the seed, and without what says nothing
about the computation (``output_dir``, ``launcher.*``).
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable, Hashable, Iterable, NamedTuple, Sequence

from exp.report.runs import is_number, natural
from exp.runs.folder import number_text

if TYPE_CHECKING:
    from exp.report.runs import Run

__all__ = [
    "Group", "Mean", "as_counts", "by_size", "column", "differing", "greater_is_better", "in_order", "is_seed",
    "mean_text", "meaning", "rankings", "short_names", "value_text",
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
               if not _is_silent(key) and _differ(column(runs, key))]  # fmt: skip
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


def _is_silent(key: str) -> bool:
    """Whether a key says nothing about what was computed, such as ``output_dir``."""
    return key in _SILENT or key.startswith(_SILENT_BELOW)


def meaning(value: Any) -> Hashable:
    """Equal for values of the configuration that mean the same: 1 and 1.0, but not 1 and true."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:  # no nan
        return value
    return type(value), json.dumps(value, sort_keys=True, default=str)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Every key's last part, or as many of its last parts as tell it from the others."""
    names = {}
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        names[key] = next((end for end in endings if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)
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


class Mean(NamedTuple):
    """A metric over seeds."""

    value: float
    std: float | None
    """Sample standard deviation, with n - 1 in its denominator; None for a single seed, of which there is none."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one configuration with several seeds; or a single run.

    Attributes:
        runs: at least one, in the order in which they were given.
        metric_name: the metric that they are ranked by; None: they have none.
    """

    runs: list[Run]
    metric_name: str | None

    @cached_property
    def counted(self) -> list[Run]:
        """Those that means are taken over: completed ones, and with a metric where the group has one."""
        completed = [run for run in self.runs if run.status == "completed"]
        return [run for run in completed if run.metric is not None or run.metric_name is None]

    @property
    def left_out(self) -> str:
        """What became of the others: ``2 failed, 1 unfinished``; empty where there are none."""
        others = [run.status for run in self.runs if run not in self.counted]
        return as_counts("without a metric" if status == "completed" else status for status in others)

    @property
    def n(self) -> int:
        """Seeds of which a run counts."""
        return len({_seeds(run) for run in self.counted})

    @property
    def n_text(self) -> str:
        """``3``; ``2 of 3`` where a seed has no run that counts."""
        seeds = len({_seeds(run) for run in self.runs})
        return str(seeds) if self.n == seeds else f"{self.n} of {seeds}"

    @property
    def names(self) -> str:
        """The names of the runs."""
        return " ".join(run.name for run in self.runs)

    @cached_property
    def score(self) -> Mean | None:
        """Its mean on validation, which the groups are ranked by; None where no run counts, or one has none."""
        return self.mean_of(lambda run: run.selected_by)

    @cached_property
    def reported(self) -> Mean | None:
        """Its mean on test; None where no run counts."""
        return None if self.metric_name is None else self.mean(self.metric_name)

    def mean(self, metric: str) -> Mean | None:
        """The mean of a metric over the seeds; see :meth:`mean_of`."""
        return self.mean_of(lambda run: run.metric if metric == run.metric_name else run.metrics.get(metric))

    def mean_of(self, value_of: Callable[[Run], float | None]) -> Mean | None:
        """The mean over the seeds; a seed that was run twice counts once, with the mean of its runs.

        Returns:
            None where no run counts, or where one of those that do has no value: a mean over other seeds than the row
            says would look the same.
        """
        by_seed: dict[Hashable, list[float]] = {}
        for run in self.counted:
            value = value_of(run)
            if value is None:
                return None
            by_seed.setdefault(_seeds(run), []).append(value)
        values = [statistics.mean(each) for each in by_seed.values()]
        if not values:
            return None
        return Mean(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)


def rankings(runs: Sequence[Run], over_seeds: bool) -> dict[str | None, list[Group]]:
    """All runs, by the metric that ranks them: figures of other metrics cannot be compared.

    Args:
        runs: any number.
        over_seeds: join runs that differ in nothing but the seed. Runs of one and the same seed are not joined: that is
            the same run once more.

    Returns:
        By metric the groups, the best mean on validation first; then those without one, such as evaluations, and last
        those without a metric. A run that did not come to say what its metric is goes with those of its experiment and
        task; None, which is last, has those that go with nobody.
    """
    kinds = {_kind(run): run.metric_name for run in runs if run.metric_name is not None}
    members: dict[str | None, list[Run]] = {}
    for run in runs:
        members.setdefault(run.metric_name or kinds.get(_kind(run)), []).append(run)
    found = {}
    for metric in sorted(members, key=lambda name: name is None):
        sign = -1.0 if greater_is_better(members[metric]) else 1.0
        alike: dict[Hashable, list[Run]] = {}
        for run in members[metric]:
            alike.setdefault(_settings(run) if over_seeds else run, []).append(run)
        groups = []
        for each in alike.values():
            several = len({_seeds(run) for run in each}) > 1
            groups += [Group(each, metric)] if several else [Group([run], metric) for run in each]
        # The best first, then those without a figure on validation, last those without any.
        found[metric] = sorted(groups, key=lambda each: (not each.reported, not each.score,
                                                         sign * each.score.value if each.score else 0.0))  # fmt: skip
    return found


def in_order(ranking: dict[str | None, list[Group]]) -> list[tuple[int | None, Group]]:
    """The groups of all metrics and the place of each among those of its metric, from 1; None: it has no score.

    Those that have no metric are last.
    """
    ranked = [
        (number if group.score else None, group) for each in ranking.values() for number, group in enumerate(each, 1)
    ]
    return sorted(ranked, key=lambda pair: pair[1].reported is None)


def greater_is_better(runs: Sequence[Run]) -> bool:
    """Whether larger values of the metric of these runs, which is the same for all, are better."""
    return any(run.result.get("greater_is_better") for run in runs)


def as_counts(words: Iterable[str]) -> str:
    """How often each word is there, in the order of the first ones: ``2 failed, 1 unfinished``."""
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())


def mean_text(mean: Mean | None) -> str:
    """``0.3541 ± 0.0012`` for a person; of a single seed only the value; empty for None."""
    if mean is None:
        return ""
    text = number_text(mean.value)
    return text if mean.std is None else f"{text} ± {number_text(mean.std, mean.value)}"


def _kind(run: Run) -> tuple[object, object]:
    return run.config.get("name"), run.config.get("task.name")


def _is_seed_of(run: Run, key: str) -> bool:
    """Whether a key is a seed, or was taken from one: ``data.shuffle: ${seed}``."""
    return is_seed(key) or is_seed(str(run.config.get(f"record.follows.{key}", "")))


def _settings(run: Run) -> Hashable:
    """Equal for runs that differ in nothing but the seed. A run whose configuration cannot be read is like no other."""
    if not run.config:
        return run.folder
    # A key that is not there is as good as null, as where keys are compared.
    return frozenset(
        (key, meaning(value))
        for key, value in run.config.items()
        if value is not None and not _is_silent(key) and not _is_seed_of(run, key)
    )


def _seeds(run: Run) -> Hashable:
    """Equal for runs of the same seed."""
    return frozenset((key, meaning(value)) for key, value in run.config.items() if _is_seed_of(run, key))
