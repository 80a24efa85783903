"""Tables of runs: the rows that programs and people get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

from exp.console import format_metric
from exp.report.compare import best_by, compare_groups, lost_to
from exp.report.formats import Table, count_words, format_value
from exp.report.groups import (
    Group,
    column,
    differing,
    format_mean,
    greater_is_better,
    is_seed,
    keys_of,
    ranked,
    rankings,
    settings_of,
    short_names,
    sort_key,
)
from exp.report.runs import COLUMNS, NUMBERS, column_title, is_number
from exp.runs.files import csv_content, to_json, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from exp.report.runs import Run

_VERDICTS = 10  # comparisons in words
_JSON_ONLY = ("folder", "folders", "metric_name", "metric", "metric_mean", "metric_std")


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
    """The rows of ``sweep.csv`` as a table for the page, without baselines and empty columns.

    Args:
        runs: at least one run, all with the same metric.
    """
    rows = run_rows(runs)
    styles = {"completed": "", "failed": "failed"}
    row_styles = ["best" if row["rank"] == 1 and len(rows) > 1 else styles.get(row["status"], "other") for row in rows]
    hidden = {*_JSON_ONLY, *(name for run in runs for name in run.result.get("baselines") or {})}
    shown_rows = [{title: value for title, value in row.items() if title not in hidden} for row in rows]
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
    ranked_groups = groups
    if paper:
        groups = sorted(groups, key=lambda group: list(map(sort_key, values[group])))
    # Show names if the keys are not unique.
    has_names = not paper or len(set(map(format_value, values.values()))) < len(groups)
    reference_of = {group: (group.counted or group.runs)[0].result.get("reference") or {} for group in groups}
    comparable = {group: {} if result.get("differs") else result for group, result in reference_of.items()}
    referenced = [
        name for name in _metric_titles(runs) if any(is_number(result.get(name)) for result in comparable.values())
    ]
    baselines = {name for run in runs for name in run.result.get("baselines") or {}}
    more = [name for name in _metric_titles(runs) if paper and name not in baselines]
    metrics = list(dict.fromkeys([*([] if metric is None else [column_title("metrics", metric)]), *referenced, *more]))
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
    alike = [name for name in metrics if any(name in (run.result.get("metrics_alike") or ()) for run in runs)]
    best_of = {name: best_by(groups, name) for name in alike} if paper and len(groups) > 1 else {}
    bold = [[name for name in best_of if group in best_of[name]] for group in groups] if best_of else []
    if bold:
        notes += ["bold: the best, and what differs from it by no more than the noise of seeds"]
    notes += [] if paper else verdicts(ranked_groups)
    return Table.of(rows, styles, [" ".join(note.split()) for note in notes], bold)


def verdicts(groups: Sequence[Group]) -> list[str]:
    """Sentences on groups of one metric: which lose to a baseline, and whether the others differ by more than noise.

    Args:
        groups: the best first.
    """
    labels = dict(zip(groups, settings_of(groups)))
    losers: dict[str | None, list[str]] = {}
    for group in (group for group in groups if group.reported is not None):
        losers.setdefault(lost_to(group), []).append(labels[group])
    texts = [
        f"{', '.join(names)}: worse than {text}, which needs no training" for text, names in losers.items() if text
    ]
    recorded = groups[0].runs[0].result.get("baselines") or {}
    baselines = [name for name, metric in recorded.items() if metric == groups[0].metric_name]
    if baselines and losers and not texts:
        texts = [f"better than {' and '.join(baselines)}, which need no training: all"]
    return texts + [
        f"{labels[one.first]} against {labels[one.second]}: {one.interval()}; {one.verdict()}"
        for one in compare_groups(groups)[:_VERDICTS]
    ]


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
