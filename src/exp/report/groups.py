"""The keys in which runs differ, and groups of runs over seeds.

Runs form a group if their frozen configurations are equal except for the seed and keys that do not affect the
computation (``output_dir``, ``launcher.*``). Groups are ranked by their metric on validation.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any, Hashable, NamedTuple, Sequence

from exp.console import format_metric
from exp.report.formats import count_words, format_value
from exp.report.runs import is_number, natural_key
from exp.runs.files import to_json

if TYPE_CHECKING:
    from exp.report.runs import Run

_GROUPS = ("experiment", "task", "backend", "launcher", "wrapper", "data", "model", "optim", "schedule", "logger")
# Keys that do not affect the computation.
_NOT_COMPUTED = re.compile(
    r"(?:output_dir|overwrite|plots|report_placement|resume|resume_changed_data|run)$"
    r"|reference|(?:launcher|hydra|logger|record|sweep)\."
)


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which the runs differ; first those that overrides name, in the order of the overrides.

    Left out are keys that differ only as a consequence of another one: keys of a config group that differs (for
    ``backend`` all of ``backend.*``), keys that refer to another key (``model.lookback`` to ``data.lookback``), and a
    batch size per device with an equal global batch size. Keys that do not affect the computation, such as
    ``output_dir`` and ``launcher.*``, are left out, too.

    Args:
        runs: any number of runs.

    Returns:
        Dotted keys, and names of config groups (``backend``, ``experiment``, ...). :func:`column` returns their values.
    """
    overrides = [override.lstrip("+~") for run in runs for override in run.overrides]
    overridden_keys = dict.fromkeys(re.split("[=@]", word)[0].replace("/", ".") for word in overrides)
    groups = [group for group in _GROUPS if _differ(column(runs, group))]
    unequal = [key for key in dict.fromkeys(key for run in runs for key in run.config)
               if not _NOT_COMPUTED.match(key) and _differ(column(runs, key))]  # fmt: skip
    values_by_key: dict[str, list[Any]] = {}
    for key in overridden_keys:  # the key itself, or, for a node, the keys below it
        below = [other for other in unequal if other == key or other.startswith(f"{key}.")]
        values_by_key.update((other, column(runs, other)) for other in ([key] if key in groups else below))
    for key in groups + unequal:  # keys that no override names
        values = column(runs, key)
        if key in values_by_key or key == "batch_size" or _follows(values, key, values_by_key):
            continue
        if not any(run.config.get(f"record.follows.{key}") in unequal for run in runs):
            values_by_key[key] = values
    if "batch_size" in values_by_key and "global_batch_size" not in overridden_keys:
        values_by_key.pop("global_batch_size", None)  # one of them is derived from the other
    return list(values_by_key)


def keys_of(groups: Sequence[Group]) -> list[str]:
    """The keys in which the groups differ (:func:`differing`), without seeds if a group has several."""
    averaged = any(len(group.runs) > 1 for group in groups)
    keys = differing([run for group in groups for run in group.runs])
    return [key for key in keys if not (averaged and is_seed(key))]


def column(runs: Sequence[Run], key: str) -> list[Any]:
    """The value of ``key`` in each run; None for a run without this key.

    Args:
        runs: any number of runs.
        key: dotted key, or the name of a config group, whose value is the chosen option.
    """
    name = f"record.chosen.{key}" if key in _GROUPS else key
    return [run.config.get(name) for run in runs]


def is_seed(key: str) -> bool:
    """Whether a key is a seed: ``seed``, or any key that ends with ``.seed``."""
    return key.rpartition(".")[2] == "seed"


def canonical(value: Any) -> str:
    """A config value as text, equal for values with the same meaning: 1 and 1.0, but not 1 and true."""
    return to_json(float(value) if is_number(value) else value, sort_keys=True, default=str)


def sort_key(value: Any) -> tuple[bool, float, list[Any]]:
    """A sort key: numbers first, by size; then other values, in natural order (2 before 10)."""
    return (False, value, []) if is_number(value) else (True, 0.0, natural_key(format_value(value)))


def _follows(values: list[Any], key: str, values_by_key: dict[str, list[Any]]) -> bool:
    """Whether the values of a key follow from another one: from the choice of a config group, or from an equal key."""
    own_values = list(map(canonical, values))
    for cause in {"experiment", key.partition(".")[0]} & set(values_by_key) - {key}:
        choices = list(map(canonical, values_by_key[cause]))
        if len(set(zip(choices, own_values))) == len(set(choices)):  # equal choices always have equal values
            return True
    # What keys of model and data refer to is recorded (record.follows); of others, equal values show it.
    recorded = key.startswith(("model.", "data."))
    return not recorded and any(own_values == list(map(canonical, other)) for other in values_by_key.values())


def _differ(values: Sequence[Any]) -> bool:
    return len(set(map(canonical, values))) > 1


class Mean(NamedTuple):
    """A metric over seeds."""

    value: float
    std: float | None
    """Sample standard deviation, with n - 1 in its denominator; None for a single seed."""


class Group:
    """Runs of one configuration with several seeds, or a single run.

    Args:
        runs: at least one run.
        metric_name: metric that ranks the runs; None: they have no metric.

    Attributes:
        counted: the runs that means include: completed runs which, if the group has a metric, have a value of it.
        left_out: counts of the other runs, by status: ``2 failed, 1 unfinished``; empty: none.
        n: number of seeds with a run that counts.
        n_text: number of seeds as text: ``3``; or ``2 of 3`` if a seed has no run that counts.
        names: the names of the runs, separated by spaces.
        score: mean of the metric on validation, which ranks the groups; see :meth:`mean`.
        reported: mean of the metric on test.
    """

    def __init__(self, runs: Sequence[Run], metric_name: str | None) -> None:
        self.runs, self.metric_name = runs, metric_name
        completed = [run for run in runs if run.status == "completed"]
        self.counted = [run for run in completed if run.metric is not None or metric_name is None]
        others = [run.status for run in runs if run not in self.counted]
        self.left_out = count_words("without a metric" if status == "completed" else status for status in others)
        by_seed: dict[Hashable, list[Run]] = {}
        for run in self.counted:
            by_seed.setdefault(_seeds(run), []).append(run)
        self._by_seed = by_seed
        self.n, seeds = len(by_seed), len(set(map(_seeds, runs)))
        self.n_text = str(seeds) if self.n == seeds else f"{self.n} of {seeds}"
        self.names = " ".join(run.name for run in runs)
        self.score, self.reported = self.mean("selected_by"), self.mean("metric")

    def by_seed(self, title: str) -> dict[Hashable, float]:
        """A number by seed; if a seed was run several times, their mean. Empty: one of the runs has no value."""
        if any(title not in run.numbers for run in self.counted):
            return {}
        return {seed: statistics.mean(run.numbers[title] for run in runs) for seed, runs in self._by_seed.items()}

    def mean(self, title: str) -> Mean | None:
        """The mean of a number over the seeds; if a seed was run several times, the mean of its runs counts once.

        Args:
            title: of the number (:attr:`exp.report.runs.Run.numbers`).

        Returns:
            None if no run counts, or one of them has no value: a mean over fewer seeds than the row states would
            mislead.
        """
        values = list(self.by_seed(title).values())
        if not values:
            return None
        return Mean(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)


def rankings(runs: Sequence[Run], over_seeds: bool) -> dict[str | None, list[Group]]:
    """Group the runs, and rank the groups separately for each metric, because metrics cannot be compared.

    Args:
        runs: any number of runs.
        over_seeds: group runs that differ only in the seed; runs whose seeds are all equal are not grouped, because
            they repeat the same run.

    Returns:
        The groups by metric: first those with a validation metric, the best first; then those without one, such as
        evaluations; last those without any value. A run that ended before it recorded its metric is placed with runs
        of the same experiment and task; if there are none, under the key None, which is last.
    """
    metric_of_kind = {_kind(run): run.metric_name for run in runs if run.metric_name is not None}
    members: dict[str | None, list[Run]] = {}
    for run in runs:
        members.setdefault(run.metric_name or metric_of_kind.get(_kind(run)), []).append(run)
    ranking = {}
    for metric in sorted(members, key=lambda name: name is None):
        sign = -1.0 if greater_is_better(members[metric]) else 1.0
        runs_by_settings: dict[Hashable, list[Run]] = {}
        for run in members[metric]:
            runs_by_settings.setdefault(_settings(run) if over_seeds else run, []).append(run)
        groups = []
        for alike in runs_by_settings.values():
            has_several_seeds = len({_seeds(run) for run in alike}) > 1
            groups += [Group(alike, metric)] if has_several_seeds else [Group([run], metric) for run in alike]
        # The best first, then groups without a validation metric, last groups without any value.
        ranking[metric] = sorted(groups, key=lambda group: (
            not group.reported, not group.score, sign * group.score.value if group.score else 0.0
        ))  # fmt: skip
    return ranking


def ranked(ranking: dict[str | None, list[Group]]) -> list[tuple[int | None, Group]]:
    """The groups of all metrics, each with its rank among those of its metric, from 1; None: it has no score.

    Groups without a value of their metric are last.
    """
    pairs = [(group.score and rank, group) for groups in ranking.values() for rank, group in enumerate(groups, 1)]
    return sorted(pairs, key=lambda pair: pair[1].reported is None)


def greater_is_better(runs: Sequence[Run]) -> bool:
    """Whether larger values of the metric are better; all runs have the same metric."""
    return any(run.result.get("greater_is_better") for run in runs)


def format_mean(mean: Mean | None) -> str:
    """A mean as text: ``0.3541 ± 0.0012``; for a single seed only the value; empty for None."""
    if mean is None:
        return ""
    text = format_metric(mean.value)
    return text if mean.std is None else f"{text} ± {format_metric(mean.std, mean.value)}"


def _kind(run: Run) -> tuple[object, object]:
    return run.config.get("name"), run.config.get("task.name")


def _is_seed_of(run: Run, key: str) -> bool:
    """Whether a key is a seed, or refers to one: ``data.shuffle: ${seed}``."""
    return is_seed(key) or is_seed(str(run.config.get(f"record.follows.{key}", "")))


def _settings(run: Run) -> Hashable:
    """A hashable value, equal for runs that differ only in the seed; unique if the configuration cannot be read."""
    if not run.config:
        return run.folder
    # A missing key counts as null, as in differing().
    return frozenset(
        (key, canonical(value))
        for key, value in run.config.items()
        if value is not None and not _NOT_COMPUTED.match(key) and not _is_seed_of(run, key)
    )


def _seeds(run: Run) -> Hashable:
    """A hashable value, equal for runs with the same seeds."""
    return frozenset((key, canonical(value)) for key, value in run.config.items() if _is_seed_of(run, key))


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """A short name for each key: its last part if that is unique, else the key."""
    last = {
        key: re.sub(r"\._target_$", "", key).rpartition(".")[2] for key in keys
    }  # of a class the section that it is
    counts = Counter(last.values())
    return {key: name if counts[name] == 1 else key for key, name in last.items()}


def settings_of(groups: Sequence[Group]) -> list[str]:
    """A unique label for each group: the keys that differ, as on the command line; if needed also its runs' names."""
    keys = keys_of(groups)
    titles = short_names(keys)
    texts = [
        " ".join(f"{titles[key]}={format_value(column(group.runs, key)[0])[:60]}" for key in keys) for group in groups
    ]
    return [text if text and texts.count(text) == 1 else f"{text} {group.names}".strip()
            for text, group in zip(texts, groups)]  # fmt: skip
