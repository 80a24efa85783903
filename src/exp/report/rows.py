"""The results of several runs as CSV and JSON: of each run, and of those that differ in nothing but the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Collection, Sequence

from exp.report.groups import in_order, rankings
from exp.report.keys import apart, column, differing, is_seed, value_text
from exp.runs.files import csv_content, to_json, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from exp.report.runs import Run

__all__ = ["as_cells", "run_rows", "seed_rows", "write_rows"]

_LAST = ("steps", "wall_s", "samples_per_second")
_COLUMNS = {"rank", "run", "folder", "status", "selected_by", "metric_name", "metric", *_LAST, "error"}
_MEANS = ("selected_by", "metric", "wall_s")
_SEED_COLUMNS = {"rank", "runs", "folders", "n", "left_out", "metric_name", "wall_s_mean"}
_JSON_ONLY = ("folder", "folders", "metric_name", "metric", "metric_mean", "metric_std")


def write_rows(runs: Sequence[Run], folder: Path) -> None:
    """Write ``sweep.csv`` and ``sweep.json``: a row for each run, the best first.

    Columns: rank (among the runs of the same metric), run, every key that differs, status, ``selected_by`` (the metric
    on validation, which ranks), the metric under its own name as it is reported, all further metrics, steps, wall_s,
    samples_per_second and the first line of the error. What a run does not have is empty in the CSV and null in the
    JSON. The CSV has six digits, for reading; the JSON has all of them, and also the folder of each run,
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
    write_atomically(folder / "sweep.csv", csv_content(as_cells(rows)))
    averages = folder / "sweep_seeds.csv"
    if any(len(group.runs) > 1 for groups in rankings(runs, over_seeds=True).values() for group in groups):
        write_atomically(averages, csv_content(as_cells(seed_rows(runs))))
    elif averages.is_file():  # of an earlier report on other runs
        averages.unlink()


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What :func:`write_rows` writes, a dict for each run, the best first."""
    metrics = _metric_titles(runs, _COLUMNS)
    keys = apart(differing(runs), {*_COLUMNS, *metrics.values()}, "config.")
    return [
        {
            "rank": rank,
            "run": run.name,
            "folder": str(run.folder),
            **{title: column([run], key)[0] for key, title in keys.items()},
            "status": run.status,
            "selected_by": run.selected_by,
            "metric_name": run.metric_name,
            "metric": run.metric,
            **{title: run.metrics.get(name) for name, title in metrics.items()},
            **{key: run.number(key) for key in _LAST},
            "error": run.error,
        }
        for rank, group in in_order(rankings(runs, over_seeds=False))
        for run in group.runs
    ]


def seed_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A dict for each configuration, whatever its seeds; the best mean first.

    ``rank`` (by the mean, among those of the same metric), ``runs`` (their names), ``folders``, every key that differs
    besides the seed, ``n`` (seeds that count), ``left_out`` (what became of the others), ``metric_name``,
    ``selected_by_mean`` and ``_std`` (on validation, which ranks them), ``metric_mean`` and ``metric_std`` on test, and
    the same for all metrics under their own names (``metrics.<name>_mean`` where this row has that already). ``_std``
    is the sample standard deviation (n - 1); None for a single seed.
    """
    metrics = _metric_titles(runs, _MEANS)
    taken = {f"{name}_{kind}" for name in (*_MEANS, *metrics.values()) for kind in ("mean", "std")}
    keys = apart([key for key in differing(runs) if not is_seed(key)], _SEED_COLUMNS | taken, "config.")
    rows = []
    for rank, group in in_order(rankings(runs, over_seeds=True)):
        row: dict[str, Any] = {"rank": rank, "runs": group.names, "folders": [str(run.folder) for run in group.runs]}
        row.update((title, column(group.runs, key)[0]) for key, title in keys.items())
        row.update(n=group.n, left_out=group.left_out, metric_name=group.metric_name)
        means = {"selected_by": group.score, "metric": group.reported}
        means.update((title, group.mean(name)) for name, title in metrics.items())
        for title, mean in means.items():
            row[f"{title}_mean"], row[f"{title}_std"] = mean or (None, None)
        seconds = group.mean_of(lambda run: run.number("wall_s"))
        rows.append({**row, "wall_s_mean": seconds and seconds.value})
    return rows


def as_cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows as text, the titles first, without what only the JSON has."""
    names = [name for name in rows[0] if name not in _JSON_ONLY]
    return [names, *(["" if row[name] is None else value_text(row[name]) for name in names] for row in rows)]


def _metric_titles(runs: Sequence[Run], taken: Collection[str]) -> dict[str, str]:
    """The titles of the metrics' columns by name, those that rank the runs first.

    Args:
        runs: any number.
        taken: titles of columns that have something else.
    """
    ranking = [name for name in rankings(runs, over_seeds=False) if name is not None]
    return apart(list(dict.fromkeys([*ranking, *(name for run in runs for name in run.metrics)])), taken, "metrics.")
