"""One HTML page about several runs: a single file that asks nothing of any network."""

from __future__ import annotations

import shlex
from collections import Counter
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Sequence

from exp.errors import RunError
from exp.report.charts import Chart, charts_of, settings_of
from exp.report.groups import Group, greater_is_better, in_order, mean_text, rankings
from exp.report.keys import column, differing, unlike, value_text
from exp.report.pictures import album
from exp.report.runs import Run
from exp.report.tables import as_html, paper_tables, run_table
from exp.runs.files import read_json, to_json, write_atomically

__all__ = ["write_page"]

_STATES = ("completed", "failed", "preempted", "unfinished", "pending")
_VALUES = 12  # of a key, in the table of what differs
_LONGEST = 300  # characters of a value
_SMOOTHING = (
    '<label class="note">smoothing of curves '
    '<input type="range" class="smooth" min="0" max="0.99" step="0.01" value="0"></label>'
)


def write_page(runs: Sequence[Run], path: Path, title: str) -> None:
    """Write the page.

    Args:
        runs: at least one.
        path: of the HTML file; its folder is made where it does not exist.
        title: heads the page; may hold any characters.

    Raises:
        OSError: the file cannot be written.
    """
    over_seeds, singles = rankings(runs, over_seeds=True), rankings(runs, over_seeds=False)
    order = [group.runs[0] for _, group in in_order(singles)]
    charts: list[Chart] = []
    body = [_results(metric, groups, singles[metric], charts) for metric, groups in over_seeds.items()]
    body += [_configuration(order), album(order)]
    page = Template(_part("page.html")).substitute(
        title=escape(title),
        summary=_summary(runs, over_seeds),
        css=_part("page.css"),
        library=_part("echarts/echarts.min.js"),
        script=_part("page.js"),
        options=_embedded([chart.option for chart in charts]),
        body="\n".join(body),
        footer=_versions(runs),
    )
    write_atomically(path, page.encode("utf-8", "replace"))  # names of folders may be any bytes


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _embedded(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end that."""
    text = to_json(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _summary(runs: Sequence[Run], ranking: dict[str | None, list[Group]]) -> str:
    """How many runs, what became of them, and the best of each metric."""
    counts = Counter(run.status for run in runs)
    order = sorted(counts, key=lambda status: _STATES.index(status) if status in _STATES else len(_STATES))
    states = ", ".join(f"{counts[status]} {escape(status)}" for status in order)
    text = f"<b>{len(runs)} run{'s' if len(runs) != 1 else ''}</b>: {states}"
    for metric, groups in ranking.items():
        best = groups[0]
        if metric is None or best.reported is None or (len(groups) > 1 and best.score is None):
            continue  # nothing tells which is the best
        which = f"best on validation is {escape(settings_of(groups)[0])} with " if len(groups) > 1 else ""
        text += f"; {which}<b>{escape(metric)} {mean_text(best.reported)}</b>"
    return text


def _results(metric: str | None, groups: Sequence[Group], singles: Sequence[Group], charts: list[Chart]) -> str:
    """Tables and charts of the runs of one metric, over seeds and single; the charts are added to those of the page."""
    runs = [run for group in groups for run in group.runs]
    drawn = charts_of(groups, metric)
    figures = [_figure(chart, place) for place, chart in enumerate(drawn, len(charts))]
    charts += drawn
    bars = [figure for chart, figure in zip(drawn, figures) if chart.rows]
    others = [figure for chart, figure in zip(drawn, figures) if not (chart.rows or chart.folded)]
    folded = [figure for chart, figure in zip(drawn, figures) if chart.folded]
    parts = [f"<section><h2>{_heading(runs, metric)}</h2>", *bars]
    for table in paper_tables(runs) if metric is not None else ():
        if table.averaged or table.published:
            parts += [as_html(table, "paper"), f'<p class="note">{escape("; ".join(table.notes))}.</p>']
    parts += [_SMOOTHING] if any(chart.is_curves for chart in drawn) else []
    parts.append(f'<div class="charts">{"".join(others)}</div>')
    if folded:
        titles = ", ".join(chart.title for chart in drawn if chart.folded)
        parts.append(_folded(titles, f'<div class="charts">{"".join(folded)}</div>'))
    table = run_table([group.runs[0] for group in singles])
    notes = f'<p class="note">{escape("; ".join(table.notes))}.</p>' if table.notes else ""
    return "\n".join([*parts, f"<h3>Every run</h3>\n{as_html(table, 'results')}{notes}</section>"])


def _heading(runs: Sequence[Run], metric: str | None) -> str:
    """What was measured, on what, and what is good."""
    if metric is None:
        return "Runs without a metric"
    known = [run.result for run in runs if run.metric is not None]
    parts = dict.fromkeys(str(result.get("measured_on") or "test") for result in known)
    experiments = dict.fromkeys(str(result["experiment"]) for result in known if result.get("experiment"))
    notes = [", ".join(list(experiments)[:4])] if experiments else []
    notes.append("larger is better" if greater_is_better(runs) else "smaller is better")
    notes += [f"{len(runs) - len(known)} of {len(runs)} runs have no result"] if len(known) < len(runs) else []
    what = f"{metric} on {' and '.join(parts)}" if parts else metric
    return f"{escape(what)} <small>{escape('; '.join(notes))}</small>"


def _figure(chart: Chart, place: int) -> str:
    height = f' style="height:{60 + 28 * max(chart.rows, 3)}px"' if chart.rows else ""
    kinds = "chart curves" if chart.is_curves else "chart"
    return (
        f'<figure class="{kinds}"><figcaption>{escape(chart.title)}</figcaption>'
        f'<div class="plot" data-chart="{place}"{height}></div></figure>'
    )


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _configuration(runs: Sequence[Run]) -> str:
    """The keys that tell the runs apart; behind folds those that are the same, and the commands."""
    chosen, unequal = differing(runs), set(unlike(runs))
    same = [key for key in dict.fromkeys(key for run in runs for key in run.config) if key not in unequal]
    parts = [_keys(runs, chosen)] if chosen else []
    if not chosen and len(runs) > 1:
        parts.append("<p>The runs differ in no key that bears on the outcome.</p>")
    if same:
        title = f"{len(same)} keys that are the same in all runs" if len(runs) > 1 else f"{len(same)} keys"
        parts.append(_folded(title, _keys(runs, same)))
    commands = "".join(
        f"<li>{escape(run.name)}<br><code>{escape(_command(run))}</code></li>" for run in runs if run.overrides
    )
    if commands:
        parts.append(_folded("Command lines", f'<ul class="commands">{commands}</ul>'))
    return "\n".join(["<section><h2>Configuration</h2>", *parts, "</section>"])


def _command(run: Run) -> str:
    kept = [override for override in run.overrides if not override.startswith("output_dir=")]
    return " ".join(["python -m exp", *map(shlex.quote, kept)])


def _keys(runs: Sequence[Run], keys: Sequence[str]) -> str:
    """The values of each key, and in how many runs, where there are several."""
    rows = []
    for key in keys:
        # A key that a run does not have is not the same as null.
        counts = Counter("(none)" if value is None and key not in run.config else value_text(value)[:_LONGEST]
                         for run, value in zip(runs, column(runs, key)))  # fmt: skip
        shown = [escape(text) + (f" <i>&times; {count}</i>" if len(counts) > 1 else "")
                 for text, count in list(counts.items())[:_VALUES]]  # fmt: skip
        more = [f"and {len(counts) - _VALUES} more"] if len(counts) > _VALUES else []
        rows.append(f"<tr><td>{escape(key)}</td><td>{'<br>'.join([*shown, *more])}</td></tr>")
    return f'<div class="scroll"><table class="keys"><tbody>{"".join(rows)}</tbody></table></div>'


def _versions(runs: Sequence[Run]) -> str:
    """What the runs were computed with, each combination once."""
    found: dict[str, None] = {}
    for run in runs:
        try:
            env: Any = read_json(run.folder / "env.json")
            versions = {"Python": env["python"], "torch": env["packages"]["torch"], "exp": env["exp"]}
        except (RunError, OSError, KeyError, TypeError):
            continue
        revision = {"revision": str(env.get("git_revision") or "none")[:10]}
        found.setdefault(", ".join(f"{name} {value}" for name, value in {**versions, **revision}.items()))
    return escape(f"Computed with {'; '.join(found)}." if found else "")
