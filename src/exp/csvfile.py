"""CSV files for spreadsheets: what a file or a class is called is text there, and no formula."""

from __future__ import annotations

import csv
import io
from typing import Iterable

__all__ = ["as_text", "csv_content"]

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def as_text(cell: object) -> object:
    """A cell that a spreadsheet does not compute: with an apostrophe in front, where it would (OWASP, CSV injection).

    Numbers stay as they are, also as strings.
    """
    if not (isinstance(cell, str) and cell.startswith(_FORMULA)):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def csv_content(rows: Iterable[Iterable[object]]) -> bytes:
    """The content of a CSV file in UTF-8; lines end with a line feed.

    Args:
        rows: the titles first.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([as_text(cell) for cell in row] for row in rows)
    return text.getvalue().encode()
