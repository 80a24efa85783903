"""Find the data file and check its first row against the keys, in the parent before any process starts.

Imports neither torch nor pandas nor numpy.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import os
import re
import zlib
from dataclasses import fields
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence, TextIO

from exp.data.places import content_of, sample_folder, shortened
from exp.errors import ConfigError, DataError, UnavailableError
from exp.forecasting.config import SPLITS, ForecastingDataConfig, IntervalKeys

__all__ = ["SAVE", "Columns", "Header", "check_task", "choose", "interval_levels", "layout", "locate", "opened",
           "preflight", "read_header", "take_input"]  # fmt: skip


def preflight(data: Mapping[str, Any]) -> None:
    """Refuse keys out of range, a missing file, and a CSV file whose first row does not fit the keys.

    Args:
        data: ``config.data``.

    Raises:
        DataError: a value is out of range; or see :func:`locate`, :func:`read_header` and :func:`choose`.
    """
    config = ForecastingDataConfig(**data)
    for key, known in (("split", SPLITS), ("missing", ("error", "mask")), ("device_cache", (True, False, "auto"))):
        value = getattr(config, key)
        if value not in known:
            raise DataError(f"data.{key}={value} is not one of {', '.join(map(str, known))}")
    for key, least in (("lookback", 1), ("horizon", 1), ("eval_batch_size", 1), ("num_workers", 0)):
        if getattr(config, key) < least:
            raise DataError(f"data.{key}={getattr(config, key)} must be at least {least}")
    if config.season is not None and config.season < 1:
        raise DataError(f"data.season={config.season} must be at least 1 (null: by the calendar of the dates)")
    path = locate(config)
    if path.suffix != ".npz":
        header = read_header(path, config)
        choose(path, [name for name in header.names if name != header.date], config)


def check_task(task: Any) -> None:
    """Check the keys that forecasting adds to ``task``, before data and model are built.

    Args:
        task: ``config.task``.

    Raises:
        ConfigError: ``backtest_file`` is not a file name that ends in .csv or .parquet; ``backtest_windows`` is below 1
            or set without ``backtest_file``; or see :func:`interval_levels`.
        UnavailableError: ``backtest_file`` is a Parquet file, and pyarrow is not installed.
    """
    interval_levels(task)
    name, windows = task.get("backtest_file"), task.get("backtest_windows")
    if name is not None and (Path(name).name != name or Path(name).suffix not in (".csv", ".parquet")):
        raise ConfigError(f"task.backtest_file={name} must be the name of a file that ends in .csv or .parquet")
    if windows is not None and (windows < 1 or name is None):
        raise ConfigError(f"task.backtest_windows={windows} must be at least 1, and needs task.backtest_file")
    if name is not None and name.endswith(".parquet") and not find_spec("pyarrow"):
        raise UnavailableError(f"task.backtest_file={name} needs pyarrow: pip install pyarrow, or take a name in .csv")


def interval_levels(task: Any) -> list[float]:
    """The coverages of ``task.intervals``, ascending, without duplicates; empty: no intervals.

    Args:
        task: ``config.task``; keys may be missing.

    Raises:
        ConfigError: a value is out of range, or a key is set that has no effect without ``task.intervals``.
    """
    levels = sorted({round(float(level), 6) for level in task.get("intervals") or ()})
    for level in levels:
        if not 0.0 < level < 1.0:
            raise ConfigError(f"task.intervals: {level:g} must be between 0 and 1, such as [0.8,0.95]")
    wanted = task.get("intervals_method")
    if wanted not in (None, "conformal", "model"):
        raise ConfigError(f"task.intervals_method={wanted} must be conformal or model (null: as the model allows)")
    for key in fields(IntervalKeys):
        value = task.get(key.name)
        if not levels and value is not None and value != key.default:
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(f"task.{key.name}={text} needs task.intervals, such as task.intervals=[0.8,0.95]")
    return levels


def take_input(data: Any, wanted: str) -> None:
    """Replace the data file by ``task.input``, with ``split=test_only``.

    Args:
        data: ``config.data``; changed in place.
        wanted: path of a file, relative to the current folder.
    """
    data.root, data.file, data.split = None, str(Path(wanted).expanduser().absolute()), "test_only"
    data.archive_folder = None


def locate(config: ForecastingDataConfig) -> Path:
    """The path of the data file: ``file`` below ``root``, or below ``archive_folder`` in ``root``.

    Raises:
        DataError: there is no such file; the message lists the folder's content.
    """
    folder = sample_folder("ett") if config.root is None else Path(config.root).expanduser().absolute()
    file = Path(config.file).expanduser()
    path, absolute = folder / file, file.is_absolute()  # data.root and archive_folder play no part then
    places = [path, *([folder / config.archive_folder / file] if config.archive_folder and not absolute else ())]
    for each in places:
        if os.path.isfile(each):  # noqa: PTH113 - Path.is_file raises where a folder above may not be entered
            return each
    own = "" if config.root is not None else " (null: the sample data of exp)"
    raise DataError(
        f"data.file={config.file} (data set {config.name}): there is no file {', nor '.join(map(str, places))}"
        + f"; set data.root{own} to the folder that holds it" * (not absolute)
        + f"\n  expected: {layout(config)}\n  {content_of(path.parent)}"
    )


SAVE = "save it as comma-separated UTF-8, plain or with a name that ends in .gz"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|nan", re.IGNORECASE)
_TIME = re.compile(r"date|time|datum|zeit|heure|fecha|^(ds|dt|ts)$", re.IGNORECASE)


class Header(NamedTuple):
    """The first row of a file.

    Attributes:
        path: of the file.
        begin: number of lines before the first row of numbers.
        names: of all columns, without blanks at their ends; ``0``, ``1``, ... if the file has no header.
        date: name of the column of dates; None: there is none.
    """

    path: Path
    begin: int
    names: list[str]
    date: str | None

    def place(self, row: int, column: str) -> str:
        """``<path> row 7, column load: '3.5'``: a cell by its row, from 0, and the name of its column."""
        with opened(self.path) as file:
            cells = next(csv.reader(islice(file, self.begin + row, None)), [])
        cell = dict(zip(self.names, cells)).get(column, "")
        name = column if self.begin else str(int(column) + 1)
        return f"{self.path} row {self.begin + row + 1}, column {name}: {cell!r}"


def opened(path: Path) -> TextIO:
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
        with opened(path) as file:
            reader = csv.reader(file)
            rows = list(islice(((reader.line_num, cells) for cells in reader if "".join(cells).strip()), 2))
        if any("\0" in cell for _, cells in rows for cell in cells):
            raise ValueError("it has NUL characters, as UTF-16 has")
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}; {SAVE}") from error
    if not rows:
        raise DataError(f"{path} is empty; expected: {layout(config)}")
    (line, first), (below, second) = rows[0], rows[-1]
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if ",".join(first).count(separator) >= len(first):
            raise DataError(
                f"{path} row 1: its cells are separated by {name}; write the file with commas between cells and points "
                "in numbers, such as 2016-07-01 00:00:00,5.82"
            )
    names, date = [cell.strip() for cell in first], None
    if config.header:
        _check_names(path, names)
        date = None if config.date_column is None else _date_column(path, names, config.date_column)
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
    return Header(path, line, names, date)


def layout(config: ForecastingDataConfig) -> str:
    """A description of the expected file, for messages."""
    if str(config.file).endswith(".npz"):
        return "an archive of numpy with an array `data`: (rows, series) or (rows, series, measures), oldest row first"
    if config.header:
        return "comma-separated; header `date,<series>,<series>,...`; then one row per time step, oldest first"
    return "comma-separated numbers, one row per time step, oldest first; no header, no dates; plain or .gz"


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


def _date_column(path: Path, names: Sequence[str], wanted: str) -> str:
    alike = [name for name in names if name.lower() == wanted.lower()]
    if wanted in names or len(alike) == 1:
        return wanted if wanted in names else alike[0]
    problem = f"{path} row 1: no column `{wanted}`: the header is {shortened(names)}"
    if all(map(_NUMBER.fullmatch, names)):
        raise DataError(f"{problem}; for a file of numbers only, set data.header=false")
    times = [name if re.fullmatch(r"[\w./-]+", name) else f"'\"{name}\"'" for name in names if _TIME.search(name)]
    hint = " or ".join(f"data.date_column={name}" for name in times[:3])
    raise DataError(f"{problem}; set {hint or 'data.date_column to its name, or to null where there is none'}")


class Columns(NamedTuple):
    """The columns of a file by their use; keys of ``data`` are in parentheses.

    Attributes:
        names: the C columns that are read (``inputs``).
        scored: positions in ``names`` of the columns that are forecast and scored (``targets``).
        ahead: positions in ``names`` of the columns whose future is known (``future_covariates``); None: the key is
            null.
    """

    names: list[str]
    scored: list[int]
    ahead: list[int] | None


def choose(path: Path, series: Sequence[str], config: ForecastingDataConfig) -> Columns:
    """Choose the columns that the configuration names.

    Args:
        path: of the file, for messages.
        series: names of all series of the file.
        config: ``derived_columns``, ``inputs``, ``targets``, ``future_covariates`` and ``channels`` are read.

    Raises:
        DataError: a name does not exist or occurs twice; a column is both target and covariate; no column is left to be
            forecast; or ``channels`` is not the number of columns that are read.
    """
    names = _named(path, "inputs", config.inputs, list(dict.fromkeys([*series, *config.derived_columns])))
    if config.channels != len(names):
        what = "has" if config.inputs is None else "data.inputs names"
        raise DataError(
            f"{path}: {what} {len(names)} series ({shortened(names)}), but data.channels={config.channels}; set "
            f"data.channels={len(names)}, take the right file, or name those to be read in data.inputs: with trained "
            "weights those of the training, in their order"
        )
    targets = _named(path, "targets", config.targets, names)
    ahead = (
        [] if config.future_covariates is None else _named(path, "future_covariates", config.future_covariates, names)
    )
    both = [name for name in ahead if name in targets and config.targets is not None]
    if both:
        raise DataError(f"{both[0]!r} is in data.targets and in data.future_covariates; what is known is not forecast")
    scored = [position for position, name in enumerate(names) if name in targets and name not in ahead]
    if not scored:
        raise DataError(
            f"{path}: data.targets={targets} and data.future_covariates={ahead} leave no column to be forecast"
        )
    known = None if config.future_covariates is None else [names.index(name) for name in ahead]
    return Columns(names, scored, known)


def _named(path: Path, key: str, wanted: Sequence[object] | None, there: Sequence[str]) -> list[str]:
    """The names of a key, checked against the existing ones; all existing ones if the key is null."""
    names = list(there) if wanted is None else [str(name).strip() for name in wanted]
    for number, name in enumerate(names):
        if name not in there:
            near = difflib.get_close_matches(name, there, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            of_weights = ", which the weights were trained on or you have named," if key == "inputs" else ""
            raise DataError(
                f"data.{key}: {name!r}{of_weights} is not among the series of {path}: {shortened(there)}{hint}"
            )
        if name in names[:number]:
            raise DataError(f"data.{key} has {name!r} twice; name each column once")
    return names
