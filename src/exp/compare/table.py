"""The results of several runs as CSV, JSON and a table for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from exp import result
from exp.compare.keys import column, differing, short_names, value_text
from exp.compare.runs import by_metric, ranked
from exp.csvfile import csv_content
from exp.runfolder import write_atomically, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from exp.compare.run import Run

__all__ = ["as_rich_table", "as_rows", "number_text", "ranks", "units_of", "write_table"]

_WIDTH = 100  # characters of a terminal
_ALL = 40  # runs: of more, a terminal gets the best and those that failed
_BEST = 15
_OTHERS = 10
_LAST = ("steps", "wall_s", "samples_per_second")


def write_table(runs: Sequence[Run], folder: Path) -> None:
    """Write ``sweep.csv`` and ``sweep.json``: a row for each run, the best first.

    Columns: rank (among the runs of the same metric), run, every key that differs, status, the metric under its own
    name, all further metrics, steps, wall_s, samples_per_second and the first line of the error. Metrics that a run
    does not have are nan in the CSV and null in the JSON. The CSV has six digits, for reading; the JSON has all of
    them, and also the folder of each run, ``metric_name`` and ``metric``.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = as_rows(runs)
    write_json(folder / "sweep.json", _plain(rows))
    metrics = _metric_names(runs)
    left_out = ("folder", "metric_name", "metric")
    names = [name for name in rows[0] if name not in left_out] if rows else []
    cells = [[_cell(row[name], name in metrics) for name in names] for row in rows]
    write_atomically(folder / "sweep.csv", csv_content([names, *cells]))


def as_rich_table(runs: Sequence[Run], keys: Sequence[str] | None = None) -> Table:
    """The same for a terminal of 100 columns, with what matters most.

    Args:
        runs: any number; the best of each metric is marked with a star. Of many, those of the middle are left out, and
            the caption says how many.
        keys: of the configuration, to be shown; None: those that differ. Those that find no room are left out from the
            last, and the caption names them.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    order, rank = _telling(runs), ranks(runs)
    keys = differing(runs) if keys is None else list(keys)
    values = {key: [_clipped(value_text(value), 24) for value in column(order, key)] for key in keys}
    titles = short_names(keys)
    metrics = [name for name in by_metric(runs) if name is not None]
    names = [_clipped(run.name, 28) for run in order]
    last = [_outcome(run) for run in order]
    # Two columns lie between neighbours. What the last one says of a failed run is shortened to the room it has.
    widths = [_width("run", names) + 5, *(_width(name, [f"{0:.4f}"] * len(order)) + 2 for name in metrics)]
    room = _WIDTH - sum(widths) - max(_width("seconds", [text for text, _ in last if len(text) < 12]), 12)
    shown: list[str] = []
    for key in keys:
        room -= _width(titles[key], values[key]) + 2
        if room < 0:
            break
        shown.append(key)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("run", no_wrap=True)
    for key in shown:
        table.add_column(titles[key], justify="right", no_wrap=True)
    for name in metrics:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("seconds", justify="right" if all(run.status == "completed" for run in order) else "left",
                     no_wrap=True, max_width=12 + max(room, 0))  # fmt: skip
    for number, run in enumerate(order):
        best = rank[run] == 1 and len(order) > 1
        cells = ["*" if best else "", names[number], *(values[key][number] for key in shown)]
        cells += [number_text(run.metric) if run.metric_name == name else "" for name in metrics]
        text, style = last[number]
        # As Text: a name may hold brackets, which rich would take for markup.
        row = [Text(cell, style="bold green" if best else style) for cell in [*cells, text]]
        table.add_row(*row)
    notes = [f"{name}: {unit}" for name, unit in units_of(runs).items() if name in metrics]
    if len(shown) < len(keys):
        notes.append(f"not shown: {', '.join(titles[key] for key in keys if key not in shown)}")
    caption = ["; ".join(notes)] if notes else []
    if len(order) < len(runs):
        hidden = [run.status for run in runs if run not in order]
        more = ", ".join(f"{hidden.count(status)} more {status}" for status in dict.fromkeys(sorted(hidden)))
        caption += [more, f"all {len(runs)} runs: sweep.csv"]
        table.caption_justify = "left"
    table.caption = "\n".join(caption) or None
    return table


def _telling(runs: Sequence[Run]) -> list[Run]:
    """All runs, the best first; of many the best of each metric, and some that have none: failed ones before others."""
    order = ranked(runs)
    if len(order) <= _ALL:
        return order
    others = sorted((run for run in order if run.metric is None), key=lambda run: run.status != "failed")
    shown = {run for group in by_metric(runs).values() for run in group[:_BEST] if run.metric is not None}
    shown.update(others[:_OTHERS])
    return [run for run in order if run in shown]


def units_of(runs: Sequence[Run]) -> dict[str, str]:
    """What values the metrics are of, by name, as far as the names do not say it and the runs agree."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, unit in run.units.items():
            found.setdefault(name, set()).add(unit)
    return {name: units.pop() for name, units in found.items() if len(units) == 1}


def ranks(runs: Sequence[Run]) -> dict[Run, int | None]:
    """The place of each run among those of its metric, from 1; None: it has no metric."""
    found: dict[Run, int | None] = {}
    for group in by_metric(runs).values():
        found.update((run, number if run.metric is not None else None) for number, run in enumerate(group, 1))
    return found


def number_text(value: float | None) -> str:
    """A metric for a person: four decimals, or as many digits where it is tiny or huge; a dash for None."""
    return "-" if value is None else result.number_text(value)


def as_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What :func:`write_table` writes, a dict for each run, the best first."""
    order, rank = ranked(runs), ranks(runs)
    metrics = _metric_names(runs)
    taken = {"rank", "run", "folder", "status", "metric_name", "metric", "error", *metrics, *_LAST}
    columns = {(f"config.{key}" if key in taken else key): column(order, key) for key in differing(runs)}
    rows = []
    for number, run in enumerate(order):
        row: dict[str, Any] = {"rank": rank[run], "run": run.name, "folder": str(run.folder)}
        row.update((key, values[number]) for key, values in columns.items())
        row.update(status=run.status, metric_name=run.metric_name, metric=run.metric)
        row.update((name, run.metrics.get(name)) for name in metrics)
        row.update((key, run.number(key)) for key in _LAST)
        row["error"] = run.error
        rows.append(row)
    return rows


def _metric_names(runs: Sequence[Run]) -> list[str]:
    """Those that rank the runs first."""
    names = [name for name in by_metric(runs) if name is not None]
    return list(dict.fromkeys([*names, *(name for run in runs for name in run.metrics)]))


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


def _outcome(run: Run) -> tuple[str, str]:
    """What the last column says, and in which style."""
    if run.status == "completed":
        seconds = run.number("wall_s")
        return ("" if seconds is None else f"{seconds:,.0f}"), ""
    error = (run.result or {}).get("error")
    if isinstance(error, dict) and error.get("type") == "Interrupted":
        return "interrupted", "dim"  # by whoever ended the sweep; which of its processes got which signal says nothing
    text = run.status if run.error is None else f"{run.status}: {run.error}"
    return text, "red" if run.status == "failed" else "dim"


def _width(title: str, texts: Sequence[str]) -> int:
    return max(len(text) for text in [title, *texts])


def _clipped(text: str, width: int) -> str:
    """Names of runs differ at their ends more often than at their beginnings."""
    if len(text) <= width:
        return text
    head = width // 3
    return f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"
