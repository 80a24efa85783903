"""Where a data file lies, and whether it can be the right one: checked by the parent before any process starts.

Looks at the first line only, and imports neither torch nor pandas nor numpy.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any, Mapping

from exp.data.places import content_of, sample_folder
from exp.errors import DataError
from exp.forecasting.data.header import check_columns, expected, layout
from exp.forecasting.data.npz import LAYOUT_ARRAY, check_array, is_archive
from exp.forecasting.data.roles import Roles
from exp.forecasting.data.rows import numbered_rows
from exp.forecasting.data.splits import check_split
from exp.forecasting.intervals.keys import check_keys

__all__ = ["check_task", "locate", "preflight", "take_input"]


def preflight(config: Mapping[str, Any]) -> None:
    """Refuse a missing, unreadable or empty file, and one whose first line does not fit the configuration.

    Args:
        config: has the fields of :class:`exp.config.schema.ForecastingDataConfig`.

    Raises:
        DataError: the file is missing, unreadable or empty; its first line is not the expected header, or not numbers;
            the number of series is not ``channels``, or a series that is named is not there; there is no such split; or
            a value is out of range.
    """
    check_split(config["split"])
    for key, least in (("lookback", 1), ("horizon", 1), ("eval_batch_size", 1), ("num_workers", 0)):
        if config[key] < least:
            raise DataError(f"data.{key}={config[key]} must be at least {least}")
    date_format = config.get("date_format")
    if date_format is not None and "%" not in date_format:
        raise DataError(
            f"data.date_format={date_format} has no directive of strftime; write it like %d/%m/%Y %H:%M "
            "(%s: seconds since 1970)"
        )
    roles = Roles.of_keys(config)
    channels = config["channels"]
    in_file = channels if roles.inputs is None else None
    new = config["split"] == "new"
    path = locate(config["root"], config["file"], config["name"], config["header"], config.get("archive_folder"))
    if is_archive(path):
        roles.selected(path, [str(number) for number in range(check_array(path, in_file, new))], channels)
        return
    _, first = next(numbered_rows(path, config["header"]), (0, []))
    if not first:
        raise DataError(f"{path} is empty; {expected(config['header'])}")
    dates = check_columns(path, first, config["header"], in_file, config.get("date_column", "date"), new)
    names = [name.strip() if config["header"] else str(index) for index, name in enumerate(first) if index != dates]
    roles.selected(path, names, channels)


def check_task(task: Any) -> None:
    """Refuse keys of ``task`` that forecasts bring along, as far as they can be judged by themselves.

    Args:
        task: ``config.task``.

    Raises:
        ConfigError: see :func:`exp.forecasting.intervals.keys.check_keys`.
    """
    check_keys(task)


def take_input(data: Any, wanted: str) -> None:
    """Let ``task.input`` stand for the data: the rows of this file are all new to the model.

    Args:
        data: ``config.data``; changed in place.
        wanted: path of a CSV file, relative to the current folder.
    """
    data.root, data.file, data.split = None, str(Path(wanted).expanduser().absolute()), "new"
    data.archive_folder = None


def locate(
    root: str | os.PathLike[str] | None, file: str, name: str, header: bool = True, archive_folder: str | None = None
) -> Path:
    """The file that a configuration means.

    Args:
        root: folder of the user's files; None: the sample data that come with exp.
        file: path below ``root``, or an absolute one.
        name: of the data set, for messages.
        header: whether the file has a header and dates, for messages.
        archive_folder: folder below ``root`` that may have the file, if ``root`` itself has not.

    Raises:
        DataError: it is not there, or no file; tells what is there instead.
    """
    folder = sample_folder("ett") if root is None else Path(root).expanduser().absolute()
    path = folder / Path(file).expanduser()
    if os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises where a folder above may not be entered
        return path
    in_archive = None if root is None or archive_folder is None else folder / archive_folder / file
    if in_archive is not None and os.path.isfile(in_archive):  # noqa: PTH113 - as above
        return in_archive
    problem = _what_is_there(path)
    if problem is not None:
        raise DataError(f"data.file={file} (data set {name}): {path} {problem}")
    if path == Path(file).expanduser():
        what = f"data.file={file} (data set {name}): there is no such file"
    elif root is None:
        what = (
            f"data.root is not set, and {file} is not among the sample data of exp; "
            f"set data.root to the folder that holds {path.name}"
        )
    else:
        what = (
            f"data.file={file} (data set {name}) is not in data.root={folder}"
            f"{'' if in_archive is None else f', nor in {archive_folder}/ below it'}; "
            f"set data.root to the folder that holds {path.name if in_archive is None else f'it or {archive_folder}/'}"
        )
    place = path.parent if path == Path(file).expanduser() else folder
    shape = LAYOUT_ARRAY if is_archive(path) else layout(header)
    wanted = path if path == Path(file).expanduser() else f"<data.root>/{file}"
    lines = [
        what,
        f"  expected: {wanted}, {shape}",
        f"  {content_of(place)}",
    ]
    if os.path.isfile(file):  # noqa: PTH113 - as above
        lines.append(f"  in the current folder there is one: data.file={Path(file).absolute()}")
    if root is not None and place == folder:
        depth = len(Path(file).parts)
        deeper = sorted(found.parents[depth - 1] for found in folder.glob(f"*/{glob.escape(file)}"))
        lines += [f"  a level deeper there is one: data.root={found}" for found in deeper]
    raise DataError("\n".join(lines))


def _what_is_there(path: Path) -> str | None:
    """What ``path`` is instead of a file, and what to do; None: nothing that can be seen."""
    if os.path.isdir(path):  # noqa: PTH112 - as above
        return f"is a folder; name a file in it\n  {content_of(path)}"
    if os.path.islink(path):  # noqa: PTH114
        return f"is a link to {os.readlink(path)}, which is not there; mend the link, or name the file itself"
    if os.path.exists(path):  # noqa: PTH110
        return "is no regular file; copy its content into one"
    return None
