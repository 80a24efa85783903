"""Where data files lie, for every family's messages. Imports neither torch nor numpy: the parent looks, too."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Sequence

from exp.errors import DataError

__all__ = ["content_of", "sample_folder", "shortened"]


def sample_folder(name: str) -> Path:
    """A folder among the sample data that come with exp.

    Args:
        name: of the folder.

    Raises:
        DataError: it is not there.
    """
    spec = importlib.util.find_spec("exp.sample_data")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places or not (Path(places[0]) / name).is_dir():
        raise DataError(
            f"the sample data {name} of exp are not installed; install exp (pip install -e .), or set data.root"
        )
    return Path(places[0]) / name


def content_of(folder: Path) -> str:
    """``in <folder>: a.csv, b/``; of one that is not there, the nearest folder above that is."""
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises where a folder above may not be entered
        nearest = next(parent for parent in folder.parents if os.path.isdir(parent))  # noqa: PTH112
        return f"{folder} is no folder; {content_of(nearest)}"
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    except OSError as error:
        return f"in {folder}: {error.strerror}"
    return f"in {folder}: {shortened(names, 12) or 'nothing'}"


def shortened(values: Sequence[object], most: int = 12) -> str:
    """The first ``most`` values, and how many more there are."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(str(value) for value in values[:most]) + more
