"""Is one configuration better than another, or is the difference noise? Tests over seeds and over test samples."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from exp.console import format_metric
from exp.report.groups import greater_is_better
from exp.report.runs import column_title
from exp.runs.files import to_json
from exp.significance import ALPHA, Difference, adjusted_p, compare_means, compare_pairs, compare_samples, pairs_needed

if TYPE_CHECKING:
    from exp.report.groups import Group
    from exp.report.runs import Run

_ALL_PAIRS = 5  # of more groups only the best is compared with each other one
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Comparison(NamedTuple):
    """Two groups of runs, by the metric that they report.

    Attributes:
        first: the group that is better on validation, or the first one.
        second: the other one.
        value: mean of the first minus that of the second.
        seeds: the test over seeds, paired if both groups have the same ones; None: a group has a single seed.
        samples: the test over test samples; None: the runs have recorded none, or were tested on other data.
        paired: whether both groups have the same seeds.
    """

    first: Group
    second: Group
    value: float
    seeds: Difference | None
    samples: Difference | None
    paired: bool

    def verdict(self) -> str:
        """The outcome of both tests in words."""
        parts = []
        if self.seeds is None:
            parts.append("whether other seeds show a difference, one seed cannot tell (seed=1,2,3)")
        elif self.seeds.p < ALPHA:
            parts.append(f"more than the noise of {_word(self.seeds.n)} seeds (p {self.seeds.p:.1g})")
        else:
            needed = pairs_needed(*self.seeds[:3], self.seeds.n) if self.paired else None
            more = "" if needed is None else f"; about {_word(max(needed - self.seeds.n, 1))} more would"
            parts.append(f"no difference that {_word(self.seeds.n)} seeds show{more}")
        if self.samples is not None:
            noise = "more than the noise" if self.samples.p < ALPHA else "within the noise"
            parts.append(f"{noise} of {self.samples.n} test samples (p {self.samples.p:.1g})")
        return "; ".join(parts)

    def interval(self) -> str:
        """The difference with its 95% interval over seeds, or over samples if there is a single seed."""
        test, scale = self.seeds or self.samples, self.first.reported
        texts = [format_metric(number, scale.value if scale else None).replace("+-", "-")
                 for number in ((self.value,) if test is None else (self.value, test.low, test.high))]  # fmt: skip
        return texts[0] if test is None else f"{texts[0]} (95% interval {texts[1]} to {texts[2]})"


def compare_groups(groups: Sequence[Group], metric: str | None = None, best_only: bool = False) -> list[Comparison]:
    """Compare groups by a metric; p-values are corrected for the number of comparisons.

    Args:
        groups: the best first (:func:`exp.report.groups.rankings`). Of at most five, all pairs are compared; of more,
            the first with each other one.
        metric: its name; None: the one that the groups report.
        best_only: compare only the first with each other one.
    """
    title = "metric" if metric is None else column_title("metrics", metric)
    counted = [group for group in groups if group.mean(title) is not None]
    pairs = list(itertools.combinations(counted, 2))
    first_only = best_only or len(counted) > _ALL_PAIRS
    compared = [_compare(*pair, title, metric) for pair in (pairs[: len(counted) - 1] if first_only else pairs)]
    for name in ("seeds", "samples"):
        tests = [(number, getattr(one, name)) for number, one in enumerate(compared) if getattr(one, name) is not None]
        for (number, test), p in zip(tests, adjusted_p([test.p for _, test in tests])):
            compared[number] = compared[number]._replace(**{name: test._replace(p=p)})
    return compared


def best_by(groups: Sequence[Group], metric: str) -> list[Group]:
    """The group with the best mean of a metric, and those that differ from it by no more than the noise of seeds."""
    sign = -1.0 if greater_is_better([run for group in groups for run in group.runs]) else 1.0
    means = {group: group.mean(column_title("metrics", metric)) for group in groups}
    order = sorted((group for group in groups if means[group]), key=lambda group: sign * means[group].value)  # type: ignore[union-attr]
    equal = [one.second for one in compare_groups(order, metric, best_only=True) if one.seeds and one.seeds.p >= ALPHA]
    return [*order[:1], *equal]


def lost_to(group: Group) -> str | None:
    """The best baseline if it is better than the group, and whether that is more than noise; None: the group is better.

    The test is over test samples, since a baseline has no seed.
    """
    recorded = group.runs[0].result.get("baselines") or {}
    means = {name: group.mean(name) for name, metric in recorded.items() if metric == group.metric_name}
    values = {name: mean.value for name, mean in means.items() if mean is not None}
    sign = -1.0 if greater_is_better(group.runs) else 1.0
    best = min(values, key=lambda name: sign * values[name], default=None)
    if best is None or group.reported is None or sign * group.reported.value <= sign * values[best] * (1 + 1e-6):
        return None
    first_mean, other = (_sample_mean(group.counted, name) for name in (group.metric_name, best))
    within_noise = first_mean is not None and other is not None and compare_samples(first_mean - other).p >= ALPHA
    return f"{best} {format_metric(values[best])}{' (within the noise of the test samples)' * within_noise}"


def _compare(first: Group, second: Group, title: str, metric: str | None) -> Comparison:
    a, b = (group.by_seed(title) for group in (first, second))
    paired = a.keys() == b.keys()
    values = [*a.values()], [b[seed] for seed in (a if paired else b)]
    runs = [*first.counted, *second.counted]
    samples = None
    if len({to_json(run.inputs.get("data_files")) for run in runs}) == 1:
        first_mean, other = (_sample_mean(group.counted, metric or group.metric_name) for group in (first, second))
        if first_mean is not None and other is not None and first_mean.shape == other.shape:
            samples = compare_samples(first_mean - other)
    difference = statistics.mean(values[0]) - statistics.mean(values[1])
    return Comparison(first, second, difference, (compare_pairs if paired else compare_means)(*values), samples, paired)


def _sample_mean(runs: Sequence[Run], name: str | None) -> Any:
    """The mean over runs of a metric of each test sample, (N,); None: one of them has not recorded it."""
    arrays: list[Any] = [run.samples.get(str(name)) for run in runs]
    if not arrays or any(array is None or array.shape != arrays[0].shape for array in arrays):
        return None
    return sum(array.astype("float64") for array in arrays) / len(arrays)


def _word(number: int) -> str:
    return _WORDS[number] if number < len(_WORDS) else str(number)
