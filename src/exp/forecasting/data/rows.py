"""The rows of a CSV file with their line numbers, or which line is none. Imports neither torch nor pandas nor numpy."""

from __future__ import annotations

import csv
import gzip
import zlib
from typing import TYPE_CHECKING, Any, Iterator

from exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["numbered_rows"]

_TEXT: dict[str, Any] = {"encoding": "utf-8-sig", "newline": ""}
_SAVE = "save it as comma-separated UTF-8"
_OPEN_QUOTE = "a quote opens here that is not closed on this line; remove it, or close it"
_MAGIC = (
    (b"\xff\xfe", "UTF-16", ""),
    (b"\xfe\xff", "UTF-16", ""),
    (b"\x1f\x8b", "compressed by gzip", "let its name end in .gz"),
    (b"PK\3\4", "a zip archive or a workbook", ""),
    (b"PAR1\x15", "Parquet", ""),
    (b"ARROW1\0", "Arrow or Feather", ""),
    (b"\x89HDF\r\n", "HDF5", ""),
)


def numbered_rows(path: Path, header: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Line number (from 1) and cells of every row; slower than pandas, but knows where it is.

    A blank line is no row, but in a file of one column, where it is an empty cell: all but those at the end of the
    file, and before the header.

    Args:
        path: of the file.
        header: whether the first row has names.

    Raises:
        DataError: the file cannot be read, is not UTF-8 text, or has a quote that is not closed on its line.
    """
    line = 0  # lines that have been read whole
    width = None  # cells of the first row
    blank: list[int] = []  # lines that are rows if another one follows
    try:
        _refuse_binary(path)
        with gzip.open(path, "rt", **_TEXT) if path.suffix == ".gz" else path.open(**_TEXT) as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                if reader.line_num > line + 1:
                    # Numbers and dates have no line breaks; pandas blames the row in which the next quote stands.
                    column = next(index for index, cell in enumerate(cells, 1) if "\n" in cell or "\r" in cell)
                    raise DataError(f"{path} row {line + 1}, column {column}: {_OPEN_QUOTE}")
                line = reader.line_num
                if not cells or (len(cells) == 1 and cells[0].isspace()):
                    if width == 1 or (width is None and not header):
                        blank.append(line)
                    continue
                width = width or len(cells)
                if width == 1:
                    yield from ((number, [""]) for number in blank)
                blank.clear()
                yield line, cells
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error
    except csv.Error as error:
        open_quote = "end of data" in str(error) or "field limit" in str(error)
        problem = _OPEN_QUOTE if open_quote else f"{error}; write every cell as a plain number, name or date"
        raise DataError(f"{path} row {line + 1}: {problem}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; check its permissions, or copy it anew") from error


def _refuse_binary(path: Path) -> None:
    """Raise where the first bytes are those of a format that is no text."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        first = file.read(8)
    for begin, what, do in _MAGIC:
        if first.startswith(begin):
            raise DataError(f"{path} is not UTF-8 text: it is {what}; {do or _SAVE}")


def _not_utf8(path: Path, error: UnicodeDecodeError) -> DataError:
    """Which row is not text."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for row, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return DataError(f"{path} row {row} is not UTF-8 text ({error.reason}); {_SAVE}")
    return DataError(f"{path} is not UTF-8 text ({error.reason}); {_SAVE}")
