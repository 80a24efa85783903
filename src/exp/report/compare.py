"""Is one configuration better than another, or is the difference noise? Tests over seeds and over test samples."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from exp.console import format_metric
from exp.report.tables import greater_is_better
from exp.runs.files import to_json
from exp.significance import ALPHA, Difference, adjusted_p, compare_means, compare_pairs, compare_samples, pairs_needed

if TYPE_CHECKING:
    from exp.report.runs import Run
    from exp.report.tables import Group

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

    @property
    def is_shown(self) -> bool:
        """Whether the difference is more than the noise of seeds and, if samples are recorded, of test data."""
        tests = [self.seeds, *([] if self.samples is None else [self.samples])]
        return all(test is not None and test.p < ALPHA for test in tests)

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
        return texts[0] if test is None else f"{texts[0]} ({texts[1]} to {texts[2]})"


def compare_groups(groups: Sequence[Group]) -> list[Comparison]:
    """Compare groups by the metric that they report; p-values are corrected for the number of comparisons.

    Args:
        groups: of one metric, the best first (:func:`exp.report.tables.rankings`). Of at most five, all pairs are
            compared; of more, the first with each other one.
    """
    counted = [group for group in groups if group.reported is not None]
    pairs = list(itertools.combinations(counted, 2))
    compared = [_compare(*pair) for pair in (pairs if len(counted) <= _ALL_PAIRS else pairs[: len(counted) - 1])]
    for name in ("seeds", "samples"):
        tests = [(number, getattr(one, name)) for number, one in enumerate(compared) if getattr(one, name) is not None]
        for (number, test), p in zip(tests, adjusted_p([test.p for _, test in tests])):
            compared[number] = compared[number]._replace(**{name: test._replace(p=p)})
    return compared


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
    own, other = (_sample_mean(group.counted, name) for name in (group.metric_name, best))
    within_noise = own is not None and other is not None and compare_samples(own - other).p >= ALPHA
    return f"{best} {format_metric(values[best])}{', within the noise of the test samples' * within_noise}"


def _compare(first: Group, second: Group) -> Comparison:
    assert first.reported is not None
    assert second.reported is not None
    a, b = (group.by_seed("metric") for group in (first, second))
    paired = a.keys() == b.keys()
    seeds = (
        compare_pairs([*a.values()], [b[seed] for seed in a]) if paired else compare_means([*a.values()], [*b.values()])
    )
    arrays: list[Any] = [_sample_mean(group.counted, first.metric_name) for group in (first, second)]
    same_data = len({to_json(run.inputs.get("data_files")) for run in (*first.counted, *second.counted)}) == 1
    samples = None
    if same_data and all(array is not None for array in arrays) and arrays[0].shape == arrays[1].shape:
        samples = compare_samples(arrays[0] - arrays[1])
    return Comparison(first, second, first.reported.value - second.reported.value, seeds, samples, paired)


def _sample_mean(runs: Sequence[Run], name: str | None) -> Any:
    """The mean over runs of a metric of each test sample, (N,); None: one of them has not recorded it."""
    arrays: list[Any] = [run.samples.get(str(name)) for run in runs]
    if not arrays or any(array is None or array.shape != arrays[0].shape for array in arrays):
        return None
    return sum(array.astype("float64") for array in arrays) / len(arrays)


def _word(number: int) -> str:
    return _WORDS[number] if number < len(_WORDS) else str(number)
