"""Tables of runs: as CSV and JSON for programs; for people on the terminal, the page, in LaTeX and Markdown.

A table for people is columns of plain text; each format escapes it in its own way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp.report.groups import (
    as_counts,
    by_size,
    column,
    differing,
    greater_is_better,
    in_order,
    is_seed,
    mean_text,
    rankings,
    short_names,
    value_text,
)
from exp.report.runs import is_number
from exp.runs.files import csv_content, to_json, write_atomically
from exp.runs.folder import number_text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table as RichTable

    from exp.report.groups import Group, Mean
    from exp.report.runs import Run

__all__ = [
    "Table", "as_html", "as_latex", "as_markdown", "as_rich", "results_tables", "run_rows", "run_table",
    "seed_rows", "write_rows",
]  # fmt: skip

_LAST = ("steps", "wall_s", "samples_per_second")
_COLUMNS = {"rank", "run", "folder", "status", "selected_by", "metric_name", "metric", *_LAST, "error"}
_JSON_ONLY = ("folder", "folders", "metric_name", "metric", "metric_mean", "metric_std")
_ROWS, _KEYS = 40, 6  # of a table on the terminal
_DATA = "data.name"
_AVERAGED = "mean ± sample standard deviation (n - 1) over n seeds"
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    # Behind the end of a row these two would belong to it.
    "[": "{[}", "*": "{*}", **{sign: f"\\{sign}" for sign in "{}$&#_%"},
}  # fmt: skip
_NUMBER = re.compile(r"(-|[-+]?\d[\d.,e+-]*( ± \S+)?( \(\d+( of \d+)?\))?( [KMG]?i?B)?)?")
"""What a cell of a column of numbers may be: ``12``, ``0.41 ± 0.02 (2 of 3)``, ``33 MiB``, nothing."""
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&$])")


def write_rows(runs: Sequence[Run], folder: Path) -> None:
    """Write ``sweep.csv`` and ``sweep.json``: a row for each run, the best first.

    Columns: rank (among the runs of the same metric), run, every key that differs, status, ``selected_by`` (the metric
    on validation, which ranks), the metric under its own name as it is reported, all further metrics, steps, wall_s,
    samples_per_second and the first line of the error. What a run does not have is empty in the CSV and null in the
    JSON. The CSV has six digits, for reading; the JSON has all of them, and also the folder of each run,
    ``metric_name`` and ``metric``.

    A metric of which another of these columns has the name already is ``metrics.<name>`` (``metrics.error``), as it
    stands in ``result.json``; a key of the configuration is ``config.<key>`` then (``config.metric``).

    Where runs differ in nothing but the seed, ``sweep_seeds.csv`` has a row for each group of them
    (:func:`seed_rows`). It is a file of its own: among the rows of runs, a program would count
    means as further runs.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = run_rows(runs)
    content = to_json(rows, indent=2, default=str)  # YAML has dates, too
    write_atomically(folder / "sweep.json", f"{content}\n".encode())
    write_atomically(folder / "sweep.csv", _csv(rows))
    averages = folder / "sweep_seeds.csv"
    if any(len(group.runs) > 1 for groups in rankings(runs, over_seeds=True).values() for group in groups):
        write_atomically(averages, _csv(seed_rows(runs)))
    else:  # of an earlier report on other runs
        averages.unlink(missing_ok=True)


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What :func:`write_rows` writes, a dict for each run, the best first."""
    metrics, keys = _metric_titles(runs), differing(runs)
    return [
        {
            "rank": rank,
            "run": run.name,
            "folder": str(run.folder),
            **{_title("config", key): column([run], key)[0] for key in keys},
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
    the same for all metrics under the names of :func:`run_rows`. ``_std`` is the sample standard deviation (n - 1);
    None for a single seed.
    """
    metrics, keys = _metric_titles(runs), [key for key in differing(runs) if not is_seed(key)]
    rows = []
    for rank, group in in_order(rankings(runs, over_seeds=True)):
        row: dict[str, Any] = {"rank": rank, "runs": group.names, "folders": [str(run.folder) for run in group.runs]}
        row.update((_title("config", key), column(group.runs, key)[0]) for key in keys)
        row.update(n=group.n, left_out=group.left_out, metric_name=group.metric_name)
        means = {"selected_by": group.score, "metric": group.reported}
        means.update((title, group.mean(name)) for name, title in metrics.items())
        for title, mean in means.items():
            row[f"{title}_mean"], row[f"{title}_std"] = mean or (None, None)
        seconds = group.mean_of(lambda run: run.number("wall_s"))
        rows.append({**row, "wall_s_mean": seconds and seconds.value})
    return rows


def _csv(rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows as text, the titles first, without what only the JSON has."""
    names = [name for name in rows[0] if name not in _JSON_ONLY]
    return csv_content(
        [names, *(["" if row[name] is None else value_text(row[name]) for name in names] for row in rows)]
    )


def _metric_titles(runs: Sequence[Run]) -> dict[str, str]:
    """The titles of the metrics' columns by name, those that rank the runs first."""
    ranking = [name for name in rankings(runs, over_seeds=False) if name is not None]
    names = dict.fromkeys([*ranking, *(name for run in runs for name in run.metrics)])
    return {name: _title("metrics", name) for name in names}


def _title(kind: str, name: str) -> str:
    """The title of a metric's column (``metrics``) or of a key's (``config``), which no other column has."""
    return f"{kind}.{name}" if name in _COLUMNS else name


@dataclass
class Table:
    """What people read.

    Attributes:
        heads: titles of the columns.
        rows: cells.
        numbers: which columns are of numbers, and stand at the right.
        notes: what a reader has to know, each a sentence without its full stop.
        styles: of each row: ``best``, ``failed``, ``other``, a style of rich's, or nothing. Empty: all alike.
    """

    heads: list[str]
    rows: list[list[str]]
    numbers: list[bool]
    notes: Sequence[str] = ()
    styles: Sequence[str] = ()

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], styles: Sequence[str] = (), notes: Sequence[str] = ()) -> Table:
        """Rows of equal keys, without columns that are empty."""
        columns = {head: ["" if row[head] is None else value_text(row[head]) for row in rows] for head in rows[0]}
        columns = {head: cells for head, cells in columns.items() if any(cells)}
        numbers = [all(map(_NUMBER.fullmatch, cells)) for cells in columns.values()]
        return cls(list(columns), [list(row) for row in zip(*columns.values())], numbers, notes, styles)


def run_table(runs: Sequence[Run]) -> Table:
    """What ``sweep.csv`` has of each run, the best first, for the page; without what no run has.

    Args:
        runs: at least one, all of one metric.
    """
    rows = run_rows(runs)
    styles = {"completed": "", "failed": "failed"}
    looks = ["best" if row["rank"] == 1 and len(rows) > 1 else styles.get(row["status"], "other") for row in rows]
    shown = [{title: value for title, value in row.items() if title not in _JSON_ONLY} for row in rows]
    return Table.of(shown, looks, _unit_notes(runs, [name for run in runs for name in run.metrics]))


def results_tables(runs: Sequence[Run], paper: bool = False) -> list[Table]:
    """A row for each configuration, its mean over seeds beside the published figure; a table for each metric.

    The best first, with a star, its figure on validation, and what became of runs that do not count. Of many rows and
    of many keys the last are left out: the notes say which.

    Args:
        runs: any number.
        paper: what a paper prints: all rows and keys, sorted by these; no runs that have no metric, and no star.
    """
    ranking = rankings(runs, over_seeds=True)
    return [_results(groups, metric, paper) for metric, groups in ranking.items() if metric is not None or not paper]


def _results(groups: list[Group], metric: str | None, paper: bool) -> Table:
    runs = [run for group in groups for run in group.runs]
    averaged = any(len(group.runs) > 1 for group in groups)
    keys = [key for key in differing(runs) if not (is_seed(key) and (averaged or paper))]
    if paper and not ("data" in keys or None in column(runs, _DATA)):  # which a paper names also where there is one
        keys = list(dict.fromkeys([_DATA, *keys]))
    titles = {key: "data" if key == _DATA and "data" not in keys else title for key, title in short_names(keys).items()}
    values = {group.names: [column(group.runs, key)[0] for key in keys] for group in groups}
    best = groups[0] if len(groups) > 1 and groups[0].score and not paper else None
    if paper:
        groups = sorted(groups, key=lambda group: list(map(by_size, values[group.names])))
    most, width = (len(groups), 99) if paper else (_ROWS, 24)
    groups, left = groups[:most], [run for group in groups[most:] for run in group.runs]
    named = not paper or len(set(map(value_text, values.values()))) < len(groups)  # nothing else tells them apart
    known = {group.names: _published(group) for group in groups}
    figures = {name: {} if each.get("differs") else each for name, each in known.items()}
    measured = dict.fromkeys(name for run in runs for name in run.metrics)
    published = [name for name in measured if any(is_number(each.get(name)) for each in figures.values())]
    metrics = [name for name in dict.fromkeys([metric, *published]) if name is not None]
    rows = []
    for group in groups:
        row = {"": "*" if group is best else "", "runs" if averaged else "run": _clipped(group.names, 28) * named}
        for key, value in list(zip(keys, values[group.names]))[: None if paper else _KEYS]:
            row[titles[key] if titles[key] not in metrics else key] = _clipped(value_text(value), width)
        row["validation"] = "" if paper else mean_text(group.score)
        for name in metrics:
            mean, theirs = group.mean(name), figures[group.names].get(name)
            row[name] = f"{mean_text(mean) or '-'}{f' ({group.n_text})' * averaged}"
            if name in published:
                row[f"{name}, published"] = "" if theirs is None else f"{theirs:.{_decimals(figures, name)}f}"
                row[f"{name}, difference"] = _difference(mean, theirs)
        rows.append({**row, "seconds": "" if paper else _outcome(group)})
    notes = _unit_notes(runs, metrics)
    notes += [f"{metric}: {'larger' if greater_is_better(runs) else 'smaller'} is better"] * (metric is not None)
    notes += ["starred: the best on validation"] if best else []
    notes += [_AVERAGED] if averaged else []
    notes += [f"not shown: {', '.join(titles[key] for key in keys[_KEYS:])}"] if keys[_KEYS:] and not paper else []
    notes += [f"{as_counts(sorted(f'more {run.status}' for run in left))}: sweep.csv"] if left else []
    for group in groups if paper else ():
        what = " of ".join(filter(None, [group.left_out, " ".join(map(value_text, values[group.names]))]))
        notes += [f"left out of the figures: {what}"] if group.left_out else []
    notes += dict.fromkeys(f"published: {each['source']}" for each in figures.values() if each.get("source"))
    notes += ["difference: measured here - published"] if published else []
    unlike = dict.fromkeys(", ".join(map(str, each["differs"])) for each in known.values() if each.get("differs"))
    notes += [f"published figures are of another experiment, and not shown, where {each}" for each in unlike if paper]
    styles = [] if paper else ["best" if group is best else _style(group) for group in groups]
    return Table.of(rows, styles, [" ".join(note.split()) for note in notes])


def _decimals(figures: Mapping[str, Mapping[str, Any]], name: str) -> int:
    """Of a published metric, as many as any of its figures has."""
    return max(len(f"{each[name]:g}".partition(".")[2]) for each in figures.values() if is_number(each.get(name)))


def as_rich(table: Table) -> RichTable:
    """For the terminal, with the notes below; cells are cut where it ends."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    looks = {"best": "bold green", "failed": "red", "other": "dim"}
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, caption_justify="left")
    for place, (head, number) in enumerate(zip(table.heads, table.numbers), 1):
        # As Text: a name may hold brackets, which rich would take for markup. The last column gives way first.
        drawn.add_column(Text(head), justify="right" if number else "left", no_wrap=place < len(table.heads))
    for style, row in zip(table.styles or [""] * len(table.rows), table.rows):
        drawn.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row), style=looks.get(style, style))
    drawn.caption = Text("\n".join(table.notes)) if table.notes else None
    return drawn


def as_html(table: Table, classes: str) -> str:
    """A table element; the notes are for whoever places it."""

    def line(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(table.numbers, cells)
        return "".join(f"<{tag}{' class=n' * number}>{escape(cell)}</{tag}>" for number, cell in pairs)

    styles = table.styles or [""] * len(table.rows)
    body = "\n".join(f'<tr class="{style}">{line("td", row)}</tr>' for style, row in zip(styles, table.rows))
    head = f"<thead><tr>{line('th', table.heads)}</tr></thead>"
    return f'<div class="scroll"><table class="{classes}">{head}\n<tbody>{body}</tbody></table></div>'


def as_markdown(tables: Sequence[Table]) -> str:
    """GitHub's Markdown: the tables, each with its notes below it."""
    parts = []
    for table in tables:
        lines = [[_in_markdown(cell) for cell in row] for row in [table.heads, *table.rows]]
        lines.insert(1, ["---:" if number else "---" for number in table.numbers])
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts += ["\n".join(f"- {_in_markdown(note)}" for note in table.notes)] if table.notes else []
    return "\n\n".join(parts) + "\n"


def as_latex(tables: Sequence[Table]) -> str:
    """Each table as a ``tabular`` of booktabs, to be put into a ``table`` that has a caption of the user's own.

    Names are escaped; what a caption should say stands in comments.
    """
    lines = ["% Needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}."]
    for table in tables:
        lines += [f"% {note}." for note in table.notes]
        kinds = "".join("r" if number else "l" for number in table.numbers)
        lines += [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", _in_latex(table.heads), r"\midrule"]
        lines += [*(_in_latex(row, kinds) for row in table.rows), r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _outcome(group: Group) -> str:
    """How long the runs took, or what became of those that have not come to their end."""
    errors = [run.error for run in group.runs if run.error is not None]
    if group.left_out or errors:
        return ": ".join(filter(None, [group.left_out, *errors[:1]]))
    seconds = group.mean_of(lambda run: run.number("wall_s"))
    return "" if seconds is None else f"{seconds.value:,.0f}"


def _style(group: Group) -> str:
    if group.reported is None and any(run.status == "failed" for run in group.runs):
        return "failed"
    return "other" if group.left_out else ""


def _unit_notes(runs: Sequence[Run], metrics: Sequence[str]) -> list[str]:
    """What values the metrics are of, as far as the names do not say it and the runs agree."""
    units: dict[str, list[str]] = {}
    for name in dict.fromkeys(metrics):
        said: list[Any] = [run.result.get("metric_units") for run in runs]
        found = {str(each[name]) for each in said if isinstance(each, dict) and name in each}
        if len(found) == 1:
            units.setdefault(found.pop(), []).append(name)
    return [f"{', '.join(names)}: of {unit} values" for unit, names in units.items()]


def _published(group: Group) -> dict[str, Any]:
    """What the runs of a group say of published figures: by metric, ``source``, and ``differs``, from what they did."""
    said = group.counted[0].result.get("published") if group.counted else None
    return said if isinstance(said, dict) else {}


def _difference(ours: Mean | None, published: float | None) -> str:
    if ours is None or published is None:
        return ""
    text = number_text(ours.value - published, ours.value)
    return text if text.startswith("-") else f"+{text}"


def _clipped(text: str, width: int) -> str:
    """Names of runs differ at their ends more often than at their beginnings."""
    head = width // 3
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"


def _in_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _in_latex(cells: Sequence[str], kinds: str = "") -> str:
    """A row; numbers as TeX sets them, with real minus signs and powers of ten."""
    found = []
    for kind, cell in zip(kinds or "l" * len(cells), cells):
        value, bracket, rest = cell.partition(" (")
        if kind == "r" and re.search(r"\d", value):
            value = re.sub(r"e(-?)\+?0*(\d+)", r" \\times 10^{\1\2}", value).replace("±", r"\pm")
            found.append(f"${value}${bracket}{rest}")
        else:
            found.append("".join(_LATEX.get(letter, letter) for letter in " ".join(cell.split())))
    return " & ".join(found).strip() + r" \\"
