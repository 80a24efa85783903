"""What the first line of a CSV file must be. Imports neither torch nor pandas nor numpy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Sequence

from exp.data.places import shortened
from exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_columns", "expected", "layout", "long_table", "of_number", "shortened"]

_LAYOUT_DATES = "comma-separated; header `date,<series>,<series>,...`; then one row per time step, oldest first"
_LAYOUT_NUMBERS = "comma-separated numbers, one row per time step, oldest first; no header, no dates; plain or .gz"
_LONG = ("unique_id", "item_id")  # of Nixtla's libraries and of AutoGluon and GluonTS
_FEW = 8  # names that an example has
_TIME = re.compile(r"date|time|datum|zeit|heure|fecha|^(ds|dt|ts)$", re.IGNORECASE)


def check_columns(
    path: Path,
    first: Sequence[str],
    header: bool,
    channels: int | None,
    date_column: str | None = "date",
    new: bool = False,
) -> int | None:
    """Refuse a file whose first line does not fit.

    Args:
        path: for messages.
        first: the cells of the first line.
        header: whether they are to be names, else numbers.
        channels: number of series expected; None: any.
        date_column: name of the column of dates in the header; None: there is none.
        new: whether its rows are for weights that have been trained on ``channels`` series.

    Returns:
        The position of the column of dates; None: there is none.

    Raises:
        DataError: they are not; there is no such column; a name is missing or stands there twice; or there are more or
            fewer series.
    """
    dates = None
    if len(first) == 1 or any("\0" in cell for cell in first):
        _check_separator(path, first)
    if not header:
        if first[0].strip() and not _is_number(first[0]):
            _check_separator(path, first)
            raise DataError(
                f"{path} row 1, column 1: {first[0]!r} is not a number; for a file with a header and dates, "
                "set data.header=true"
            )
    else:
        # Before the number of series: a comma too many is no reason to set data.channels.
        _check_names(path, first)
        columns = [cell.strip() for cell in first]
        key = next((columns.index(name) for name in _LONG if name in columns), None)
        if key is not None and channels is not None:
            raise DataError(f"{path} row 1: {long_table(columns, key)}")
        if date_column is not None:
            dates = _date_index(path, first, date_column)
    count = len(first) - (dates is not None)
    if count == 0:
        raise DataError(f"{path} row 1: there is a `{first[0].strip()}` column, but no series; {expected(True)}")
    if channels is not None and count != channels:
        series = [cell.strip() if header else str(index) for index, cell in enumerate(first) if index != dates]
        names = f" ({shortened(series)})" if header else ""
        raise DataError(
            f"{path} row 1: has {count} series{names}, but data.channels={channels}; {of_number(series, channels, new)}"
        )
    return dates


def long_table(names: Sequence[str], key: int, dates: int | None = None) -> str:
    """What a long table is, and what to do about it.

    Args:
        names: of the columns.
        key: position of the column that names the series.
        dates: position of the column of dates; None: found by its name.
    """
    others = [name for index, name in enumerate(names) if index not in (key, dates)]
    times = [name for name in others if _TIME.search(name)]
    date = names[dates] if dates is not None else times[0] if times else "<date>"
    value = next((name for name in others if name != date), "<value>")
    return (
        f"this is a long table, whose rows are of the series that {names[key]} names; write a wide one, with a column "
        f"for each series: pandas' table.pivot(index={date!r}, columns={names[key]!r}, values={value!r})"
    )


def of_number(names: Sequence[str], channels: int, new: bool) -> str:
    """What to do about a file with another number of series.

    Args:
        names: of its series.
        channels: how many are expected.
        new: see :func:`check_columns`.
    """
    if not new:
        return f"set data.channels={len(names)}, or take the right file"
    if len(names) < channels:
        return "the weights need all that they were trained on; take the right file"
    few = ",".join(name if re.fullmatch(r"[\w./-]+", name) else f'"{name}"' for name in names[:channels])
    such = f"data.inputs=[{few}]" if channels <= _FEW else f"{channels} of them in data.inputs"
    such = f"'{such}'" if '"' in such else such
    return f"name those that the weights were trained on, in that order, such as {such}"


def _check_separator(path: Path, first: Sequence[str]) -> None:
    line = ",".join(first)
    if "\0" in line:
        raise DataError(f"{path} row 1 holds NUL bytes: it is UTF-16, perhaps; save it as comma-separated UTF-8")
    spaced = line.split()
    apart = len(spaced) > 1 and all(_is_number(cell) for cell in spaced)
    for separator, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars"), *([(" ", "spaces")] * apart)):
        if line.count(separator) >= len(first):
            raise DataError(
                f"{path} row 1: its cells are separated by {name}; write the file with commas between cells and points "
                "in numbers, such as 2016-07-01 00:00:00,5.82"
            )


def _check_names(path: Path, first: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for column, cell in enumerate(first, 1):
        name = cell.strip()
        if not name or name.startswith("Unnamed: "):  # what pandas makes of a missing name
            last = column == len(first) > 1 and not name
            why = "the line ends with a comma" if last else "of row numbers, perhaps"
            do = "remove the comma at the end of every line" if last else "name the column, or remove it"
            raise DataError(f"{path} row 1, column {column}: the column has no name ({why}); {do}")
        if name in seen:
            raise DataError(
                f"{path} row 1, column {column}: {name!r} is the name of column {seen[name]}, too; "
                "give every column a name of its own"
            )
        seen[name] = column


def _date_index(path: Path, first: Sequence[str], date_column: str) -> int:
    names = [cell.strip() for cell in first]
    wanted = date_column.strip()
    if wanted in names:
        return names.index(wanted)
    alike = [index for index, name in enumerate(names) if name.lower() == wanted.lower()]
    if len(alike) == 1:
        return alike[0]
    _check_separator(path, first)
    problem = f"{path} row 1: no column `{wanted}`: the header is {shortened(names)}"
    if all(_is_number(name) for name in names):
        raise DataError(f"{problem}; for a file of numbers only, set data.header=false")
    if all(_is_number(name) for name in names[1:]):
        raise DataError(f"{problem}, which looks like data; put the names of the columns above it; {expected(True)}")
    candidates = [name for name in names if _TIME.search(name)]
    hint = " or ".join(f"data.date_column={_quoted(name)}" for name in candidates[:3])
    raise DataError(
        f"{problem}; set {hint or 'data.date_column to the name of the column of dates'}"
        f"{'' if hint else ', or data.date_column=null where there is none'}"
    )


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w./-]+", name) else f"'\"{name}\"'"


def expected(header: bool) -> str:
    """What a file of this kind looks like, for the end of a message."""
    return f"expected: {layout(header)}"


def layout(header: bool) -> str:
    """The layout of a file with header and dates, or of numbers only."""
    return _LAYOUT_DATES if header else _LAYOUT_NUMBERS


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
