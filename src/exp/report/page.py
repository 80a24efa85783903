"""The report on several runs: tables, and one HTML page, a single file that loads nothing from the network.

Charts are drawn by ECharts from JSON options: ``charts.json`` has their style, this module writes their data, and
``page.js`` merges the two.
"""

from __future__ import annotations

import base64
import io
import os
import shlex
import time
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence
from urllib.parse import quote

from PIL import Image

from exp.console import format_metric
from exp.report.formats import as_html, as_latex, as_markdown, count_words
from exp.report.groups import (
    format_mean,
    greater_is_better,
    ranked,
    rankings,
    settings_of,
)
from exp.report.runs import is_number
from exp.report.tables import results_tables, run_table, verdicts, write_rows
from exp.runs.files import to_json, write_atomically

if TYPE_CHECKING:
    from exp.report.groups import Group
    from exp.report.runs import Run


_WIDTH, _PER_RUN, _RUNS = 960, 2, 40  # pixels of a picture, pictures per run, runs: keeps the page below 15 MB
_POINTS = 400  # maximum per curve
_BARS = 30  # maximum number of configurations in the bar chart


def write_report(runs: Sequence[Run], folder: Path, title: str) -> Path:
    """Write tables and ``report.html`` to ``folder``.

    The tables are ``sweep.csv``, ``sweep.json``, with several seeds also ``sweep_seeds.csv``, and tables for a paper,
    ``results.tex`` and ``results.md``.

    Args:
        runs: at least one run, from :func:`exp.report.runs.find_runs`.
        folder: output folder; created if needed.
        title: title of the page; any characters.

    Returns:
        Path of the page; it works without the other files.

    Raises:
        OSError: the folder cannot be written.
    """
    write_rows(runs, folder)
    paper = results_tables(runs, paper=True)
    if paper:
        write_atomically(folder / "results.tex", as_latex(paper).encode("utf-8", "replace"))
        write_atomically(folder / "results.md", as_markdown(paper).encode("utf-8", "replace"))
    ranking = rankings(runs, over_seeds=True)
    sections = [_results(metric, groups, folder) for metric, groups in ranking.items()]
    page = Template(_part("page.html")).substitute(
        title=escape(title),
        date=time.strftime("%Y-%m-%d %H:%M"),
        versions=escape("; ".join(dict.fromkeys(map(_versions, runs)))),
        commands=escape("\n".join(f"{run.name}: {_command(run)}" for run in runs)),
        summary=_summary(runs, ranking),
        css=_part("page.css"),
        library=_part("echarts/echarts.min.js"),
        script=_part("page.js"),
        # Not escaped: the file contains no "<" that could end the script element.
        styles=_part("charts.json"),
        body="\n".join([*sections, _album(runs)]),
    )
    # Folder names may have bytes that are not UTF-8.
    write_atomically(folder / "report.html", page.encode("utf-8", "replace"))
    return folder / "report.html"


def thumbnail(path: Path) -> str | None:
    """A picture as a ``data:`` URL, JPEG, at most 640 pixels wide; None: the file cannot be read."""
    buffer = io.BytesIO()
    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow raises these for damaged files
        return None
    picture.thumbnail((_WIDTH, max(picture.height, 1)))
    picture.save(buffer, format="jpeg", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _summary(runs: Sequence[Run], ranking: dict[str | None, list[Group]]) -> str:
    """HTML with the number of runs by status, and the best value of each metric."""
    states = count_words(sorted(run.status for run in runs))
    text = f"<b>{len(runs)} run{'s' if len(runs) != 1 else ''}</b>: {escape(states)}"
    for metric, groups in ranking.items():
        best = groups[0]
        if metric is None or best.reported is None or (len(groups) > 1 and best.score is None):
            continue  # without a validation metric, no group is the best
        which = f"best on validation is {escape(settings_of(groups)[0])} with " if len(groups) > 1 else ""
        text += f"; {which}<b>{escape(metric)} {format_mean(best.reported)}</b>"
    return text


def _results(metric: str | None, groups: Sequence[Group], folder: Path) -> str:
    """HTML section with the tables and charts of the runs of one metric."""
    runs = [run for group in groups for run in group.runs]
    charts = charts_of(groups, metric)
    more = [chart for chart in charts if chart.kind == "more"]
    parts = [f"<section><h2>{_heading(runs, metric)}</h2>"]
    texts = [] if metric is None else verdicts(groups)
    parts += ['<ul class="verdicts">', *(f"<li>{escape(text)}</li>" for text in texts), "</ul>"] if texts else []
    parts += [_figure(chart) for chart in charts if chart.kind == "bars"]
    for table in results_tables(runs, paper=True):
        if len(table.rows) < len(runs) or any("reference" in head for head in table.heads):
            parts += [as_html(table, "paper"), _note(table.notes)]
    parts += ['<div class="charts">', *(_figure(chart) for chart in charts if chart.kind == "curves"), "</div>"]
    if more:
        parts += [f"<details><summary>{escape(', '.join(chart.title for chart in more))}</summary>"]
        parts += ['<div class="charts">', *map(_figure, more), "</div></details>"]
    table, links = run_table(runs), {run.name: quote(os.path.relpath(run.folder, folder) + "/") for run in runs}
    return "\n".join([*parts, "<h3>Every run</h3>", as_html(table, "results", links), _note(table.notes), "</section>"])


def _heading(runs: Sequence[Run], metric: str | None) -> str:
    """Heading of a section: the metric, the splits, and whether larger is better."""
    if metric is None:
        return "Runs without a metric"
    parts = dict.fromkeys(str(run.result.get("measured_on") or "test") for run in runs if run.metric is not None)
    which = "larger is better" if greater_is_better(runs) else "smaller is better"
    return f"{escape(' on '.join(filter(None, [metric, ' and '.join(parts)])))} <small>{which}</small>"


def _figure(chart: Chart) -> str:
    option = escape(to_json({"kind": chart.kind, **chart.option}, separators=(",", ":")))
    return (
        f'<figure class="chart {chart.kind}"><figcaption>{escape(chart.title)}</figcaption>'
        f'<div class="plot" data-chart="{option}"></div></figure>'
    )


def _note(notes: Sequence[str]) -> str:
    return f'<p class="note">{escape("; ".join(notes))}.</p>' if notes else ""


def _album(runs: Sequence[Run]) -> str:
    """HTML section with pictures of the best 40 runs: of forecasts or maps, not of curves, which are charts above."""
    figures = []
    best_first = [group for _, group in ranked(rankings(runs, over_seeds=False))][:_RUNS]
    for run, settings in zip([group.runs[0] for group in best_first], settings_of(best_first)):
        for path in [path for path in run.pictures() if path.name != "curves.png"][:_PER_RUN]:
            name, address = escape(f"{run.name}: {path.relative_to(run.folder).as_posix()}"), thumbnail(path)
            about = "" if settings == run.name else f" ({escape(settings)})"
            button = f'<button type="button" class="zoom"><img src="{address}" alt="{name}" loading="lazy"></button>'
            figures += [f"<figure>{button}<figcaption>{name}{about}</figcaption></figure>"] if address else []
    heading = "<section><h2>Pictures <small>the best runs first; click one to enlarge it</small></h2>"
    return "\n".join([heading, '<div class="pictures">', *figures, "</div></section>"]) if figures else ""


def _versions(run: Run) -> str:
    """What a run was computed with, in one line."""
    revision, packages = str(run.env.get("git_revision") or "")[:8], run.env.get("packages") or {}
    versions = {
        "exp": run.env.get("exp"),
        "": revision,
        "Python": run.env.get("python"),
        "torch": packages.get("torch"),
    }
    devices = count_words(str(device.get("name")) for device in run.result.get("devices") or [])
    return ", ".join([*(f"{name} {version}".strip() for name, version in versions.items() if version), devices])


def _command(run: Run) -> str:
    """The command that repeats a run, in another folder."""
    words = [word for word in run.overrides if not word.startswith(("output_dir=", "overwrite=", "resume="))]
    return " ".join(["python -m exp", *map(shlex.quote, words)])


class Chart(NamedTuple):
    """One chart of the page.

    Attributes:
        title: title above the chart.
        kind: ``bars``, ``curves``, or ``more`` (curves in a collapsed section).
        option: option of ECharts, without the style of its kind, which is in ``charts.json``.
    """

    title: str
    kind: str
    option: dict[str, Any]


def charts_of(groups: Sequence[Group], metric: str | None) -> list[Chart]:
    """Charts of one metric: a bar chart of the configurations, and learning curves.

    Each of the eight best configurations has its own color, the same in all charts and for all seeds.

    Args:
        groups: groups over seeds, the best first.
        metric: name of the metric; None: the runs have no metric.
    """
    labels = settings_of(groups)
    return [*_bars(groups, labels, metric), *_curves(groups, labels, metric)]


def curves_of(run: Run) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """All curves in ``metrics.jsonl`` of a run, such as ``("val", "mse")``; values that are not finite are left out.

    Returns:
        By split (``train`` or ``val``) and name a list of points (optimizer step, value). ``("train", "loss")`` is the
        total loss.
    """
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for record in run.records():
        for name, value in record.items() if record["split"] in ("train", "val") else ():
            if name not in ("step", "epoch") and is_number(value):
                curves.setdefault((record["split"], name), []).append((record["step"], _rounded(value)))
    return curves


def downsample(points: list[tuple[float, float]], max_points: int) -> list[tuple[float, float]]:
    """Reduce a curve to about ``max_points``; keeps the minimum and maximum of each section, so no spike is lost."""
    if len(points) <= max_points:
        return points
    indices, length = {0, len(points) - 1}, -(-2 * len(points) // (max_points - 2))
    for start in range(0, len(points), length):
        stretch = range(start, min(start + length, len(points)))
        indices |= {extreme(stretch, key=lambda index: points[index][1]) for extreme in (min, max)}
    return [points[index] for index in sorted(indices)]


def _curves(groups: Sequence[Group], labels: Sequence[str], metric: str | None) -> list[Chart]:
    """Charts with one line per run: first the validation metric and the loss, then the others, collapsed."""
    histories = [[curves_of(run) for run in group.runs] for group in groups]
    main = [("val", str(metric)), ("train", "loss")]
    flat = {name for group in groups for run in group.runs for name in run.result.get("baselines") or {}}
    kinds = dict.fromkeys(kind for group in histories for curves in group for kind in curves if kind[1] not in flat)
    charts = []
    for kind in sorted(kinds, key=lambda kind: main.index(kind) if kind in main else len(main)):
        series = [
            {"type": "line", "name": label, "color_index": color_index, "data": downsample(curves[kind], _POINTS)}
            for color_index, (group, label) in enumerate(zip(histories, labels))
            for curves in group
            if kind in curves
        ]
        title = f"{'validation' if kind[0] == 'val' else 'training'} {kind[1]}"
        charts.append(Chart(title, "curves" if kind in main else "more", {"series": series}))
    return charts


def _bars(groups: Sequence[Group], labels: Sequence[str], metric: str | None) -> list[Chart]:
    """Each configuration: its mean, its standard deviation, and its runs as points; no chart for a single one."""
    if len(groups) < 2 or not any(group.reported for group in groups):
        return []
    has_scores = any(group.score for group in groups)
    measured = "selected_by" if has_scores else "metric"
    bars, points = [], []
    for color_index, (group, label) in enumerate(zip(groups[:_BARS], labels)):
        mean = group.mean(measured)
        box: list[Any] = ["-"] * 5
        if mean is not None:
            # A box plot with an empty box at the mean; its whiskers are mean - deviation and mean + deviation.
            low, high = mean.value - (mean.std or 0), mean.value + (mean.std or 0)
            box = [_rounded(value) for value in (low, mean.value, mean.value, mean.value, high)]
        bars.append({"value": box, "name": f"{label}: {format_mean(mean)}", "color_index": color_index})
        for run in group.runs:
            if measured in run.numbers:
                name = f"{run.name}: {format_metric(run.numbers[measured])}"
                value = [_rounded(run.numbers[measured]), color_index]
                points.append({"value": value, "name": name, "color_index": color_index})
    series = [{"type": "boxplot", "data": bars}, {"type": "scatter", "data": points}]
    option = {"yAxis": {"data": list(labels[:_BARS])}, "series": series}
    title = f"{metric} on validation" if has_scores else str(metric)
    title += ", mean ± standard deviation over seeds" if any(group.n > 1 for group in groups[:_BARS]) else ""
    title += f", the best {_BARS} of {len(labels)}" if len(labels) > _BARS else ""
    return [Chart(title, "bars", option)]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
