"""One HTML page about several runs: a single file that asks nothing of any network."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template
from typing import Any, Sequence

from exp.errors import RunError
from exp.report.charts import Section, chart_data, charts, section_of, settings_of
from exp.report.page_config import command_lines, configuration
from exp.report.page_table import results_table
from exp.report.run import Run
from exp.report.runs import by_metric, greater_is_better, ranked
from exp.report.table import number_text
from exp.report.thumbnails import Album, Thumbnail, collect, data_uri
from exp.runfolder import read_json, to_json, write_atomically

__all__ = ["write_page"]

_STATES = ("completed", "failed", "preempted", "unfinished", "pending")


def write_page(runs: Sequence[Run], path: Path, title: str) -> None:
    """Write the page.

    Args:
        runs: at least one.
        path: of the HTML file; its folder is made where it does not exist.
        title: heads the page; may hold any characters.

    Raises:
        OSError: the file cannot be written.
    """
    sections = [section_of(metric, group) for metric, group in by_metric(runs).items()]
    numbers = {run: number for number, run in enumerate(run for section in sections for run in section.runs)}
    body = [_results(section, place, numbers, len(sections) > 1) for place, section in enumerate(sections)]
    body.append(
        f"<section><h2>Configuration</h2>\n{configuration(ranked(runs))}\n{command_lines(ranked(runs))}</section>"
    )
    body.append(_pictures(collect(ranked(runs))))
    page = Template(_part("page.html")).substitute(
        title=escape(title),
        summary=_summary(runs),
        css=_part("page.css"),
        library=_part("echarts/echarts.min.js"),
        scripts="\n".join(map(_part, ("lines.js", "charts.js", "page.js"))),
        data=_embedded(chart_data(sections, numbers)),
        body="\n".join(body),
        footer=_versions(runs),
    )
    write_atomically(path, page.encode("utf-8", "replace"))  # names of folders may be any bytes


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _summary(runs: Sequence[Run]) -> str:
    """How many runs, what became of them, and the best of each metric."""
    counts = {status: sum(run.status == status for run in runs) for status in dict.fromkeys(run.status for run in runs)}
    order = sorted(counts, key=lambda status: _STATES.index(status) if status in _STATES else len(_STATES))
    states = ", ".join(f"{counts[status]} {escape(status)}" for status in order)
    text = f"<b>{len(runs)} run{'s' if len(runs) != 1 else ''}</b>: {states}"
    for metric, group in by_metric(runs).items():
        best = group[0]
        if metric is not None and best.metric is not None:
            if len(group) > 1 and best.selected_by is None:
                continue  # nothing tells which is the best
            which = f"best on validation is {escape(best.name)} with" if len(group) > 1 else ""
            peculiar = settings_of(group)[best]
            settings = f" ({escape(peculiar)})" if peculiar else ""
            text += f"; {which} <b>{escape(metric)} {number_text(best.metric)}</b>{settings}"
    return text


def _results(section: Section, place: int, numbers: dict[Run, int], several: bool) -> str:
    """Table and charts of one metric."""
    table = results_table(section.runs, section.metric, numbers)
    return f"<section><h2>{_heading(section, several)}</h2>\n{table}\n{charts(section, place)}</section>"


def _heading(section: Section, several: bool) -> str:
    """What was measured, on what, and what is good."""
    if section.metric is None:
        return "Runs without a metric" if several else "Results <small>no run has a metric</small>"
    results = [run.result for run in section.runs if run.result is not None and run.metric is not None]
    parts = list(dict.fromkeys(str(result.get("measured_on") or "test") for result in results))
    experiments = list(dict.fromkeys(str(result["experiment"]) for result in results if result.get("experiment")))
    notes = [", ".join(experiments)] if 0 < len(experiments) <= 4 else []
    if any("greater_is_better" in result for result in results):
        notes.append("larger is better" if greater_is_better(section.runs) else "smaller is better")
    elif len(results) > 1:  # runs of an earlier version
        notes.append("smaller is taken for better: the runs do not say")
    what = f"{section.metric} on {' and '.join(parts)}" if parts else section.metric
    return f"{escape(what)} <small>{escape('; '.join(notes))}</small>"


def _embedded(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end that."""
    text = to_json(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _pictures(album: Album) -> str:
    """The runs' own pictures, those of the best run first."""
    if not album.pictures and not album.unreadable:
        return ""
    parts = ["<section><h2>Pictures <small>click one to enlarge it</small></h2>"]
    notes = []
    if album.left_out:
        notes.append(f"{album.left_out} more are in the run folders")
    if album.unreadable:
        notes.append(f"{album.unreadable} could not be read, or are too large")
    if notes:
        parts.append(f'<p class="note">{"; ".join(notes)}.</p>')
    for run, pictures in album.pictures.items():
        score = (
            f" <small>{escape(run.metric_name or '')} {number_text(run.metric)}</small>"
            if run.metric is not None
            else ""
        )
        parts.append(f'<h3>{escape(run.name)}{score}</h3>\n<div class="pictures">')
        for picture in pictures:
            caption = f"<figcaption>{escape(picture.name)}</figcaption>"
            parts.append(f"<figure>{_zoomable(picture, run.name)}{caption}</figure>")
        parts.append("</div>")
    return "\n".join([*parts, "</section>"])


def _zoomable(picture: Thumbnail, run: str) -> str:
    image = (
        f'<img src="{data_uri(picture.content, picture.kind)}" alt="{escape(f"{run}: {picture.name}")}" loading="lazy" '
        f'width="{picture.width}" height="{picture.height}">'
    )
    return f'<button type="button" class="zoom">{image}</button>'


def _versions(runs: Sequence[Run]) -> str:
    """With what the runs were computed, each combination once."""
    found: dict[str, None] = {}
    for run in runs:
        try:
            env = read_json(run.folder / "env.json")
        except (RunError, OSError):
            continue
        if isinstance(env, dict):
            packages: Any = env.get("packages")
            packages = packages if isinstance(packages, dict) else {}
            names = [("Python", env.get("python")), ("torch", packages.get("torch")), ("exp", env.get("exp")),
                     ("revision", str(env.get("git_revision") or "")[:10])]  # fmt: skip
            found.setdefault(", ".join(f"{name} {value}" for name, value in names if value))
    texts = [text for text in found if text]
    more = f"; and {len(texts) - 4} other combinations" if len(texts) > 4 else ""
    return escape(f"Computed with {'; '.join(texts[:4])}{more}." if texts else "")
