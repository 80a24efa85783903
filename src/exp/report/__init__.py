"""Any set of run folders as tables and one HTML page. Imports no torch: it runs wherever the folders lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from pathlib import Path

    from exp.report.runs import Run

__all__ = ["write_report"]


def write_report(runs: Sequence[Run], folder: Path, title: str) -> Path:
    """Write tables and ``report.html`` into ``folder``.

    The tables: ``sweep.csv``, ``sweep.json`` and, where there are several seeds, ``sweep_seeds.csv``; and what a paper
    prints of them, ``results.tex`` and ``results.md``.

    Args:
        runs: at least one, as :func:`exp.report.runs.find_runs` gives them.
        folder: made where it does not exist.
        title: heads the page; may hold any characters.

    Returns:
        The path of the page, which needs none of the other files.

    Raises:
        OSError: the folder cannot be written.
    """
    from exp.report.page import write_page
    from exp.report.tables import as_latex, as_markdown, results_tables, write_rows
    from exp.runs.files import write_atomically

    write_rows(runs, folder)
    tables = results_tables(runs, paper=True)
    if tables:
        write_atomically(folder / "results.tex", as_latex(tables).encode("utf-8", "replace"))
        write_atomically(folder / "results.md", as_markdown(tables).encode("utf-8", "replace"))
    write_page(runs, folder / "report.html", title)
    return folder / "report.html"
