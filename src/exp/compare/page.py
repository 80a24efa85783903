"""One HTML page about several runs: a single file that asks nothing of any network."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, Sequence

from exp.compare.curves import Curve, curves_of, thinned
from exp.compare.keys import column, differing, short_names, value_text
from exp.compare.page_config import command_lines, configuration
from exp.compare.page_table import results_table
from exp.compare.plots import comparison_pictures
from exp.compare.run import Run
from exp.compare.runs import by_metric, greater_is_better, ranked
from exp.compare.table import number_text
from exp.compare.thumbnails import Album, Thumbnail, collect, data_uri
from exp.errors import RunError
from exp.runfolder import read_json, to_json, write_atomically

__all__ = ["write_page"]

_POINTS = 400  # of a curve
_STRONG = 8  # curves in colour
_SETTINGS = 5  # keys that are named where there is little room
_STATES = ("completed", "failed", "preempted", "unfinished", "pending")


class _Section(NamedTuple):
    """The runs of one metric, the best first."""

    metric: str | None
    runs: list[Run]
    curves: dict[Run, dict[str, Curve]]
    plots: dict[str, bytes]


def write_page(
    runs: Sequence[Run], path: Path, title: str, plots: dict[str | None, dict[str, bytes]] | None = None
) -> None:
    """Write the page.

    Args:
        runs: at least one.
        path: of the HTML file; its folder is made where it does not exist.
        title: heads the page; may hold any characters.
        plots: what :func:`exp.compare.plots.comparison_pictures` gives; None: it is called.

    Raises:
        OSError: the file cannot be written.
    """
    plots = comparison_pictures(runs) if plots is None else plots
    sections = [
        _Section(metric, group, {run: curves_of(run, metric) for run in group}, plots.get(metric, {}))
        for metric, group in by_metric(runs).items()
    ]
    order = [run for section in sections for run in section.runs]
    numbers = {run: number for number, run in enumerate(order)}
    body = [_results(section, place, numbers, len(sections) > 1) for place, section in enumerate(sections)]
    body.append(
        f"<section><h2>Configuration</h2>\n{configuration(ranked(runs))}\n{command_lines(ranked(runs))}</section>"
    )
    body.append(_pictures(collect(ranked(runs))))
    here = Path(__file__).parent
    page = Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        summary=_summary(runs),
        css=(here / "page.css").read_text(encoding="utf-8"),
        js=(here / "page.js").read_text(encoding="utf-8"),
        data=_embedded(_data(sections, numbers)),
        body="\n".join(body),
        footer=_versions(runs),
    )
    write_atomically(path, page.encode("utf-8", "replace"))  # names of folders may be any bytes


def _summary(runs: Sequence[Run]) -> str:
    """How many runs, what became of them, and the best of each metric."""
    counts = {status: sum(run.status == status for run in runs) for status in dict.fromkeys(run.status for run in runs)}
    order = sorted(counts, key=lambda status: _STATES.index(status) if status in _STATES else len(_STATES))
    states = ", ".join(f"{counts[status]} {escape(status)}" for status in order)
    text = f"<b>{len(runs)} run{'s' if len(runs) != 1 else ''}</b>: {states}"
    for metric, group in by_metric(runs).items():
        best = group[0]
        if metric is not None and best.metric is not None:
            which = f"best is {escape(best.name)} with" if len(group) > 1 else ""
            peculiar = _settings(group)[best]
            settings = f" ({escape(peculiar)})" if peculiar else ""
            text += f"; {which} <b>{escape(metric)} {number_text(best.metric)}</b>{settings}"
    return text


def _settings(runs: Sequence[Run]) -> dict[Run, str]:
    """What is peculiar to each run, as on the command line."""
    keys = differing(runs)[:_SETTINGS]
    titles = short_names(differing(runs))
    columns = [[f"{titles[key]}={value_text(value)}" for value in column(runs, key)] for key in keys]
    texts = [[text if len(text) <= 60 else f"{text[:59]}…" for text in each] for each in columns]
    return {run: " ".join(each[number] for each in texts) for number, run in enumerate(runs)}


def _results(section: _Section, place: int, numbers: dict[Run, int], several: bool) -> str:
    """Table, curves and plots of one metric."""
    parts = [f"<section><h2>{_heading(section, several)}</h2>", results_table(section.runs, section.metric, numbers)]
    figures = [
        _figure(section, place, kind, label)
        for kind, label in (("val", f"validation {section.metric}"), ("loss", "training loss"))
        if any(kind in curves for curves in section.curves.values())
    ]
    if figures:
        buttons = [
            f'<button type="button" data-run="{numbers[run]}" aria-pressed="false"><span class="swatch"></span>'
            f"{escape(run.name)}</button>"
            for run in section.runs
            if section.curves[run]
        ]
        static = [_image(data_uri(content), name) for name, content in section.plots.items() if _is_curves(name)]
        parts.append(
            "<h3>Learning curves <small>point at one to read it, click it or a row to pick runs</small></h3>\n"
            f'<div class="charts">{"".join(figures)}</div>\n<div class="legend">{"".join(buttons)}'
            f'<button type="button" class="clear" hidden>pick none</button></div><noscript>{"".join(static)}</noscript>'
        )
    drawn = [_zoomable(data_uri(content), name) for name, content in section.plots.items() if not _is_curves(name)]
    if drawn:
        parts.append(f'<h3>{escape(section.metric or "")} by setting</h3>\n<div class="plots">{"".join(drawn)}</div>')
    return "\n".join([*parts, "</section>"])


def _heading(section: _Section, several: bool) -> str:
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


def _figure(section: _Section, place: int, kind: str, label: str) -> str:
    """Where the script draws the curves of one kind."""
    missing = sum(kind not in curves for curves in section.curves.values())
    note = f" ({missing} of {len(section.runs)} runs have none)" if missing else ""
    return (
        f'<figure class="chart" data-group="{place}" data-kind="{kind}"><figcaption><span><b>{escape(label)}</b>{note}'
        '</span><label><input type="checkbox"> log scale</label></figcaption><svg role="img"></svg></figure>'
    )


def _data(sections: Sequence[_Section], numbers: dict[Run, int]) -> dict[str, Any]:
    """What the script draws from."""
    drawn: list[dict[str, Any]] = []
    for section in sections:
        settings = _settings(section.runs)
        for place, run in enumerate(section.runs):
            score = f"{section.metric} {number_text(run.metric)}" if run.metric is not None else run.status
            note = f"{score}; {settings[run]}".rstrip("; ")
            entry: dict[str, Any] = {"id": numbers[run], "name": run.name, "note": note, "place": place}
            entry["failed"] = run.metric is None
            for kind, curve in section.curves[run].items():
                steps, values = thinned(curve, _POINTS)
                entry[kind] = [steps, [float(f"{value:.5g}") for value in values]]
            drawn.append(entry)
    return {"strong": _STRONG, "groups": [[numbers[run] for run in each.runs] for each in sections], "runs": drawn}


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
            image = _zoomable(data_uri(picture.content, picture.kind), picture.name, run.name, picture)
            parts.append(f"<figure>{image}<figcaption>{escape(picture.name)}</figcaption></figure>")
        parts.append("</div>")
    return "\n".join([*parts, "</section>"])


def _image(uri: str, alt: str, size: Thumbnail | None = None) -> str:
    place = f' width="{size.width}" height="{size.height}"' if size is not None else ""
    return f'<img src="{uri}" alt="{escape(alt)}" loading="lazy"{place}>'


def _zoomable(uri: str, name: str, run: str = "", size: Thumbnail | None = None) -> str:
    return f'<button type="button" class="zoom">{_image(uri, f"{run}: {name}" if run else name, size)}</button>'


def _is_curves(name: str) -> bool:
    """Whether a plot is the one that the script draws better."""
    return name.endswith("_curves.png")


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
