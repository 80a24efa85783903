"""The results of several runs as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

from exp.report.keys import apart, column, differing, is_seed, short_names, value_text
from exp.report.seeds import SeedGroup, groups_by_metric, is_averaged, mean_text
from exp.report.table import units_of

if TYPE_CHECKING:
    from rich.table import Table

    from exp.report.run import Run

__all__ = ["as_rich_table"]

_WIDTH = 100  # characters of a terminal
_HEADINGS = ("run", "runs", "validation", "n", "seconds")
_ALL = 40  # rows: of more, a terminal gets the best and those that failed
_BEST = 15
_OTHERS = 10
_AVERAGED = "mean ± sample standard deviation over n seeds"
_CHOSEN = "starred: the best on validation"


def as_rich_table(runs: Sequence[Run], keys: Sequence[str] | None = None, most: int | None = None) -> Table:
    """What ``sweep.csv`` has, for a terminal of 100 columns, with what matters most.

    Runs that differ in nothing but the seed are one row, with mean, standard deviation and number of seeds.

    Args:
        runs: any number; the best of each metric on validation is marked with a star. Of many, those of the
            middle are left out, and the caption says how many.
        keys: of the configuration, to be shown; None: those that differ. Those that find no room are left out from the
            last, and the caption names them.
        most: rows, the best first; None: as many as find room.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    by_metric = groups_by_metric(runs)
    metrics = [name for name in by_metric if name is not None]
    averaged = any(map(is_averaged, by_metric.values()))
    order = _telling(by_metric) if most is None else _ranked(by_metric)[:most]
    if keys is None:
        keys = [key for key in differing(runs) if not (averaged and is_seed(key))]
    firsts = [group.runs[0] for group in order]
    values = {key: [_clipped(value_text(value), 24) for value in column(firsts, key)] for key in keys}
    headings = apart(metrics, _HEADINGS, "metrics.")
    titles = short_names(keys, {*_HEADINGS, *headings.values()})
    names = [_clipped(group.names, 28) for group in order]
    counts = [group.n_text for group in order]
    scores = {name: [mean_text(group.reported) if group.metric_name == name else "" for group in order]
              for name in metrics}  # fmt: skip
    chosen_by = [mean_text(group.score) if group.score else "" for group in order]
    ranked = any(chosen_by)
    last = [_outcome(group) for group in order]
    # Two columns lie between neighbours. What the last one says of a failed run is shortened to the room it has.
    widths = [_width("runs", names) + 5, *(_width(headings[name], scores[name]) + 2 for name in metrics)]
    widths += [_width("validation", chosen_by) + 2] if ranked else []
    widths += [_width("n", counts) + 2] if averaged else []
    room = _WIDTH - sum(widths) - max(_width("seconds", [text for text, _ in last if len(text) < 12]), 12)
    shown: list[str] = []
    for key in keys:
        room -= _width(titles[key], values[key]) + 2
        if room < 0:
            break
        shown.append(key)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("runs" if averaged else "run", no_wrap=True)
    further = ["validation"] if ranked else []
    for title in [*(titles[key] for key in shown), *further, *headings.values(), *(["n"] if averaged else [])]:
        table.add_column(title, justify="right", no_wrap=True)
    complete = not any(group.left_out for group in order)
    table.add_column("seconds", justify="right" if complete else "left", no_wrap=True, max_width=12 + max(room, 0))
    best_ones = {groups[0] for groups in by_metric.values() if groups[0].score is not None}
    for number, group in enumerate(order):
        best = group in best_ones and len(order) > 1
        cells = ["*" if best else "", names[number], *(values[key][number] for key in shown)]
        cells += [chosen_by[number]] if ranked else []
        cells += [*(scores[name][number] for name in metrics), *([counts[number]] if averaged else [])]
        text, style = last[number]
        # As Text: a name may hold brackets, which rich would take for markup.
        row = [Text(cell, style="bold green" if best else style) for cell in [*cells, text]]
        table.add_row(*row)
    notes = [f"{name}: {unit}" for name, unit in units_of(runs).items() if name in metrics]
    if len(shown) < len(keys):
        notes.append(f"not shown: {', '.join(titles[key] for key in keys if key not in shown)}")
    caption = ["; ".join(notes)] if notes else []
    caption += [_AVERAGED] if averaged else []
    caption += [_CHOSEN] if ranked and len(order) > 1 else []
    drawn = {run for group in order for run in group.runs}
    if most is None and len(drawn) < len(runs):
        hidden = [run.status for run in runs if run not in drawn]
        more = ", ".join(f"{hidden.count(status)} more {status}" for status in dict.fromkeys(sorted(hidden)))
        caption += [more, f"all {len(runs)} runs: sweep.csv"]
        table.caption_justify = "left"
    table.caption = "\n".join(caption) or None
    return table


def _ranked(by_metric: dict[str | None, list[SeedGroup]]) -> list[SeedGroup]:
    """All groups: the best of the first metric first, and those without a score last."""
    groups = [group for each in by_metric.values() for group in each]
    return sorted(groups, key=lambda group: group.reported is None)


def _telling(by_metric: dict[str | None, list[SeedGroup]]) -> list[SeedGroup]:
    """All groups; of many the best of each metric, and some that have no score: failed ones before others."""
    order = _ranked(by_metric)
    if len(order) <= _ALL:
        return order
    others = sorted(
        (group for group in order if group.reported is None), key=lambda each: "failed" not in each.left_out
    )
    shown = {group for each in by_metric.values() for group in each[:_BEST] if group.reported is not None}
    shown.update(others[:_OTHERS])
    return [group for group in order if group in shown]


def _outcome(group: SeedGroup) -> tuple[str, str]:
    """What the last column says, and in which style."""
    if len(group.runs) == 1:
        return _outcome_of_run(group.runs[0])
    if group.left_out:
        errors = [run.error for run in group.runs if run not in group.counted and run.error is not None]
        text = ": ".join([group.left_out, *errors[:1]])
        return text, "red" if group.reported is None and "failed" in group.left_out else "dim"
    return _seconds(group.mean_number("wall_s")), ""


def _outcome_of_run(run: Run) -> tuple[str, str]:
    if run.status == "completed" and run.error is None:
        return _seconds(run.number("wall_s")), ""
    error = (run.result or {}).get("error")
    if isinstance(error, dict) and error.get("type") == "Interrupted":
        return "interrupted", "dim"  # by whoever ended the sweep; which of its processes got which signal says nothing
    text = run.status if run.error is None else f"{run.status}: {run.error}"
    return text, "red" if run.status == "failed" else "dim"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.0f}"


def _width(title: str, texts: Sequence[str]) -> int:
    return max(len(text) for text in [title, *texts])


def _clipped(text: str, width: int) -> str:
    """Names of runs differ at their ends more often than at their beginnings."""
    if len(text) <= width:
        return text
    head = width // 3
    return f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"
