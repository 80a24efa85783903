"""Any set of run folders as tables and one HTML page. Imports no torch: it runs wherever the folders lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from pathlib import Path

    from exp.report.run import Run

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
    from exp.report.paper import paper_tables
    from exp.report.paper_formats import as_latex, as_markdown
    from exp.report.table import write_table
    from exp.runfolder import write_atomically

    write_table(runs, folder)
    tables = paper_tables(runs)
    for name, text in (("results.tex", as_latex(tables)), ("results.md", as_markdown(tables))) if tables else ():
        write_atomically(folder / name, text.encode("utf-8", "replace"))
    page = folder / "report.html"
    write_page(runs, page, title)
    return page
