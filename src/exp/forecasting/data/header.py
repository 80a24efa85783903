"""Rows of a CSV file with line numbers, and checks of its first row. Imports neither torch nor pandas."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from itertools import islice
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Sequence

from exp.data.places import shortened
from exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from exp.forecasting.config import ForecastingDataConfig

__all__ = ["Header", "layout", "numbered_rows", "read_header"]

_SAVE = "save it as comma-separated UTF-8, plain or with a name that ends in .gz"
_TIME = re.compile(r"date|time|datum|zeit|heure|fecha|^(ds|dt|ts)$", re.IGNORECASE)


class Header(NamedTuple):
    """The first row of a file.

    Attributes:
        path: of the file.
        begin: number of lines before the first row of numbers.
        names: of all columns, without blanks at their ends; ``0``, ``1``, ... if the file has no header.
        date: position of the column of dates; None: there is none.
    """

    path: Path
    begin: int
    names: list[str]
    date: int | None

    @property
    def series(self) -> list[str]:
        """Names of the columns that are not dates."""
        return [name for index, name in enumerate(self.names) if index != self.date]

    def place(self, row: int, column: int) -> str:
        """``<path> row 7, column load: '3.5'``: a cell by its row and column, which count from 0."""
        rows = (each for each in numbered_rows(self.path) if each[0] > self.begin)
        line, cells = next(islice(rows, row, None))
        name = self.names[column] if self.begin else str(column + 1)
        return f"{self.path} row {line}, column {name}: {cells[column]!r}"


def numbered_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number (from 1) and cells of every row; slower than pandas, but errors name the line.

    Blank lines are skipped, except below the first row of a file with one column, where they are empty cells.

    Raises:
        DataError: the file cannot be read, is not UTF-8 text, has a misplaced quote, or a row is longer or shorter than
            the first one.
    """
    line, width = 0, 0
    text: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    try:
        with gzip.open(path, "rt", **text) if path.suffix == ".gz" else path.open(**text) as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                begin, line = line + 1, reader.line_num
                whole = "".join(cells)
                if re.search("[\udc80-\udcff\0]", whole):
                    raise DataError(f"{path} row {begin} is not UTF-8 text; {_SAVE}")
                if not whole.strip() and len(cells) < 2:
                    if width != 1:
                        continue
                    cells = [""]
                width = width or len(cells)
                if len(cells) != width:
                    raise DataError(
                        f"{path} row {begin}, column {min(len(cells), width) + 1}: the row has {len(cells)} cells, but "
                        f"the first row has {width}; every row needs one cell per column"
                    )
                yield begin, cells
    except csv.Error as error:
        raise DataError(
            f"{path} row {line + 1} is not comma-separated text ({error}): write every cell as a plain number, name or "
            f"date, close every quote, and {_SAVE}"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; check its permissions, or copy it anew") from error


def read_header(path: Path, config: ForecastingDataConfig) -> Header:
    """Read the first row of a CSV file.

    Args:
        path: of the file.
        config: ``header`` and ``date_column`` are read.

    Raises:
        DataError: the file is empty, or its first row is not what the configuration says: a column without a name, a
            name twice, no column of dates, text instead of numbers, or another separator than the comma.
    """
    line, first = next(numbered_rows(path), (0, []))
    if not first:
        raise DataError(f"{path} is empty; expected: {layout(config)}")
    if len(first) == 1:
        _check_separator(path, first)
    if config.header:
        names = [cell.strip() for cell in first]
        _check_names(path, names)
        return Header(
            path, line, names, None if config.date_column is None else _date_index(path, names, config.date_column)
        )
    if first[0].strip() and not _is_number(first[0]):
        _check_separator(path, first)
        raise DataError(
            f"{path} row 1, column 1: {first[0]!r} is not a number; for a file with a header and dates, set "
            "data.header=true"
        )
    return Header(path, line - 1, [str(index) for index in range(len(first))], None)


def layout(config: ForecastingDataConfig) -> str:
    """A description of the expected file, for messages."""
    if str(config.file).endswith(".npz"):
        return "an archive of numpy with an array `data`: (rows, series) or (rows, series, measures), oldest row first"
    if config.header:
        return "comma-separated; header `date,<series>,<series>,...`; then one row per time step, oldest first"
    return "comma-separated numbers, one row per time step, oldest first; no header, no dates; plain or .gz"


def _check_separator(path: Path, first: Sequence[str]) -> None:
    line = ",".join(first)
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if line.count(separator) >= len(first):
            raise DataError(
                f"{path} row 1: its cells are separated by {name}; write the file with commas between cells and points "
                "in numbers, such as 2016-07-01 00:00:00,5.82"
            )


def _check_names(path: Path, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        place = f"{path} row 1, column {number + 1}:"
        if not name or name.startswith("Unnamed: "):  # pandas writes this for a missing name
            raise DataError(
                f"{place} the column has no name (of row numbers, perhaps, or a comma at the end of every line); name "
                "it, or remove it"
            )
        if name in names[:number]:
            raise DataError(f"{place} {name!r} is the name of another column, too; give every column a name of its own")


def _date_index(path: Path, names: Sequence[str], wanted: str) -> int:
    alike = [index for index, name in enumerate(names) if name.lower() == wanted.lower()]
    if wanted in names:
        return names.index(wanted)
    if len(alike) == 1:
        return alike[0]
    _check_separator(path, names)
    problem = f"{path} row 1: no column `{wanted}`: the header is {shortened(names)}"
    if all(_is_number(name) for name in names):
        raise DataError(f"{problem}; for a file of numbers only, set data.header=false")
    times = [name if re.fullmatch(r"[\w./-]+", name) else f"'\"{name}\"'" for name in names if _TIME.search(name)]
    hint = " or ".join(f"data.date_column={name}" for name in times[:3])
    raise DataError(f"{problem}; set {hint or 'data.date_column to its name, or to null where there is none'}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
