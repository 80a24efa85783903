"""Folders of data files, texts about them for messages, and fingerprints of files. Imports neither torch nor numpy.

By its fingerprint a resumed training notices that a file has changed. A fingerprint is plain data, ``{name: [number of
files, bytes, digest]}``, with one entry per file or, if there are many files, per folder. Location and modification
time of the files do not matter.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

from exp.errors import DataError

__all__ = ["Fingerprint", "content_of", "differences", "of_file", "of_samples", "sample_folder", "shortened"]

Fingerprint = Dict[str, List[Any]]

_EDGE = 2**20  # bytes at either end of a file that are read
_MOST_FILES = 1000  # above this number, entries are folders
_MOST_SIZES = 4096  # sizes to ask for: one call each, which is slow on some file systems


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


def of_file(path: Path) -> Fingerprint:
    """The fingerprint of one file: its size, and the SHA-256 of its first and last MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(file.read(_EDGE))
        file.seek(max(size - _EDGE, file.tell()))
        digest.update(file.read(_EDGE))
    return {path.name: [1, size, digest.hexdigest()]}


def of_samples(parts: Mapping[str, Sequence[tuple[str, Any]]]) -> Fingerprint:
    """The fingerprint of many files: their names relative to their common folder, labels and sizes.

    With more than 4096 samples, only the sizes of every n-th sample are included, at most 4096.

    Args:
        parts: by split, pairs of the path of a file and its label, which is another path or a number.
    """
    samples = [sample for part in sorted(parts) for sample in sorted(parts[part], key=lambda sample: sample[0])]
    paths = [path for path, _ in samples]
    masks = [label for _, label in samples if isinstance(label, str)]
    root = _common_folder([*paths, *masks])
    stride = -(-len(samples) // _MOST_SIZES)
    found: dict[str, Any] = {}
    for number, (path, label) in enumerate(samples):
        for each in (path, label) if isinstance(label, str) else (path,):
            name = each[len(root) :]
            size = _size(each) if number % stride == 0 else 0
            key = name if len(paths) + len(masks) <= _MOST_FILES else f"{name.rpartition('/')[0] or '.'}/"
            entry = found.setdefault(key, [0, 0, hashlib.sha256()])
            entry[0] += 1
            entry[1] += size
            said = "" if isinstance(label, str) else label
            entry[2].update(f"{name}\0{said}\0{size}\n".encode("utf-8", "surrogateescape"))
    return {key: [files, size, digest.hexdigest()] for key, (files, size, digest) in found.items()}


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - for many files; Path is slower
    except OSError:
        return -1  # for example a broken link; the code that reads the file reports it


def _common_folder(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    folder = os.path.commonpath([os.path.dirname(min(paths)), os.path.dirname(max(paths))])  # noqa: PTH120
    return folder.rstrip("/") + "/" if folder else ""


def differences(old: Mapping[str, Sequence[Any]], new: Mapping[str, Sequence[Any]]) -> list[str]:
    """How two fingerprints differ, a short text for each name; empty if they are equal.

    Args:
        old: fingerprint of the data when the training began.
        new: fingerprint of the current data.
    """
    states = {name: "has changed" for name in {*old, *new} if list(old.get(name, ())) != list(new.get(name, ()))}
    states.update(dict.fromkeys({*old} - {*new}, "is no longer there"))
    states.update(dict.fromkeys({*new} - {*old}, "was not there"))
    return [f"{name} {state}" for name, state in sorted(states.items())]
