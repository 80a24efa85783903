"""Runs ranked by their metric on validation: one by one, or as means over those that differ in nothing but the seed.

Runs belong together where their frozen configurations are the same without the seed, and without what says nothing
about the computation (``output_dir``, ``launcher.*``).
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Callable, Hashable, Iterable, NamedTuple, Sequence

from exp.report.keys import is_seed, is_silent, meaning
from exp.runs.record import number_text

if TYPE_CHECKING:
    from exp.report.runs import Run

__all__ = [
    "Group", "Mean", "as_counts", "greater_is_better", "in_order", "mean_text", "rankings", "with_decimals_of",
]  # fmt: skip


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

    @property
    def metric_name(self) -> str | None:
        """The metric that the runs are ranked by."""
        return next((run.metric_name for run in self.runs if run.metric_name is not None), None)

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
            groups += [Group(each)] if several else [Group([run]) for run in each]
        found[metric] = sorted(groups, key=lambda group: _order(group, sign))
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
    return text if mean.std is None else f"{text} ± {with_decimals_of(mean.value, mean.std)}"


def with_decimals_of(value: float, number: float) -> str:
    """A number with the decimals that :func:`exp.runs.record.number_text` gives to the value that it stands beside."""
    fixed = 1e-3 <= abs(value) < 1e5 or value == 0
    return f"{number:.4f}" if fixed else f"{number:.4g}"


def _order(group: Group, sign: float) -> tuple[int, float]:
    if group.score is not None and group.reported is not None:
        return 0, sign * group.score.value
    return (1 if group.reported is not None else 2), 0.0


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
        if value is not None and not is_silent(key) and not _is_seed_of(run, key)
    )


def _seeds(run: Run) -> Hashable:
    """Equal for runs of the same seed."""
    return frozenset((key, meaning(value)) for key, value in run.config.items() if _is_seed_of(run, key))
