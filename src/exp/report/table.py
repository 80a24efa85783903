"""The results of several runs as CSV and JSON: of each run, and of those that differ in nothing but the seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Collection, Sequence

from exp import result
from exp.csvfile import csv_content
from exp.report.keys import apart, column, differing, is_seed, value_text
from exp.report.runs import by_metric, ranked
from exp.report.seeds import groups_by_metric, is_averaged
from exp.runfolder import write_atomically, write_json

if TYPE_CHECKING:
    from exp.report.run import Run

__all__ = ["as_rows", "as_seed_rows", "metric_columns", "number_text", "ranks", "units_of", "write_table"]

_STATISTICS = ("_mean", "_std")
_MEANS = ("selected_by", "metric")
_LAST = ("steps", "wall_s", "samples_per_second")
_COLUMNS = {"rank", "run", "folder", "status", "selected_by", "metric_name", "metric", *_LAST, "error"}
_SEED_COLUMNS = {"rank", "runs", "folders", "n", "left_out", "metric_name", "wall_s_mean"}
# Not in the CSV files: each metric has a column of its own name there.
_JSON_ONLY = ("folder", "folders", "metric_name", "metric", "metric_mean", "metric_std")


def write_table(runs: Sequence[Run], folder: Path) -> None:
    """Write ``sweep.csv`` and ``sweep.json``: a row for each run, the best first.

    Columns: rank (among the runs of the same metric), run, every key that differs, status, ``selected_by`` (the metric
    on validation, which ranks), the metric under its own name as it is reported, all further metrics, steps, wall_s,
    samples_per_second and the first line of the error. Metrics that a run does not have are nan in the CSV and null in
    the JSON. The CSV has six digits, for reading; the JSON has all of them, and also the folder of each run,
    ``metric_name`` and ``metric``.

    A metric of which another of these columns has the name already is ``metrics.<name>`` (``metrics.error``), as it
    stands in ``result.json``; a key of the configuration is ``config.<key>`` then.

    Where runs differ in nothing but the seed, ``sweep_seeds.csv`` has a row for each group of them
    (:func:`as_seed_rows`). It is a file of its own: among the rows of runs, means would be counted as further runs by
    whoever reads the file.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = as_rows(runs)
    write_json(folder / "sweep.json", _plain(rows))
    metrics = {"selected_by", *metric_columns(runs).values()}
    names = [name for name in rows[0] if name not in _JSON_ONLY] if rows else []
    cells = [[_cell(row[name], name in metrics) for name in names] for row in rows]
    write_atomically(folder / "sweep.csv", csv_content([names, *cells]))
    averages = folder / "sweep_seeds.csv"
    if any(map(is_averaged, groups_by_metric(runs).values())):
        rows = as_seed_rows(runs)
        metrics = {f"{name}{kind}" for name in ("selected_by", *_seed_columns(runs).values()) for kind in _STATISTICS}
        names = [name for name in rows[0] if name not in _JSON_ONLY]
        cells = [[_cell(row[name], name in metrics) for name in names] for row in rows]
        write_atomically(averages, csv_content([names, *cells]))
    elif averages.is_file():  # of an earlier report on other runs
        averages.unlink()


def units_of(runs: Sequence[Run]) -> dict[str, str]:
    """What values the metrics are of, by name, as far as the names do not say it and the runs agree."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, unit in run.units.items():
            found.setdefault(name, set()).add(unit)
    return {name: units.pop() for name, units in found.items() if len(units) == 1}


def ranks(runs: Sequence[Run]) -> dict[Run, int | None]:
    """The place of each run among those of its metric by validation, from 1; None: it has no figure on validation."""
    found: dict[Run, int | None] = {}
    for group in by_metric(runs).values():
        found.update((run, None if run.selected_by is None else number) for number, run in enumerate(group, 1))
    return found


def number_text(value: float | None) -> str:
    """A metric for a person: four decimals, or as many digits where it is tiny or huge; a dash for None."""
    return "-" if value is None else result.number_text(value)


def as_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What :func:`write_table` writes, a dict for each run, the best first."""
    order, rank = ranked(runs), ranks(runs)
    metrics = metric_columns(runs)
    keys = apart(differing(runs), {*_COLUMNS, *metrics.values()}, "config.")
    columns = {title: column(order, key) for key, title in keys.items()}
    rows = []
    for number, run in enumerate(order):
        row: dict[str, Any] = {"rank": rank[run], "run": run.name, "folder": str(run.folder)}
        row.update((key, values[number]) for key, values in columns.items())
        row.update(status=run.status, selected_by=run.selected_by, metric_name=run.metric_name, metric=run.metric)
        row.update((title, run.metrics.get(name)) for name, title in metrics.items())
        row.update((key, run.number(key)) for key in _LAST)
        row["error"] = run.error
        rows.append(row)
    return rows


def as_seed_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A dict for each configuration, whatever its seeds; the best mean first.

    ``rank`` (by the mean, among those of the same metric), ``runs`` (their names), ``folders``, every key that differs
    besides the seed, ``n`` (seeds that count), ``left_out`` (what became of the others), ``metric_name``,
    ``selected_by_mean`` and ``_std`` (on validation, which ranks them), ``metric_mean`` and ``metric_std`` on test, and
    the same for all metrics under their own names (``metrics.<name>_mean`` where this row has that already). ``_std``
    is the sample standard deviation (n - 1); None for a single seed.
    """
    by_name = groups_by_metric(runs)
    scored = [(number, group) for each in by_name.values() for number, group in enumerate(each, 1) if group.score]
    order = [*scored, *((None, group) for each in by_name.values() for group in each if group.score is None)]
    firsts, metrics = [group.runs[0] for _, group in order], _seed_columns(runs)
    taken = _SEED_COLUMNS | {f"{name}{kind}" for name in (*_MEANS, *metrics.values()) for kind in _STATISTICS}
    keys = apart([key for key in differing(runs) if not is_seed(key)], taken, "config.")
    columns = {title: column(firsts, key) for key, title in keys.items()}
    rows = []
    for number, (rank, group) in enumerate(order):
        row: dict[str, Any] = {"rank": rank, "runs": group.names, "folders": [str(run.folder) for run in group.runs]}
        row.update((key, values[number]) for key, values in columns.items())
        row.update(n=group.n, left_out=group.left_out, metric_name=group.metric_name)
        means = {
            "selected_by": group.score,
            "metric": group.reported,
            **{title: group.mean(name) for name, title in metrics.items()},
        }
        for name, mean in means.items():
            row[f"{name}_mean"], row[f"{name}_std"] = (None, None) if mean is None else (mean.value, mean.std)
        row["wall_s_mean"] = group.mean_number("wall_s")
        rows.append(row)
    return rows


def metric_columns(runs: Sequence[Run], taken: Collection[str] = frozenset(_COLUMNS)) -> dict[str, str]:
    """The titles of the metrics' columns by name, those that rank the runs first.

    Args:
        runs: any number.
        taken: titles of columns that have something else; None is given to a metric.
    """
    names = [name for name in by_metric(runs) if name is not None]
    return apart(list(dict.fromkeys([*names, *(name for run in runs for name in run.metrics)])), taken, "metrics.")


def _seed_columns(runs: Sequence[Run]) -> dict[str, str]:
    """The same for the means over seeds, less ``_mean`` and ``_std`` behind them."""
    return metric_columns(runs, (*_MEANS, "wall_s"))  # which have means, too


def _cell(value: Any, is_metric: bool) -> str:
    if value is None:
        return "nan" if is_metric else ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else value_text(value)


def _plain(value: Any) -> Any:
    """What JSON knows: YAML has dates, too."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
