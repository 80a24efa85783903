"""Tables for people, with cells of plain text: terminal, HTML, LaTeX and Markdown, each with its escapes."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from exp.console import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, JustifyMethod


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    # After the row end "\\", LaTeX would read these two as its arguments.
    "[": "{[}", "*": "{*}", **{sign: f"\\{sign}" for sign in "{}$&#_%"},
}  # fmt: skip
_NUMBER = re.compile(r"(-|[-+]?\d[\d.,e+-]*( ± \S+)?( \(\d+( of \d+)?\))?( [KMG]?i?B)?)?")
"""Cells of a numeric column: ``12``, ``0.41 ± 0.02 (2 of 3)``, ``33 MiB``, ``-``, or empty."""
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&$])")


class Table(NamedTuple):
    """A table for people.

    Attributes:
        heads: titles of the columns.
        rows: cells, row by row.
        numbers: for each column whether it is numeric; numeric columns are right-aligned.
        notes: notes below the table, each a sentence without a period.
        styles: style of each row: ``best``, ``failed``, ``other``, a style of rich, or empty text. An empty sequence:
            no styles.
        bold: of each row the heads of the columns whose cells are bold on paper. An empty sequence: none.
    """

    heads: list[str]
    rows: list[list[str]]
    numbers: list[bool]
    notes: Sequence[str] = ()
    styles: Sequence[str] = ()
    bold: Sequence[Sequence[str]] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, Any]],
        styles: Sequence[str] = (),
        notes: Sequence[str] = (),
        bold: Sequence[Sequence[str]] = (),
    ) -> Table:
        """Make a table of dicts with the same keys; empty columns are left out."""
        columns = {head: ["" if row[head] is None else format_value(row[head]) for row in rows] for head in rows[0]}
        columns = {head: cells for head, cells in columns.items() if any(cells)}
        numbers = [all(map(_NUMBER.fullmatch, cells)) for cells in columns.values()]
        return cls(list(columns), [list(row) for row in zip(*columns.values())], numbers, notes, styles, bold)

    def emphasis(self) -> list[list[bool]]:
        """For each cell whether it is bold."""
        return [[head in heads for head in self.heads] for heads in self.bold or [()] * len(self.rows)]


def as_rich(table: Table) -> ConsoleRenderable:
    """The table for the terminal, with the notes below.

    A number stays in one line; titles and text that are too wide continue in further lines. If that is not enough,
    columns in the middle, which have the keys of runs, are left out, and named.
    """
    return _Fitted(table)


class _Fitted:
    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[ConsoleRenderable]:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table, styles = self.table, {"best": "bold green", "failed": "red", "other": "dim"}
        columns = _columns_that_fit(table, options.max_width)
        rich_table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, caption_justify="left")
        for column in columns:
            # As Text, because rich would read brackets in a name as markup.
            number, head = table.numbers[column], "\n".join(_head_lines(table, column))
            justify: JustifyMethod = "right" if number else "left"
            rich_table.add_column(Text(printable(head)), justify=justify, overflow="fold", no_wrap=number)
        for style, row in zip(table.styles or [""] * len(table.rows), table.rows):
            rich_table.add_row(*(Text(printable(row[column])) for column in columns), style=styles.get(style, style))
        left_out = ", ".join(head for column, head in enumerate(table.heads) if column not in columns)
        notes = [*table.notes, *([f"no room for {left_out}"] if left_out else [])]
        rich_table.caption = Text(printable("\n".join(notes))) if notes else None
        yield rich_table


_GAP = 3  # characters between two columns
_NARROW = 12  # characters; text in further lines is readable from this width on


def _columns_that_fit(table: Table, width: int) -> list[int]:
    """The columns that have room: the first two, then from the right, where results are."""
    columns: list[int] = []
    used = -_GAP
    for column in [*range(len(table.heads))[:2], *reversed(range(2, len(table.heads)))]:
        cells = [*_head_lines(table, column), *(row[column] for row in table.rows)]
        needed = max(map(len, cells)) + _GAP
        needed = needed if table.numbers[column] else min(needed, _NARROW + _GAP)
        if used + needed <= width or not columns:
            columns.append(column)
            used += needed
    return sorted(columns)


def _head_lines(table: Table, column: int) -> list[str]:
    """A column's title, in lines as wide as its cells where it has underscores or spaces to end them."""
    width = max((len(row[column]) for row in table.rows), default=0)
    lines: list[str] = []
    for part in re.findall(r"[^_ ]+[_ ]*|[_ ]+", table.heads[column]):
        if lines and len(lines[-1]) + len(part.rstrip()) <= width:
            lines[-1] += part
        else:
            lines.append(part)
    return [line.rstrip() for line in lines] or [""]


def as_html(table: Table, classes: str, links: Mapping[str, str] = MappingProxyType({})) -> str:
    """The table as HTML, without its notes; ``links`` has the addresses of names in the column ``run``."""

    def line(tag: str, cells: Sequence[str], bold: Sequence[bool] = ()) -> str:
        texts = [f"<b>{escape(cell)}</b>" if is_bold else escape(cell)
                 for cell, is_bold in zip(cells, bold or [False] * len(cells))]  # fmt: skip
        for column, cell in enumerate(cells):
            if table.heads[column] == "run" and cell in links:
                texts[column] = f'<a href="{escape(links[cell])}">{texts[column]}</a>'
        return "".join(f"<{tag}{' class=n' * number}>{text}</{tag}>" for number, text in zip(table.numbers, texts))

    rows = zip(table.styles or [""] * len(table.rows), table.rows, table.emphasis())
    body = "\n".join(f'<tr class="{style}">{line("td", row, bold)}</tr>' for style, row, bold in rows)
    head = f"<thead><tr>{line('th', table.heads)}</tr></thead>"
    return f'<div class="scroll"><table class="{classes}">{head}\n<tbody>{body}</tbody></table></div>'


def as_markdown(tables: Sequence[Table]) -> str:
    """The tables in GitHub's Markdown, each with its notes below it."""
    parts = []
    for table in tables:
        lines = [[_in_markdown(cell) for cell in row] for row in [table.heads, *table.rows]]
        for line, bold in zip(lines[1:], table.emphasis()):
            line[:] = [f"**{cell}**" if is_bold else cell for cell, is_bold in zip(line, bold)]
        lines.insert(1, ["---:" if number else "---" for number in table.numbers])
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts += ["\n".join(f"- {_in_markdown(note)}" for note in table.notes)] if table.notes else []
    return "\n\n".join(parts) + "\n"


def as_latex(tables: Sequence[Table]) -> str:
    """Each table as a booktabs ``tabular``, to be put into a ``table`` environment with a caption.

    Text is escaped. Notes, which the caption should mention, are LaTeX comments.
    """
    lines = ["% Needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}."]
    for table in tables:
        lines += [f"% {note}." for note in table.notes]
        kinds = "".join("r" if number else "l" for number in table.numbers)
        lines += [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", _in_latex(table.heads), r"\midrule"]
        lines += [_in_latex(row, kinds, bold) for row, bold in zip(table.rows, table.emphasis())]
        lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _in_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _in_latex(cells: Sequence[str], kinds: str = "", bold: Sequence[bool] = ()) -> str:
    """A row in LaTeX; numbers are in math mode, for correct minus signs and powers of ten."""
    parts = []
    for kind, cell, is_bold in zip(kinds or "l" * len(cells), cells, bold or [False] * len(cells)):
        value, bracket, rest = cell.partition(" (")
        if kind == "r" and re.search(r"\d", value):
            value = re.sub(r"e(-?)\+?0*(\d+)", r" \\times 10^{\1\2}", value).replace("±", r"\pm")
            parts.append(f"${f'{chr(92)}mathbf{{{value}}}' if is_bold else value}${bracket}{rest}")
        else:
            parts.append("".join(_LATEX.get(letter, letter) for letter in " ".join(cell.split())))
    return " & ".join(parts).strip() + r" \\"


def format_value(value: Any) -> str:
    """A config value as text, as on the command line; floats have six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, (bool, list, tuple, dict)):
        return json.dumps(value, default=str)
    return str(value)


def count_words(words: Iterable[str]) -> str:
    """Counts of equal words, in order of their first occurrence: ``2 failed, 1 unfinished``."""
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())
