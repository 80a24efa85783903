"""Runs that differ in nothing but the seed: one group, with the mean and the standard deviation of each metric.

Everything that shows means over seeds gets them here. Runs belong together where their frozen configurations are the
same without the seed, and without what says nothing about what was computed (``output_dir``, ``launcher.*``).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable, Hashable, NamedTuple, Sequence

from exp.report.keys import is_seed, is_silent, meaning
from exp.report.runs import by_metric, greater_is_better
from exp.result import number_text

if TYPE_CHECKING:
    from exp.report.run import Run

__all__ = ["Mean", "SeedGroup", "groups_by_metric", "is_averaged", "mean_text", "with_decimals_of"]

_FOLLOWS = "record.follows."  # below it, the keys that were taken from another key, and from which


class Mean(NamedTuple):
    """A metric over seeds."""

    value: float
    std: float | None
    """Sample standard deviation, with n - 1 in its denominator; None for a single seed, of which there is none."""
    n: int
    """Seeds, not runs."""


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """Runs of one configuration with several seeds; or a single run.

    Attributes:
        runs: at least one, in the order in which they were given.
    """

    runs: list[Run]

    @cached_property
    def counted(self) -> list[Run]:
        """Those that means are taken over: completed ones, and with a metric where the group has one."""
        completed = [run for run in self.runs if run.status == "completed"]
        return [run for run in completed if run.metric is not None or run.metric_name is None]

    @property
    def left_out(self) -> str:
        """What became of the others: ``2 failed, 1 unfinished``; empty where there are none."""
        others = [run for run in self.runs if run not in self.counted]
        kinds = ["without a metric" if run.status == "completed" else run.status for run in others]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

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

    @property
    def metric_name(self) -> str | None:
        """The metric that the runs are ranked by."""
        return next((run.metric_name for run in self.runs if run.metric_name is not None), None)

    @cached_property
    def score(self) -> Mean | None:
        """Its mean on validation, which the groups are ranked by; None where no run counts, or one has none."""
        return self._mean(lambda run: run.selected_by)

    @cached_property
    def reported(self) -> Mean | None:
        """Its mean on test; None where no run counts."""
        return None if self.metric_name is None else self.mean(self.metric_name)

    def mean(self, metric: str) -> Mean | None:
        """The mean of a metric over the seeds; a seed that was run twice counts once, with the mean of its runs.

        Returns:
            None where no run counts, or where one of those that do lacks this metric: a mean over other seeds than
            the row says would look the same.
        """
        return self._mean(lambda run: run.metric if metric == run.metric_name else run.metrics.get(metric))

    def _mean(self, value_of: Callable[[Run], float | None]) -> Mean | None:
        by_seed: dict[Hashable, list[float]] = {}
        for run in self.counted:
            value = value_of(run)
            if value is None:
                return None
            by_seed.setdefault(_seeds(run), []).append(value)
        if not by_seed:
            return None
        values = [statistics.mean(each) for each in by_seed.values()]
        std = statistics.stdev(values) if len(values) > 1 else None
        return Mean(statistics.mean(values), std, len(values))

    def mean_number(self, key: str) -> float | None:
        """The mean over the runs that count of a number of the result, such as ``wall_s``; None: none has it."""
        values = [value for value in (run.number(key) for run in self.counted) if value is not None]
        return statistics.mean(values) if values else None


def groups_by_metric(runs: Sequence[Run]) -> dict[str | None, list[SeedGroup]]:
    """All runs in groups over seeds, by the metric that ranks them, each with the best mean first.

    Runs of one seed only are not grouped: the same configuration with the same seed is the same run once more.

    Args:
        runs: any number.

    Returns:
        As :func:`exp.report.runs.by_metric`, by means on validation; groups of which no run counts are last.
    """
    found = {}
    place = {run: number for number, run in enumerate(runs)}
    for metric, members in by_metric(runs).items():
        groups = _groups(sorted(members, key=lambda run: place[run]))
        sign = -1.0 if greater_is_better(members) else 1.0
        scores = {group: group.score for group in groups}
        known = [(sign * score.value, number, group) for number, (group, score) in enumerate(scores.items()) if score]
        best_first = [group for _, _, group in sorted(known, key=lambda each: each[:2])]
        others = [group for group, score in scores.items() if score is None]
        found[metric] = best_first + sorted(others, key=lambda group: group.reported is None)
    return found


def is_averaged(groups: Sequence[SeedGroup]) -> bool:
    """Whether there are means over seeds at all."""
    return any(len(group.runs) > 1 for group in groups)


def mean_text(mean: Mean | None) -> str:
    """``0.3541 ± 0.0012`` for a person; of a single seed only the value; a dash for None."""
    if mean is None:
        return "-"
    text = number_text(mean.value)
    return text if mean.std is None else f"{text} ± {with_decimals_of(mean.value, mean.std)}"


def with_decimals_of(value: float, number: float) -> str:
    """A number with the decimals that :func:`exp.result.number_text` gives to the value that it stands beside."""
    fixed = 1e-3 <= abs(value) < 1e5 or value == 0
    return f"{number:.4f}" if fixed else f"{number:.4g}"


def _groups(runs: Sequence[Run]) -> list[SeedGroup]:
    alike: dict[Hashable, list[Run]] = {}
    for run in runs:
        alike.setdefault(_settings(run), []).append(run)
    groups = []
    for members in alike.values():
        several = len({_seeds(run) for run in members}) > 1
        groups += [SeedGroup(members)] if several else [SeedGroup([run]) for run in members]
    return groups


def _is_seed_of(run: Run, key: str) -> bool:
    """Whether a key is a seed, or was taken from one: ``data.shuffle: ${seed}``."""
    return is_seed(key) or is_seed(str(run.config.get(f"{_FOLLOWS}{key}", "")))


def _settings(run: Run) -> Hashable:
    """Equal for runs that differ in nothing but the seed. A run whose configuration cannot be read is like no other."""
    if not run.config:
        return run.folder
    # A key that is not there is as good as null, as where keys are compared.
    return frozenset(
        (key, meaning(_without_seeds(value)))
        for key, value in run.config.items()
        if value is not None and not is_silent(key) and not _is_seed_of(run, key)
    )


def _without_seeds(value: Any) -> Any:
    """Lists of mappings, such as hooks, may hold seeds too."""
    if isinstance(value, dict):
        return {key: _without_seeds(one) for key, one in value.items() if key != "seed"}
    return [_without_seeds(one) for one in value] if isinstance(value, list) else value


def _seeds(run: Run) -> Hashable:
    """Equal for runs of the same seed."""
    return frozenset((key, meaning(value)) for key, value in run.config.items() if _is_seed_of(run, key))
