"""Folders of data files, and texts about them for messages. Imports neither torch nor numpy, as the parent uses it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Sequence

from exp.errors import DataError

__all__ = ["content_of", "sample_folder", "shortened"]


def sample_folder(name: str) -> Path:
    """The folder ``name`` of the sample data that come with exp.

    Raises:
        DataError: the folder is not installed.
    """
    spec = importlib.util.find_spec("exp.sample_data")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places or not (Path(places[0]) / name).is_dir():
        raise DataError(
            f"the sample data {name} of exp are not installed; install exp (pip install -e .), or set data.root"
        )
    return Path(places[0]) / name


def content_of(folder: Path) -> str:
    """The content of a folder as text, ``in <folder>: a.csv, b/``; without the folder, that of the nearest parent."""
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises without permission on a parent
        nearest = next(parent for parent in folder.parents if os.path.isdir(parent))  # noqa: PTH112
        return f"{folder} is no folder; {content_of(nearest)}"
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    except OSError as error:
        return f"in {folder}: {error.strerror}"
    return f"in {folder}: {shortened(names, 12) or 'nothing'}"


def shortened(values: Sequence[object], most: int = 12) -> str:
    """The first ``most`` values as text, and the number of the others."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(str(value) for value in values[:most]) + more
