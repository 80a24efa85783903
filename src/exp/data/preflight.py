"""Where a data file lies, and whether it can be the right one: checked by the parent before any process starts.

Looks at the first line only, and imports neither torch nor pandas nor numpy.
"""

from __future__ import annotations

import csv
import glob
import gzip
import importlib.util
import os
import zlib
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from exp.data.splits import check_split
from exp.errors import DataError

__all__ = ["check_columns", "locate", "numbered_rows", "preflight"]

_TEXT: dict[str, Any] = {"encoding": "utf-8-sig", "newline": ""}
_LAYOUT_DATES = "comma-separated; header `date,<series>,<series>,...`; then one row per time step, oldest first"
_LAYOUT_NUMBERS = "comma-separated numbers, one row per time step, oldest first; no header, no dates; plain or .gz"


def preflight(config: Mapping[str, Any]) -> None:
    """Refuse a missing, unreadable or empty file, and one whose first line does not fit the configuration.

    Args:
        config: has the fields of :class:`exp.config.schema.ForecastingDataConfig`.

    Raises:
        DataError: the file is missing, unreadable or empty; its first line is not the expected header, or not numbers;
            the number of series is not ``channels``; there is no such split; or a number is out of range.
    """
    check_split(config["split"])
    for key, least in (("lookback", 1), ("horizon", 1), ("eval_batch_size", 1), ("num_workers", 0)):
        if config[key] < least:
            raise DataError(f"data.{key}={config[key]} must be at least {least}")
    path = locate(config["root"], config["file"], config["name"], config["header"])
    _, first = next(numbered_rows(path), (0, []))
    if not first:
        raise DataError(f"{path} is empty; expected: {_layout(config['header'])}")
    check_columns(path, first, config["header"], config["channels"])


def locate(root: str | os.PathLike[str] | None, file: str, name: str, header: bool = True) -> Path:
    """The file that a configuration means.

    Args:
        root: folder of the user's files; None: the sample data that come with exp.
        file: path below ``root``.
        name: of the data set, for messages.
        header: whether the file has a header and dates, for messages.

    Raises:
        DataError: it is not there; tells what is there instead.
    """
    folder = _sample_folder() if root is None else Path(root).expanduser().absolute()
    path = folder / file
    if os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises where a folder above may not be entered
        return path
    if root is None:
        what = f"data.root is not set, and {file} is not among the sample data of exp"
    else:
        what = f"data.file={file} (data set {name}) is not in data.root={folder}"
    lines = [
        f"{what}; set data.root to the folder that holds {Path(file).name}",
        f"  expected: <data.root>/{file}, {_layout(header)}",
        f"  {_content(folder)}",
    ]
    if root is not None:
        depth = len(Path(file).parts)
        deeper = sorted(found.parents[depth - 1] for found in folder.glob(f"*/{glob.escape(file)}"))
        lines += [f"  a level deeper there is one: data.root={found}" for found in deeper]
    raise DataError("\n".join(lines))


def check_columns(path: Path, first: Sequence[str], header: bool, channels: int | None) -> None:
    """Refuse a file whose first line does not fit.

    Args:
        path: for messages.
        first: the cells of the first line.
        header: whether they are to be ``date`` and the names of the series, else numbers.
        channels: number of series expected; None: any.

    Raises:
        DataError: they are not, or there are more or fewer series.
    """
    count = len(first) - 1 if header else len(first)
    if header and first[0].strip() != "date":
        hint = "; for a file of numbers only, set data.header=false" if _is_number(first[0]) else ""
        raise DataError(
            f"{path} row 1, column 1: no `date` column: the header begins with {first[0]!r}; "
            f"expected: {_LAYOUT_DATES}{hint}"
        )
    if not header and not _is_number(first[0]):
        raise DataError(
            f"{path} row 1, column 1: {first[0]!r} is not a number; for a file with a header and dates, "
            "set data.header=true"
        )
    if count == 0:
        raise DataError(f"{path} row 1: there is a `date` column, but no series; expected: {_LAYOUT_DATES}")
    if channels is not None and count != channels:
        names = f" ({_shortened(first[1:])})" if header else ""
        raise DataError(
            f"{path} row 1: has {count} series{names}, but data.channels={channels}; "
            f"set data.channels={count}, or take the right file"
        )


def numbered_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number (from 1) and cells of every line that is not blank; slower than pandas, but knows where it is.

    Raises:
        DataError: the file cannot be read, or is not UTF-8 text.
    """
    try:
        with gzip.open(path, "rt", **_TEXT) if path.suffix == ".gz" else path.open(**_TEXT) as file:
            reader = csv.reader(file)
            for cells in reader:
                if len(cells) > 1 or (cells and cells[0].strip()):
                    yield reader.line_num, cells
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); save it as comma-separated UTF-8") from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}; check its permissions, or copy it anew") from error


def _sample_folder() -> Path:
    spec = importlib.util.find_spec("exp.sample_data")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("the sample data of exp are not installed; install exp (pip install -e .), or set data.root")
    return Path(next(iter(spec.submodule_search_locations))) / "ett"


def _layout(header: bool) -> str:
    return _LAYOUT_DATES if header else _LAYOUT_NUMBERS


def _content(folder: Path) -> str:
    """``in <folder>: a.csv, b/``, or the nearest folder above that exists."""
    if not os.path.isdir(folder):  # noqa: PTH112 - as above
        nearest = next(parent for parent in folder.parents if os.path.isdir(parent))  # noqa: PTH112
        return f"{folder} is no folder; {_content(nearest)}"
    try:
        names = [entry.name + "/" * entry.is_dir() for entry in sorted(folder.iterdir())]
    except OSError as error:
        return f"in {folder}: {error.strerror}"
    return f"in {folder}: {_shortened(names) or 'nothing'}"


def _shortened(names: Sequence[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
