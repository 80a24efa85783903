"""Tables of runs: the keys in which runs differ, groups of runs over seeds, and the rows that programs and people get.

Runs form a group if their frozen configurations are equal except for the seed and keys that do not affect the
computation (``output_dir``, ``launcher.*``). Groups are ranked by their metric on validation.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any, Hashable, NamedTuple, Sequence

from exp.console import format_metric
from exp.report.formats import Table, count_words, format_value
from exp.report.runs import COLUMNS, NUMBERS, column_title, is_number, natural_key
from exp.runs.files import csv_content, to_json, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from exp.report.runs import Run

_JSON_ONLY = ("folder", "folders", "metric_name", "metric", "metric_mean", "metric_std")
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
    counts = Counter(key.rpartition(".")[2] for key in keys)
    return {key: key.rpartition(".")[2] if counts[key.rpartition(".")[2]] == 1 else key for key in keys}


def write_rows(runs: Sequence[Run], folder: Path) -> None:
    """Write ``sweep.csv`` and ``sweep.json`` with one row per run, the best first, and ``sweep_seeds.csv``.

    Columns: ``rank`` (among the runs of the same metric), ``run``, all keys that differ, ``status``, ``selected_by``
    (the metric on validation, which ranks the runs), all metrics by name, ``steps``, ``wall_s``,
    ``samples_per_second``, ``error`` (its first line). Missing values are empty in CSV and null in JSON. CSV has six
    digits; JSON has all digits, and also the columns ``folder``, ``metric_name`` and ``metric``.

    If a metric has the same name as another column, its column is ``metrics.<name>`` (``metrics.error``), the path in
    ``result.json``; a configuration key becomes ``config.<key>`` (``config.metric``).

    ``sweep_seeds.csv`` has one row per configuration (:func:`seed_rows`). It is a separate file, because programs would
    count the means as further runs.

    Args:
        runs: at least one run.
        folder: output folder.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = run_rows(runs)
    content = to_json(rows, indent=2, default=str)  # YAML values may be dates, which JSON does not have
    write_atomically(folder / "sweep.json", f"{content}\n".encode())
    write_atomically(folder / "sweep.csv", _csv(rows))
    write_atomically(folder / "sweep_seeds.csv", _csv(seed_rows(runs)))


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The rows of ``sweep.json``, one dict per run, the best first (:func:`write_rows`)."""
    metrics, keys = _metric_titles(runs), differing(runs)
    return [
        {
            "rank": rank,
            "run": run.name,
            "folder": str(run.folder),
            **{column_title("config", key): column([run], key)[0] for key in keys},
            "status": run.status,
            "selected_by": run.numbers.get("selected_by"),
            "metric_name": run.metric_name,
            **{title: run.numbers.get(title) for title in ("metric", *metrics, *NUMBERS)},
            "error": run.error,
        }
        for rank, group in ranked(rankings(runs, over_seeds=False))
        for run in group.runs
    ]


def seed_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One dict per configuration, over its seeds; the best mean first.

    Keys: ``rank`` (by the mean, among groups of the same metric), ``runs`` (names), ``folders``, all keys that differ
    except the seed, ``n`` (number of seeds that count), ``left_out`` (counts of other runs by status), ``metric_name``,
    ``selected_by_mean`` and ``selected_by_std`` (on validation, which ranks), ``metric_mean`` and ``metric_std`` (on
    test), the same two for each metric by the names of :func:`run_rows`, and for ``wall_s``. ``_std`` is the sample
    standard deviation (n - 1); None for a single seed.
    """
    metrics, keys = _metric_titles(runs), [key for key in differing(runs) if not is_seed(key)]
    rows = []
    for rank, group in ranked(rankings(runs, over_seeds=True)):
        row: dict[str, Any] = {"rank": rank, "runs": group.names, "folders": [str(run.folder) for run in group.runs]}
        row.update((column_title("config", key), column(group.runs, key)[0]) for key in keys)
        row.update(n=group.n, left_out=group.left_out, metric_name=group.metric_name)
        for title in ("selected_by", "metric", *metrics, "wall_s"):
            row[f"{title}_mean"], row[f"{title}_std"] = group.mean(title) or (None, None)
        rows.append(row)
    return rows


def _csv(rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows as CSV, with a header, without the columns that only the JSON file has."""
    names = [name for name in rows[0] if name not in _JSON_ONLY]
    return csv_content(
        [names, *(["" if row[name] is None else format_value(row[name]) for name in names] for row in rows)]
    )


def _metric_titles(runs: Sequence[Run]) -> list[str]:
    """The column titles of all metrics; metrics that rank runs come first."""
    ranking = [column_title("metrics", name) for name in rankings(runs, over_seeds=False) if name is not None]
    return list(dict.fromkeys([*ranking, *(title for run in runs for title in run.numbers if title not in COLUMNS)]))


def run_table(runs: Sequence[Run]) -> Table:
    """The rows of ``sweep.csv`` as a table for the page, without empty columns.

    Args:
        runs: at least one run, all with the same metric.
    """
    rows = run_rows(runs)
    styles = {"completed": "", "failed": "failed"}
    row_styles = ["best" if row["rank"] == 1 and len(rows) > 1 else styles.get(row["status"], "other") for row in rows]
    shown_rows = [{title: value for title, value in row.items() if title not in _JSON_ONLY} for row in rows]
    return Table.of(shown_rows, row_styles, _unit_notes(runs, _metric_titles(runs)))


def results_tables(runs: Sequence[Run], paper: bool = False) -> list[Table]:
    """One table per metric, with one row per configuration: mean over seeds, and reference values if there are any.

    The best configuration is first and has a star. Rows show the metric on validation, and the status of runs that do
    not count.

    Args:
        runs: any number of runs.
        paper: tables for a paper: always with the choice of data, and sorted by the keys; without star, validation
            metric and duration, and without runs that have no metric.
    """
    ranking = rankings(runs, over_seeds=True)
    return [_results(groups, metric, paper) for metric, groups in ranking.items() if metric is not None or not paper]


def _results(groups: list[Group], metric: str | None, paper: bool) -> Table:
    runs = [run for group in groups for run in group.runs]
    averaged = any(len(group.runs) > 1 for group in groups)
    keys = list(dict.fromkeys(["data"] * paper + keys_of(groups)))
    titles = short_names(keys)
    values = {group: [column(group.runs, key)[0] for key in keys] for group in groups}
    best = groups[0] if len(groups) > 1 and groups[0].score and not paper else None
    if paper:
        groups = sorted(groups, key=lambda group: list(map(sort_key, values[group])))
    # Show names if the keys are not unique.
    has_names = not paper or len(set(map(format_value, values.values()))) < len(groups)
    reference_of = {group: (group.counted or group.runs)[0].result.get("reference") or {} for group in groups}
    comparable = {group: {} if result.get("differs") else result for group, result in reference_of.items()}
    referenced = [
        name for name in _metric_titles(runs) if any(is_number(result.get(name)) for result in comparable.values())
    ]
    metrics = list(dict.fromkeys([*([] if metric is None else [column_title("metrics", metric)]), *referenced]))
    rows = []
    for group in groups:
        row: dict[str, Any] = {"": "*" if group is best else "", "runs" if averaged else "run": group.names * has_names}
        for key, value in zip(keys, values[group]):
            row[titles[key] if titles[key] not in metrics else key] = format_value(value)
        row["validation"] = "" if paper else format_mean(group.score)
        for name in metrics:
            mean, reference = group.mean(name), comparable[group].get(name)
            row[name] = f"{format_mean(mean) or '-'}{f' ({group.n_text})' * averaged}"
            if name in referenced:
                row[f"{name}, reference"] = reference
                difference = ""
                if mean is not None and reference is not None:
                    difference = f"+{format_metric(mean.value - reference, mean.value)}".replace("+-", "-")
                row[f"{name}, difference"] = difference
        rows.append({**row, "seconds": "" if paper else _outcome(group)})
    notes = _unit_notes(runs, metrics)
    notes += [f"{metric}: {'larger' if greater_is_better(runs) else 'smaller'} is better"] * (metric is not None)
    notes += ["starred: the best on validation"] if best else []
    notes += ["mean ± sample standard deviation (n - 1) over n seeds"] if averaged else []
    excluded = count_words(run.status for group in groups for run in group.runs if run not in group.counted)
    notes += [f"left out of the figures: {excluded}"] if excluded and paper else []
    notes += dict.fromkeys(f"reference: {result['source']}" for result in comparable.values() if result.get("source"))
    notes += ["difference: measured here - reference"] if referenced else []
    differing_settings = [result["differs"] for result in reference_of.values() if paper and result.get("differs")]
    texts = dict.fromkeys(", ".join(map(str, settings)) for settings in differing_settings)
    notes += [f"reference metrics are of another experiment, and not shown, where {text}" for text in texts]
    styles = [] if paper else ["best" if group is best else "other" * bool(group.left_out) for group in groups]
    return Table.of(rows, styles, [" ".join(note.split()) for note in notes])


def _outcome(group: Group) -> str:
    """Mean duration in seconds; or, if runs do not count or have errors, their status and the first error."""
    errors = [run.error for run in group.runs if run.error is not None]
    if group.left_out or errors:
        return ": ".join(filter(None, [group.left_out, *errors[:1]]))
    seconds = group.mean("wall_s")
    return "" if seconds is None else f"{seconds.value:,.0f}"


def _unit_notes(runs: Sequence[Run], metrics: Sequence[str]) -> list[str]:
    """Notes on the units of metrics, for metrics whose unit is recorded and the same in all runs."""
    units: dict[str, list[str]] = {}
    for name in metrics:
        units_of_metric = {str((run.result.get("metric_units") or {}).get(name, "")) for run in runs} - {""}
        if len(units_of_metric) == 1:
            units.setdefault(units_of_metric.pop(), []).append(name)
    return [f"{', '.join(names)}: of {unit} values" for unit, names in units.items()]
