"""Any set of run folders as tables and one HTML page. Imports no torch: it runs wherever the folders lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from pathlib import Path

    from exp.compare.run import Run

__all__ = ["write_report"]


def write_report(runs: Sequence[Run], folder: Path, title: str) -> Path:
    """Write ``sweep.csv``, ``sweep.json`` and ``report.html`` into ``folder``.

    Args:
        runs: at least one, as :func:`exp.compare.runs.find_runs` gives them.
        folder: made where it does not exist.
        title: heads the page; may hold any characters.

    Returns:
        The path of the page, which needs none of the other files.

    Raises:
        OSError: the folder cannot be written.
    """
    from exp.compare.page import write_page
    from exp.compare.table import write_table

    write_table(runs, folder)
    page = folder / "report.html"
    write_page(runs, page, title)
    return page
