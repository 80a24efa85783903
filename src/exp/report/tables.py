"""Tables for people: the results of runs, and what a paper prints of them; for terminal, page, LaTeX and Markdown.

A table is columns of plain text; each format escapes it in its own way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from exp.report.groups import Group, greater_is_better, in_order, mean_text, rankings, with_decimals_of
from exp.report.keys import apart, by_size, column, differing, is_seed, short_names, value_text
from exp.report.rows import JSON_ONLY, run_rows
from exp.report.runs import is_number

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from exp.report.runs import Run

__all__ = [
    "Column",
    "Table",
    "as_html",
    "as_latex",
    "as_markdown",
    "as_rich",
    "paper_tables",
    "run_table",
    "sweep_table",
]

_WIDTH = 100  # characters of a terminal
_OUTCOME = 12  # of them for the last column, at least
_GAP = 3  # between columns
_ROWS = 40
_HEADINGS = ("run", "runs", "validation", "n", "seconds")
_DATA = "data.name"
_AVERAGED = "mean ± sample standard deviation (n - 1) over n seeds"
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    # Behind the end of a row these two would belong to it.
    "[": "{[}", "*": "{*}", **{sign: f"\\{sign}" for sign in "{}$&#_%"},
}  # fmt: skip
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&$])")


class Column(NamedTuple):
    """One column, with a cell for each row."""

    title: str
    cells: list[str]
    is_number: bool = True
    """Numbers stand at the right."""


@dataclass
class Table:
    """Columns of equal length.

    Attributes:
        columns: at least one.
        notes: what a reader has to know, each a sentence without its full stop.
        styles: of each row: ``best``, ``failed``, ``other`` or nothing. Empty: all alike.
        published: whether there are published figures.
        averaged: whether there are means over seeds.
    """

    columns: list[Column]
    notes: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    published: bool = False
    averaged: bool = False

    @property
    def heads(self) -> list[str]:
        """The titles of the columns."""
        return [each.title for each in self.columns]

    @property
    def rows(self) -> list[list[str]]:
        """The cells, row by row."""
        return [list(row) for row in zip(*(each.cells for each in self.columns))]


def sweep_table(runs: Sequence[Run], most: int | None = None) -> Table:
    """What ``sweep.csv`` has, for a terminal of 100 columns, with what matters most.

    Runs that differ in nothing but the seed are one row, with mean, standard deviation and number of seeds. The best of
    each metric on validation has a star. Of many rows and of many keys the last are left out: the notes say which.

    Args:
        runs: any number.
        most: rows, the best first; None: as many as find room.
    """
    ranking = rankings(runs, over_seeds=True)
    metrics = [name for name in ranking if name is not None]
    averaged = any(len(group.runs) > 1 for each in ranking.values() for group in each)
    every = in_order(ranking)
    order = every[: most or _ROWS]
    stars = ["*" if rank == 1 and len(order) > 1 else "" for rank, _ in order]
    groups = [group for _, group in order]
    keys = [key for key in differing(runs) if not (averaged and is_seed(key))]
    headings = apart(metrics, _HEADINGS, "metrics.")
    titles = short_names(keys, {*_HEADINGS, *headings.values()})
    columns = [
        Column("", stars),
        Column("runs" if averaged else "run", [_clipped(each.names, 28) for each in groups], False),
    ]
    for key in keys:
        values = column([group.runs[0] for group in groups], key)
        texts = [_clipped(value_text(value), 24) for value in values]
        columns.append(Column(titles[key], texts, all(map(is_number, values))))
    if any(group.score for group in groups):
        columns.append(Column("validation", [mean_text(group.score) for group in groups]))
    columns += [Column(headings[name], [mean_text(group.mean(name)) for group in groups]) for name in metrics]
    columns += [Column("n", [group.n_text for group in groups])] if averaged else []
    outcomes = [_outcome(group) for group in groups]
    columns.append(Column("seconds", outcomes, not any(group.left_out for group in groups)))
    notes = _unit_notes(runs, metrics)
    hidden: list[str] = []
    while sum(_width(each) + _GAP for each in columns[:-1]) + min(_width(columns[-1]), _OUTCOME) > _WIDTH and keys:
        hidden.insert(0, columns.pop(1 + len(keys)).title)
        keys.pop()
    notes += [f"not shown: {', '.join(hidden)}"] if hidden else []
    notes += [_AVERAGED] if averaged else []
    notes += ["starred: the best on validation"] if any(stars) else []
    if most is None and len(order) < len(every):
        left = [run.status for run in runs if not any(run in group.runs for group in groups)]
        more = ", ".join(f"{left.count(status)} more {status}" for status in sorted(set(left)))
        notes.append(f"{more}; all {len(runs)} runs: sweep.csv")
    styles = ["best" if star else _style(group) for star, group in zip(stars, groups)]
    return Table(columns, notes, styles)


def run_table(runs: Sequence[Run]) -> Table:
    """What ``sweep.csv`` has of each run, the best first, for the page; without what no run has.

    Args:
        runs: at least one, all of one metric.
    """
    rows = run_rows(runs)
    columns = []
    for title in (name for name in rows[0] if name not in JSON_ONLY):
        values = [row[title] for row in rows]
        if title == "rank" or any(value is not None for value in values):
            texts = ["" if value is None else value_text(value) for value in values]
            columns.append(Column(title, texts, all(value is None or is_number(value) for value in values)))
    styles = {"completed": "", "failed": "failed"}
    looks = ["best" if row["rank"] == 1 and len(rows) > 1 else styles.get(row["status"], "other") for row in rows]
    return Table(columns, _unit_notes(runs, [name for run in runs for name in run.metrics]), looks)


def paper_tables(runs: Sequence[Run]) -> list[Table]:
    """What a paper prints: a row for each configuration, its mean over seeds beside the published figure.

    Args:
        runs: any number. Those that have no metric and are like none that has one are left out.

    Returns:
        A table for each metric by which runs are ranked, its rows sorted by the keys that they are told apart by.
    """
    return [_paper(groups, name) for name, groups in rankings(runs, over_seeds=True).items() if name is not None]


def as_rich(table: Table, width: int | None = None) -> RichTable:
    """For the terminal, with the notes below.

    Args:
        table: any.
        width: to which the last column is cut; None: cells are wrapped where the terminal ends.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    looks = {"best": "bold green", "failed": "red", "other": "dim"}
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, caption_justify="left")
    used = sum(_width(each) + _GAP for each in table.columns[:-1])
    for each in table.columns:
        # As Text: a name may hold brackets, which rich would take for markup.
        drawn.add_column(Text(each.title), justify="right" if each.is_number else "left", no_wrap=width is not None)
    drawn.columns[-1].max_width = None if width is None else max(width - used, _OUTCOME)
    for style, row in zip(table.styles or [""] * len(table.rows), table.rows):
        drawn.add_row(*map(Text, row), style=looks.get(style))
    drawn.caption = Text("\n".join(table.notes)) if table.notes else None
    return drawn


def as_html(table: Table, classes: str) -> str:
    """A table element; the notes are for whoever places it."""
    kinds = [" class=n" if each.is_number else "" for each in table.columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells))

    styles = table.styles or [""] * len(table.rows)
    body = "\n".join(f'<tr class="{style}">{line("td", row)}</tr>' for style, row in zip(styles, table.rows))
    head = f"<thead><tr>{line('th', table.heads)}</tr></thead>"
    return f'<div class="scroll"><table class="{classes}">{head}\n<tbody>{body}</tbody></table></div>'


def as_markdown(tables: Sequence[Table]) -> str:
    """GitHub's Markdown: the tables, each with its notes below it."""
    parts = []
    for table in tables:
        lines = [[_in_markdown(cell) for cell in row] for row in [table.heads, *table.rows]]
        lines.insert(1, ["---:" if each.is_number else "---" for each in table.columns])
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts.append("\n".join(f"- {_in_markdown(note)}" for note in table.notes))
    return "\n\n".join(parts) + "\n"


def as_latex(tables: Sequence[Table]) -> str:
    """Each table as a ``tabular`` of booktabs, to be put into a ``table`` that has a caption of the user's own.

    Names are escaped; what a caption should say stands in comments.
    """
    lines = ["% Needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}."]
    for table in tables:
        lines += [f"% {note}." for note in table.notes]
        kinds = "".join("r" if each.is_number else "l" for each in table.columns)
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


def _paper(groups: list[Group], metric: str) -> Table:
    runs = [run for group in groups for run in group.runs]
    measured = dict.fromkeys(name for run in runs for name in run.metrics)
    keys = _label_keys(runs)
    titles = short_names(keys, {metric, *measured})
    if _DATA in keys and "data" not in keys:
        titles[_DATA] = "data"
    firsts = [group.runs[0] for group in groups]
    values = {titles[key]: column(firsts, key) for key in keys}
    if len({value_text(row) for row in zip(*values.values())}) < len(groups):
        values = {"run": [group.names for group in groups], **values}  # nothing else tells them apart
    order = sorted(range(len(groups)), key=lambda row: [by_size(each[row]) for each in values.values()])
    groups = [groups[row] for row in order]
    labels = [Column(title, [value_text(each[row]) for row in order], False) for title, each in values.items()]
    averaged = any(len(group.runs) > 1 for group in groups)
    known = [_published(group) for group in groups]
    published = [name for name in measured if any(name in figures for figures, _ in known)]
    metrics = list(dict.fromkeys([metric, *published]))
    columns = list(labels)
    for name in metrics:
        means = [group.mean(name) for group in groups]
        counts = [f" ({group.n_text})" if averaged else "" for group in groups]
        texts = [f"{mean_text(mean) or '-'}{count}" for mean, count in zip(means, counts)]
        columns.append(Column(f"{name}, ours" if name in published else name, texts))
        if name in published:
            figures = [found.get(name) for found, _ in known]
            decimals = max(len(f"{each:g}".partition(".")[2]) for each in figures if each is not None)
            columns.append(Column("published", ["" if each is None else f"{each:.{decimals}f}" for each in figures]))
            differences = ["" if mean is None or each is None else _signed(mean.value, mean.value - each)
                           for mean, each in zip(means, figures)]  # fmt: skip
            columns.append(Column("difference", differences))
    notes = [*_unit_notes(runs, metrics), f"{metric}: {'larger' if greater_is_better(runs) else 'smaller'} is better"]
    notes += [_AVERAGED] if averaged else []
    left_out = {" ".join(row): group.left_out for row, group in zip(zip(*(each.cells for each in labels)), groups)}
    notes += [f"left out of the figures: {what}{' of ' if of else ''}{of}" for of, what in left_out.items() if what]
    notes += _sources(groups, known)
    return Table(columns, [" ".join(note.split()) for note in notes], [], bool(published), averaged)


def _label_keys(runs: Sequence[Run]) -> list[str]:
    """The keys that differ, besides the seed; and the data set, which a paper names also where there is only one.

    Where each experiment has data of its own, the data stand for the experiment.
    """
    keys = [key for key in differing(runs) if not is_seed(key)]
    data = column(runs, _DATA)
    if None in data or {"data", _DATA} & set(keys):
        return keys
    experiments = column(runs, "experiment")
    if "experiment" in keys and len(set(zip(experiments, data))) == len(set(experiments)) == len(set(data)):
        return [_DATA if key == "experiment" else key for key in keys]
    return [_DATA, *keys]


def _published(group: Group) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures that a paper has for what the runs of a group did, and all that the runs say of them."""
    said = [run.result.get("published") for run in group.counted]
    if not said or not isinstance(said[0], dict) or any(each != said[0] for each in said):
        return {}, {}
    figures = {name: value for name, value in said[0].items() if is_number(value)}
    return ({} if said[0].get("differs") else figures), said[0]


def _sources(groups: Sequence[Group], known: Sequence[tuple[dict[str, float], dict[str, Any]]]) -> list[str]:
    sources: dict[str, dict[str, None]] = {}
    for group, (figures, said) in zip(groups, known):
        if figures and said.get("source"):
            sources.setdefault(str(said["source"]), {})[str(group.counted[0].result.get("experiment"))] = None
    notes = []
    for source, experiments in sources.items():
        whose = f" ({', '.join(experiments)})" if len(sources) > 1 else ""  # baselines have papers of their own
        notes.append(f"published{whose}: {source}")
    if any(figures for figures, _ in known):
        notes.append("difference: ours - published")
    unlike = dict.fromkeys(", ".join(map(str, said["differs"])) for _, said in known if said.get("differs"))
    return notes + [f"published figures are of another experiment, and not shown, where {keys}" for keys in unlike]


def _signed(ours: float, difference: float) -> str:
    text = with_decimals_of(ours, difference)
    return text if text.startswith("-") else f"+{text}"


def _width(each: Column) -> int:
    return max(map(len, [each.title, *each.cells]))


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
            value = re.sub(r"e([+-])0*(\d+)", lambda each: rf" \times 10^{{{each[1].strip('+')}{each[2]}}}", value)
            found.append(f"${value.replace('±', chr(92) + 'pm')}${bracket}{rest}")
        else:
            found.append("".join(_LATEX.get(letter, letter) for letter in " ".join(cell.split())))
    return " & ".join(found).strip() + r" \\"
