"""Reports on any set of run folders: tables and one HTML page. Imports no torch, so it runs on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from pathlib import Path

    from exp.report.runs import Run

__all__ = ["write_report"]


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
