"""The table that a paper prints as LaTeX, as Markdown and for the terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Sequence

from exp.report.seeds import mean_text, with_decimals_of

if TYPE_CHECKING:
    from rich.table import Table

    from exp.report.paper import Figure, PaperRow, PaperTable

__all__ = ["as_latex", "as_markdown", "as_rich", "cells_of", "heads_of"]

_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    # Behind the end of a row these two would belong to it.
    "[": "{[}", "*": "{*}", **{sign: f"\\{sign}" for sign in "{}$&#_%"},
}  # fmt: skip
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&$])")


def heads_of(table: PaperTable) -> list[str]:
    """The titles of all columns, as one line of them."""
    heads = list(table.keys)
    for name in table.metrics:
        heads += [f"{name}, ours", "published", "difference"] if name in table.published else [name]
    return heads


def cells_of(table: PaperTable, row: PaperRow) -> list[str]:
    """A row as plain text, a cell for each of :func:`heads_of`."""
    cells = list(row.labels)
    for name in table.metrics:
        figure = row.figures[name]
        cells.append(mean_text(figure.ours) + (f" ({row.n})" if table.averaged else ""))
        if name in table.published:
            cells += [table.published_text(row, name), _difference(figure)]
    return cells


def as_markdown(tables: Sequence[PaperTable]) -> str:
    """GitHub's Markdown: the tables, each with its notes below it."""
    parts = []
    for table in tables:
        lines = [heads_of(table), ["---"] * len(table.keys)]
        lines[1] += ["---:"] * (len(lines[0]) - len(table.keys))
        lines[0] = [_in_markdown(text) for text in lines[0]]
        lines += [[_in_markdown(text) for text in cells_of(table, row)] for row in table.rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts.append("\n".join(f"- {_in_markdown(note)}" for note in table.notes))
    return "\n\n".join(parts) + "\n"


def as_latex(tables: Sequence[PaperTable]) -> str:
    """Each table as a ``tabular`` of booktabs, to be put into a ``table`` that has a caption of the user's own.

    Names are escaped; what a caption should say stands in comments.
    """
    parts = ["% Needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}."]
    for table in tables:
        parts += [f"% {note}." for note in table.notes]
        parts.append(_tabular(table))
    return "\n".join(parts) + "\n"


def as_rich(table: PaperTable) -> Table:
    """For the terminal; the notes are for whoever prints it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, caption_justify="left")
    for number, head in enumerate(heads_of(table)):
        # As Text: a name may hold brackets, which rich would take for markup.
        drawn.add_column(Text(head), justify="left" if number < len(table.keys) else "right")
    for number, row in enumerate(table.rows):
        if table.begins_block(number):
            drawn.add_section()
        drawn.add_row(*map(Text, cells_of(table, row)))
    return drawn


def _tabular(table: PaperTable) -> str:
    wide = bool(table.published)
    names = [(name, 3 if name in table.published else 1) for name in table.metrics]
    columns = "l" * len(table.keys) + "r" * sum(width for _, width in names)
    heads = [_in_latex(key) for key in table.keys]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    if wide:
        above, rules, place = [""] * len(heads), [], len(heads) + 1
        for name, width in names:
            above.append(rf"\multicolumn{{{width}}}{{c}}{{{_in_latex(name)}}}")
            rules.append(rf"\cmidrule(lr){{{place}-{place + width - 1}}}")
            place += width
            heads += ["ours", "published", "difference"][:width]
        lines += [_line(above), " ".join(rules)]
    else:
        heads += [_in_latex(name) for name, _ in names]
    lines += [_line(heads), r"\midrule"]
    for number, row in enumerate(table.rows):
        if table.begins_block(number):
            lines.append(r"\midrule")
        cells = [_in_latex(label) for label in row.labels]
        for name, width in names:
            figure = row.figures[name]
            ours = _as_formula(mean_text(figure.ours)) + (f" ({row.n})" if table.averaged else "")
            cells += [ours, _as_formula(table.published_text(row, name)), _as_formula(_difference(figure))][:width]
        lines.append(_line(cells))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells).strip() + r" \\"


def _difference(figure: Figure) -> str:
    if figure.difference is None or figure.ours is None:
        return ""
    text = with_decimals_of(figure.ours.value, figure.difference)
    return text if text.startswith("-") else f"+{text}"


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def _in_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _as_formula(text: str) -> str:
    """Numbers as TeX sets them: with real minus signs, and powers of ten."""
    if not re.search(r"\d", text):
        return text
    text = re.sub(r"e([+-])0*(\d+)", lambda found: rf" \times 10^{{{found[1].strip('+')}{found[2]}}}", text)
    return f"${text.replace('±', chr(92) + 'pm')}$"
