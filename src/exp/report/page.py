"""One HTML page about several runs: a single file that asks nothing of any network."""

from __future__ import annotations

import base64
import io
import shlex
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Sequence

from PIL import Image

from exp.errors import RunError
from exp.report.charts import Chart, charts_of, settings_of
from exp.report.groups import Group, as_counts, greater_is_better, in_order, mean_text, rankings
from exp.report.keys import column, differing, meaning, value_text
from exp.report.tables import as_html, paper_tables, run_table
from exp.runs.files import read_json, to_json, write_atomically

if TYPE_CHECKING:
    from exp.report.runs import Run

__all__ = ["thumbnail", "write_page"]

_STATES = ["completed", "failed", "preempted", "unfinished", "pending"]
_VALUES = 12  # of a key, in the table of what differs
_LONGEST = 300  # characters of a value
_WIDTH, _PER_RUN = 640, 6  # of pictures
_BYTES = 12_000_000  # of all pictures in base64; the page is to stay below 15
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
    options = to_json([chart.option for chart in charts], separators=(",", ":"))
    page = Template(_part("page.html")).substitute(
        title=escape(title),
        summary=_summary(runs, over_seeds),
        css=_part("page.css"),
        library=_part("echarts/echarts.min.js"),
        script=_part("page.js"),
        # Nothing in it can end a script element.
        options=options.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
        body="\n".join([*body, _configuration(order), _album(order)]),
        footer=_versions(runs),
    )
    write_atomically(path, page.encode("utf-8", "replace"))  # names of folders may be any bytes


def thumbnail(path: Path) -> str | None:
    """A picture of at most 640 pixels in width as an address that needs no file; None where it cannot be read."""
    buffer = io.BytesIO()
    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow's, for files that are none
        return None
    picture.thumbnail((_WIDTH, max(picture.height, 1)))
    picture.save(buffer, format="jpeg", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _summary(runs: Sequence[Run], ranking: dict[str | None, list[Group]]) -> str:
    """How many runs, what became of them, and the best of each metric."""
    states = as_counts(sorted((run.status for run in runs), key=[*_STATES, *(run.status for run in runs)].index))
    text = f"<b>{len(runs)} run{'s' if len(runs) != 1 else ''}</b>: {escape(states)}"
    for metric, groups in ranking.items():
        best = groups[0]
        if metric is None or best.reported is None or (len(groups) > 1 and best.score is None):
            continue  # nothing tells which is the best
        which = f"best on validation is {escape(settings_of(groups)[0])} with " if len(groups) > 1 else ""
        text += f"; {which}<b>{escape(metric)} {mean_text(best.reported)}</b>"
    return text


def _results(metric: str | None, groups: Sequence[Group], singles: Sequence[Group], charts: list[Chart]) -> str:
    """Tables and charts of the runs of one metric, over seeds and single; the charts are added to those of the page."""
    runs = [run for group in singles for run in group.runs]
    drawn = charts_of(groups, metric)
    figures = [(chart, _figure(chart, place)) for place, chart in enumerate(drawn, len(charts))]
    charts += drawn
    parts = [f"<section><h2>{_heading(runs, metric)}</h2>", *(figure for chart, figure in figures if chart.rows)]
    for table in paper_tables(runs) if metric is not None else ():
        if table.averaged or table.published:
            parts += [as_html(table, "paper"), _note(table.notes)]
    parts += [_SMOOTHING] if any(chart.is_curves for chart in drawn) else []
    others = [figure for chart, figure in figures if not (chart.rows or chart.folded)]
    parts.append(f'<div class="charts">{"".join(others)}</div>')
    folded = [figure for chart, figure in figures if chart.folded]
    if folded:
        titles = ", ".join(chart.title for chart in drawn if chart.folded)
        parts.append(_folded(titles, f'<div class="charts">{"".join(folded)}</div>'))
    table = run_table(runs)
    return "\n".join([*parts, f"<h3>Every run</h3>\n{as_html(table, 'results')}", _note(table.notes), "</section>"])


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


def _note(notes: Sequence[str]) -> str:
    return f'<p class="note">{escape("; ".join(notes))}.</p>' if notes else ""


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _configuration(runs: Sequence[Run]) -> str:
    """The keys that tell the runs apart; behind folds those that are the same, and the commands."""
    values = {key: column(runs, key) for key in dict.fromkeys(key for run in runs for key in run.config)}
    same = {key: each for key, each in values.items() if len(set(map(meaning, each))) == 1}
    parts = [_keys({key: column(runs, key) for key in differing(runs)})]
    parts += [_folded(f"{len(same)} keys that are the same in all runs", _keys(same))] if same else []
    commands = []
    for run in runs:
        words = [shlex.quote(override) for override in run.overrides if not override.startswith("output_dir=")]
        command = escape(" ".join(["python -m exp", *words]))
        commands.append(f"<li>{escape(run.name)}<br><code>{command}</code></li>")
    parts.append(_folded("Command lines", f'<ul class="commands">{"".join(commands)}</ul>'))
    return "\n".join(["<section><h2>Configuration</h2>", *parts, "</section>"])


def _keys(values: dict[str, list[Any]]) -> str:
    """The values of each key."""
    rows = []
    for key, each in values.items():
        texts = [escape(text) for text in dict.fromkeys(value_text(value)[:_LONGEST] for value in each)]
        more = [f"and {len(texts) - _VALUES} more"] if len(texts) > _VALUES else []
        rows.append(f"<tr><td>{escape(key)}</td><td>{'<br>'.join(texts[:_VALUES] + more)}</td></tr>")
    return f'<div class="scroll"><table class="keys"><tbody>{"".join(rows)}</tbody></table></div>' if rows else ""


def _album(runs: Sequence[Run]) -> str:
    """The first six pictures of each run, until there are 12 MB of them; how many more there are."""
    parts: list[str] = []
    left_out = size = 0
    for run in runs:
        shown: list[str] = []
        for path in run.pictures():
            address = None if len(shown) == _PER_RUN or size > _BYTES else thumbnail(path)
            if address is None:
                left_out += 1
                continue
            name = escape(path.relative_to(run.folder).as_posix())
            image = f'<img src="{address}" alt="{escape(run.name)}: {name}" loading="lazy">'
            button = f'<button type="button" class="zoom">{image}</button>'
            shown.append(f"<figure>{button}<figcaption>{name}</figcaption></figure>")
            size += len(address)
        if shown:
            parts.append(f'<h3>{escape(run.name)}</h3>\n<div class="pictures">{"".join(shown)}</div>')
    if not parts and not left_out:
        return ""
    heading = "<section><h2>Pictures <small>click one to enlarge it</small></h2>"
    notes = [f"{left_out} more are in the run folders"] if left_out else []
    return "\n".join([heading, _note(notes), *parts, "</section>"])


def _versions(runs: Sequence[Run]) -> str:
    """What the runs were computed with, each combination once."""
    found: dict[str, None] = {}
    for run in runs:
        with suppress(RunError, OSError, KeyError, TypeError):
            env: Any = read_json(run.folder / "env.json")
            revision = str(env["git_revision"])[:10]
            text = f"Python {env['python']}, torch {env['packages']['torch']}, exp {env['exp']}, revision {revision}"
            found.setdefault(text)
    return escape(f"Computed with {'; '.join(found)}." if found else "")
