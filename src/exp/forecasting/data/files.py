"""Find a data file, read its first row, and select its columns; in the parent, too, before any process starts.

Imports neither torch nor pandas nor numpy.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import os
import re
import zlib
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence, TextIO

from exp.data.fingerprint import folder_listing, sample_folder, shortened
from exp.errors import DataError, UnavailableError
from exp.forecasting.keys import SPLITS, ForecastingDataConfig
from exp.forecasting.keys import check_task as check_task  # the preflight module has it

if TYPE_CHECKING:
    import numpy as np


def preflight(data: Mapping[str, Any]) -> None:
    """Refuse keys out of range, a missing file, and a CSV file whose first row does not fit the keys.

    Args:
        data: ``config.data``.

    Raises:
        DataError: a value is out of range; or see :func:`find_file` and :func:`read_header`.
    """
    config = ForecastingDataConfig(**data)
    choices_of: dict[str, Sequence[Any]] = {
        "split": SPLITS, "missing": ("error", "mask"), "device_cache": (True, False, "auto"),
        "sampling": (None, "series"), "scaling": (None, "robust", "none"),
    }  # fmt: skip
    for key, choices in choices_of.items():
        value = getattr(config, key)
        if value not in choices:
            raise DataError(
                f"data.{key}={value} is not one of {', '.join(str(choice or 'null') for choice in choices)}"
            )
    for key, minimum in (("lookback", 1), ("horizon", 1), ("eval_batch_size", 1), ("num_workers", 0)):
        if getattr(config, key) < minimum:
            raise DataError(f"data.{key}={getattr(config, key)} must be at least {minimum}")
    if config.season is not None and config.season < 1:
        raise DataError(f"data.season={config.season} must be at least 1 (null: by the calendar of the dates)")
    if config.lower is not None and config.upper is not None and config.lower >= config.upper:
        raise DataError(f"data.lower={config.lower:g} must be below data.upper={config.upper:g}")
    _check_sizes(config)
    for key in ("static", "melt"):
        if getattr(config, key) and config.id_column is None:
            raise DataError(f"data.{key} needs data.id_column: it is for tables of many series (data=panel)")
    path = find_file(config)
    if path.suffix == ".parquet" and not find_spec("pyarrow"):
        raise UnavailableError(f"{path} needs pyarrow: pip install pyarrow, or write CSV")
    if path.suffix not in (".npz", ".parquet"):  # numpy and pyarrow are not imported here
        header = read_header(path, config)
        series = ["y"] if config.melt else [name for name in header.names if name not in (header.date, header.id)]
        select_columns(path, series, config)


def _check_sizes(config: ForecastingDataConfig) -> None:
    """Refuse contradictory keys of splits."""
    given = [[getattr(config, f"{split}_{kind}") for kind in ("size", "start")] for split in ("val", "test")]
    for split, (size, start) in zip(("val", "test"), given):
        if size is not None and not (0 < size < 1 or (size >= 1 and size == int(size))):
            raise DataError(f"data.{split}_size={size:g} must be a number of rows, or a share between 0 and 1")
        if (size is None) == (start is None) and any(value is not None for pair in given for value in pair):
            raise DataError(f"set either data.{split}_size or data.{split}_start, for validation and test each")


def take_input(data: Any, file: str) -> None:
    """Replace the data file by ``task.input``, with ``split=test_only``.

    Args:
        data: ``config.data``; changed in place.
        file: path of a file, relative to the current folder.
    """
    data.root, data.file, data.split = None, str(Path(file).expanduser().absolute()), "test_only"
    data.archive_folder = data.val_size = data.test_size = data.val_start = data.test_start = None


def find_file(config: ForecastingDataConfig) -> Path:
    """The path of the data file: ``file`` below ``root``, or below ``archive_folder`` in ``root``.

    Raises:
        DataError: there is no such file; the message lists the folder's content.
    """
    folder = sample_folder("ett") if config.root is None else Path(config.root).expanduser().absolute()
    file = Path(config.file).expanduser()
    path, absolute = folder / file, file.is_absolute()  # data.root and archive_folder play no part then
    paths = [path, *([folder / config.archive_folder / file] if config.archive_folder and not absolute else ())]
    for candidate in paths:
        if os.path.isfile(candidate):  # noqa: PTH113 - Path.is_file raises where a folder above may not be entered
            return candidate
    default = "" if config.root is not None else " (null: the sample data of exp)"
    raise DataError(
        f"data.file={config.file} (data set {config.name}): there is no file {', nor '.join(map(str, paths))}",
        f"set data.root{default} to the folder that holds it" * (not absolute),
        [f"expected: {describe_layout(config)}", folder_listing(path.parent)],
        key="data.file",
        file=path,
    )


SAVE_ADVICE = "save it as comma-separated UTF-8, plain or with a name that ends in .gz"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|nan", re.IGNORECASE)
_TIME = re.compile(r"date|time|datum|zeit|heure|fecha|^(ds|dt|ts)$", re.IGNORECASE)


class Header(NamedTuple):
    """The first row of a file.

    Attributes:
        path: of the file.
        begin: number of lines before the first row of numbers.
        names: of all columns, without blanks at their ends; ``0``, ``1``, ... if the file has no header.
        date: name of the column of dates; None: there is none.
        id: name of the column of ids; None: the file is one series.
        melted: the row of the file, from 0, and the column of each row of the table; None: they are the same.
    """

    path: Path
    begin: int
    names: list[str]
    date: str | None
    id: str | None = None
    melted: tuple[np.ndarray, np.ndarray] | None = None

    def describe_cell(self, row: int, column: str) -> str:
        """``<path> row 7, column load: '3.5'``: a cell by its row, from 0, and the name of its column."""
        if self.melted is not None:
            rows, columns = self.melted
            row, column = int(rows[row]), column if column in self.names else str(columns[row])
        if self.path.suffix == ".parquet":
            return f"{self.path} row {row + 1}, column {column}"
        with open_text(self.path) as file:
            cells = next(csv.reader(islice(file, self.begin + row, None)), [])
        cell = dict(zip(self.names, cells)).get(column, "")
        name = column if self.begin else str(int(column) + 1)
        return f"{self.path} row {self.begin + row + 1}, column {name}: {cell!r}"


def open_text(path: Path) -> TextIO:
    """Open a file of UTF-8 text, plain or ``.gz``, with or without a byte order mark."""
    text: dict[str, Any] = {"encoding": "utf-8-sig", "newline": ""}
    return gzip.open(path, "rt", **text) if path.suffix == ".gz" else path.open(**text)


def read_header(path: Path, config: ForecastingDataConfig) -> Header:
    """Read the first row of a CSV file, and compare the second one with it; blank lines before them are skipped.

    Args:
        path: of the file.
        config: ``header`` and ``date_column`` are read.

    Raises:
        DataError: the file cannot be read or is empty, or its first row is not what the configuration says: a column
            without a name, a name twice, no column of dates, text instead of numbers, or another separator than the
            comma; or the next row has more cells.
    """
    try:
        with open_text(path) as file:
            reader = csv.reader(file)
            rows = list(islice(((reader.line_num, cells) for cells in reader if "".join(cells).strip()), 2))
        if any("\0" in cell for _, cells in rows for cell in cells):
            raise ValueError("it has NUL characters, as UTF-16 has")
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}; {SAVE_ADVICE}") from error
    if not rows:
        raise DataError(f"{path} is empty; expected: {describe_layout(config)}")
    (line, first), (below, second) = rows[0], rows[-1]
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if ",".join(first).count(separator) >= len(first):
            raise DataError(
                f"{path} row 1: its cells are separated by {name}; write the file with commas between cells and points "
                "in numbers, such as 2016-07-01 00:00:00,5.82"
            )
    names, date = [cell.strip() for cell in first], None
    if config.header:
        _check_header_names(path, names)
        date = None if config.date_column is None else find_date_column(path, names, config.date_column)
    elif names[0] and not _NUMBER.fullmatch(names[0]):
        raise DataError(
            f"{path} row 1, column 1: {names[0]!r} is not a number; for a file with a header and dates, set "
            "data.header=true"
        )
    else:
        line, names = line - 1, [str(index) for index in range(len(first))]
    if len(second) > len(first):  # pandas would read the first cells as labels
        raise DataError(
            f"{path} row {below}, column {len(first) + 1}: the row has {len(second)} cells, but the first row has "
            f"{len(first)}; every row needs one cell per column, and numbers a decimal point"
        )
    return table_header(path, line, names, date, config)


def table_header(path: Path, line: int, names: list[str], date: str | None, config: ForecastingDataConfig) -> Header:
    """The header of a table, with its column of ids.

    Raises:
        DataError: the column of ids, or a static one, does not exist.
    """
    for key, wanted in (("id_column", [] if config.melt else [config.id_column]), ("static", config.static or [])):
        _resolve_names(path, key, [name for name in wanted if name is not None], names)
    return Header(path, line, names, date, config.id_column)


def describe_layout(config: ForecastingDataConfig) -> str:
    """A description of the expected file, for messages."""
    if str(config.file).endswith(".npz"):
        return "an archive of numpy with an array `data`: (rows, series) or (rows, series, measures), oldest row first"
    if config.header:
        return "comma-separated; header `date,<series>,<series>,...`; then one row per time step, oldest first"
    return "comma-separated numbers, one row per time step, oldest first; no header, no dates; plain or .gz"


def _check_header_names(path: Path, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        cell = f"{path} row 1, column {number + 1}:"
        if not name or name.startswith("Unnamed: "):  # pandas writes this for a missing name
            raise DataError(
                f"{cell} the column has no name (of row numbers, perhaps, or a comma at the end of every line); name "
                "it, or remove it"
            )
        if name in names[:number]:
            raise DataError(f"{cell} {name!r} is the name of another column, too; give every column a name of its own")


def find_date_column(path: Path, names: Sequence[str], date_column: str) -> str:
    """The name of the column of dates, upper or lower case.

    Raises:
        DataError: there is none; the message has columns that may be it.
    """
    matches = [name for name in names if name.lower() == date_column.lower()]
    if date_column in names or len(matches) == 1:
        return date_column if date_column in names else matches[0]
    problem = f"{path} row 1: no column `{date_column}`: the header is {shortened(names)}"
    if all(map(_NUMBER.fullmatch, names)):
        raise DataError(f"{problem}; for a file of numbers only, set data.header=false")
    candidates = [name if re.fullmatch(r"[\w./-]+", name) else f"'\"{name}\"'" for name in names if _TIME.search(name)]
    hint = " or ".join(f"data.date_column={name}" for name in candidates[:3])
    raise DataError(f"{problem}; set {hint or 'data.date_column to its name, or to null where there is none'}")


class Columns(NamedTuple):
    """The columns of a file by their use; keys of ``data`` are in parentheses.

    Attributes:
        names: the C columns that are read (``inputs``).
        scored: positions in ``names`` of the columns that are forecast and scored (``targets``).
        covariates: positions in ``names`` of the columns whose future values are known (``future_covariates``); None:
            the key is null.
    """

    names: list[str]
    scored: list[int]
    covariates: list[int] | None


def select_columns(path: Path, series: Sequence[str], config: ForecastingDataConfig) -> Columns:
    """Choose the columns that the configuration names.

    Args:
        path: of the file, for messages.
        series: names of all series of the file.
        config: ``derived_columns``, ``inputs``, ``targets``, ``future_covariates`` and ``channels`` are read.

    Raises:
        DataError: a name does not exist or occurs twice; a column is both target and covariate; no column is left to be
            forecast; or ``channels`` is not the number of columns that are read.
    """
    available = list(dict.fromkeys([*series, *config.derived_columns]))
    if config.id_column is None or config.inputs is not None or config.targets is None:
        names = _resolve_names(path, "inputs", config.inputs, available)
    else:
        keys = {"targets": config.targets, "future_covariates": config.future_covariates or ()}
        names = [name for key, named in keys.items() for name in _resolve_names(path, key, named, available)]
        names = list(dict.fromkeys([*names, *config.derived_columns]))
    if config.channels != len(names):
        source = "has" if config.inputs is None else "data.inputs names"
        raise DataError(
            f"{path}: {source} {len(names)} series ({shortened(names)}), but data.channels={config.channels}; set "
            f"data.channels={len(names)}, take the right file, or name those to be read in data.inputs: with trained "
            "weights those of the training, in their order"
        )
    targets = _resolve_names(path, "targets", config.targets, names)
    covariates = []
    if config.future_covariates is not None:
        covariates = _resolve_names(path, "future_covariates", config.future_covariates, names)
    both = [name for name in covariates if name in targets and config.targets is not None]
    if both:
        raise DataError(f"{both[0]!r} is in data.targets and in data.future_covariates; a covariate is not forecast")
    scored = [position for position, name in enumerate(names) if name in targets and name not in covariates]
    if not scored:
        raise DataError(
            f"{path}: data.targets={targets} and data.future_covariates={covariates} leave no column to be forecast"
        )
    positions = None if config.future_covariates is None else [names.index(name) for name in covariates]
    return Columns(names, scored, positions)


def _resolve_names(path: Path, key: str, requested: Sequence[object] | None, available: Sequence[str]) -> list[str]:
    """The names of a key, checked against the existing ones; all existing ones if the key is null."""
    names = list(available) if requested is None else [str(name).strip() for name in requested]
    for number, name in enumerate(names):
        if name not in available:
            similar = difflib.get_close_matches(name, available, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            of_weights = ", which the weights were trained on or you have named," if key == "inputs" else ""
            raise DataError(
                f"data.{key}: {name!r}{of_weights} is not among the series of {path}: {shortened(available)}{hint}"
            )
        if name in names[:number]:
            raise DataError(f"data.{key} has {name!r} twice; name each column once")
    return names
