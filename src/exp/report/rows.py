"""The results of several runs as CSV and JSON: of each run, and of those that differ in nothing but the seed."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Collection, Sequence

from exp.report.groups import Group, in_order, rankings
from exp.report.keys import apart, column, differing, is_seed, value_text
from exp.runs.files import csv_content, to_json, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from exp.report.runs import Run

__all__ = ["JSON_ONLY", "run_rows", "seed_rows", "write_rows"]

_LAST = ("steps", "wall_s", "samples_per_second")
_COLUMNS = {"rank", "run", "folder", "status", "selected_by", "metric_name", "metric", *_LAST, "error"}
_MEANS = ("selected_by", "metric", "wall_s")
_SEED_COLUMNS = {"rank", "runs", "folders", "n", "left_out", "metric_name", "wall_s_mean"}
JSON_ONLY = ("folder", "folders", "metric_name", "metric", "metric_mean", "metric_std")
"""Not in tables: each metric has a column of its own name there."""


def write_rows(runs: Sequence[Run], folder: Path) -> None:
    """Write ``sweep.csv`` and ``sweep.json``: a row for each run, the best first.

    Columns: rank (among the runs of the same metric), run, every key that differs, status, ``selected_by`` (the metric
    on validation, which ranks), the metric under its own name as it is reported, all further metrics, steps, wall_s,
    samples_per_second and the first line of the error. Metrics that a run does not have are nan in the CSV and null in
    the JSON. The CSV has six digits, for reading; the JSON has all of them, and also the folder of each run,
    ``metric_name`` and ``metric``.

    A metric of which another of these columns has the name already is ``metrics.<name>`` (``metrics.error``), as it
    stands in ``result.json``; a key of the configuration is ``config.<key>`` then.

    Where runs differ in nothing but the seed, ``sweep_seeds.csv`` has a row for each group of them
    (:func:`seed_rows`). It is a file of its own: among the rows of runs, means would be counted as further runs by
    whoever reads the file.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = run_rows(runs)
    content = to_json(rows, indent=2, default=str)  # YAML has dates, too
    write_atomically(folder / "sweep.json", f"{content}\n".encode())
    _write_csv(folder / "sweep.csv", rows, {"selected_by", *_metric_titles(runs, _COLUMNS).values()})
    averages = folder / "sweep_seeds.csv"
    if any(len(group.runs) > 1 for groups in rankings(runs, over_seeds=True).values() for group in groups):
        means = ["selected_by", *_metric_titles(runs, _MEANS).values()]
        _write_csv(averages, seed_rows(runs), {f"{name}_{kind}" for name in means for kind in ("mean", "std")})
    elif averages.is_file():  # of an earlier report on other runs
        averages.unlink()


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What :func:`write_rows` writes, a dict for each run, the best first."""
    order = in_order(rankings(runs, over_seeds=False))
    metrics = _metric_titles(runs, _COLUMNS)
    keys = _columns(order, differing(runs), {*_COLUMNS, *metrics.values()})
    rows = []
    for number, (rank, group) in enumerate(order):
        run = group.runs[0]
        row: dict[str, Any] = {"rank": rank, "run": run.name, "folder": str(run.folder)}
        row.update((title, values[number]) for title, values in keys.items())
        row.update(status=run.status, selected_by=run.selected_by, metric_name=run.metric_name, metric=run.metric)
        row.update((title, run.metrics.get(name)) for name, title in metrics.items())
        row.update((key, run.number(key)) for key in _LAST)
        rows.append({**row, "error": run.error})
    return rows


def seed_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A dict for each configuration, whatever its seeds; the best mean first.

    ``rank`` (by the mean, among those of the same metric), ``runs`` (their names), ``folders``, every key that differs
    besides the seed, ``n`` (seeds that count), ``left_out`` (what became of the others), ``metric_name``,
    ``selected_by_mean`` and ``_std`` (on validation, which ranks them), ``metric_mean`` and ``metric_std`` on test, and
    the same for all metrics under their own names (``metrics.<name>_mean`` where this row has that already). ``_std``
    is the sample standard deviation (n - 1); None for a single seed.
    """
    order = in_order(rankings(runs, over_seeds=True))
    metrics = _metric_titles(runs, _MEANS)
    taken = {f"{name}_{kind}" for name in (*_MEANS, *metrics.values()) for kind in ("mean", "std")}
    keys = _columns(order, [key for key in differing(runs) if not is_seed(key)], _SEED_COLUMNS | taken)
    rows = []
    for number, (rank, group) in enumerate(order):
        row: dict[str, Any] = {"rank": rank, "runs": group.names, "folders": [str(run.folder) for run in group.runs]}
        row.update((title, values[number]) for title, values in keys.items())
        row.update(n=group.n, left_out=group.left_out, metric_name=group.metric_name)
        means = {"selected_by": group.score, "metric": group.reported}
        means.update((title, group.mean(name)) for name, title in metrics.items())
        for title, mean in means.items():
            row[f"{title}_mean"], row[f"{title}_std"] = (None, None) if mean is None else (mean.value, mean.std)
        seconds = [each for each in (run.number("wall_s") for run in group.counted) if each is not None]
        rows.append({**row, "wall_s_mean": statistics.mean(seconds) if seconds else None})
    return rows


def _metric_titles(runs: Sequence[Run], taken: Collection[str]) -> dict[str, str]:
    """The titles of the metrics' columns by name, those that rank the runs first.

    Args:
        runs: any number.
        taken: titles of columns that have something else.
    """
    ranking = [name for name in rankings(runs, over_seeds=False) if name is not None]
    names = dict.fromkeys([*ranking, *(name for run in runs for name in run.metrics)])
    return apart(list(names), taken, "metrics.")


def _columns(order: Sequence[tuple[Any, Group]], keys: Sequence[str], taken: Collection[str]) -> dict[str, list[Any]]:
    """The values of keys of the configuration by the titles of their columns."""
    firsts = [group.runs[0] for _, group in order]
    return {title: column(firsts, key) for key, title in apart(keys, taken, "config.").items()}


def _write_csv(path: Path, rows: Sequence[dict[str, Any]], metrics: Collection[str]) -> None:
    names = [name for name in rows[0] if name not in JSON_ONLY]
    write_atomically(
        path, csv_content([names, *([_cell(row[name], name in metrics) for name in names] for row in rows)])
    )


def _cell(value: Any, is_metric: bool) -> str:
    if value is None:
        return "nan" if is_metric else ""
    return value if isinstance(value, str) else value_text(value)
