"""Folders of data files, texts about them for messages, and fingerprints of files. Imports neither torch nor numpy.

By its fingerprint a resumed training notices that a file has changed. A fingerprint is plain data, ``{name: [number of
files, bytes, digest]}``, with one entry per file or, if there are many files, per folder. Location and modification
time of the files do not matter.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

from exp.errors import DataError

Fingerprint = Dict[str, List[Any]]

_MOST_BYTES = 100_000_000  # bytes to read of all files together: below a second from a disk
_BLOCKS = 1024  # of a file that is not read as a whole; of at least 4 KiB, the unit of most file systems
_MOST_FILES = 1000  # above this number, entries are folders
_MOST_READ = 4096  # files to read: opening one is slow on some file systems
_READERS = 16  # threads, since a file server takes a millisecond for each call


def sample_folder(name: str) -> Path:
    """The folder ``name`` of the sample data that come with exp.

    Raises:
        DataError: the folder is not installed.
    """
    spec = importlib.util.find_spec("exp.sample_data")
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    if not roots or not (Path(roots[0]) / name).is_dir():
        raise DataError(
            f"the sample data {name} of exp are not installed; install exp (pip install -e .), or set data.root"
        )
    return Path(roots[0]) / name


def folder_listing(folder: Path) -> str:
    """The content of a folder as text, ``in <folder>: a.csv, b/``; without the folder, that of the nearest parent."""
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises without permission on a parent
        nearest = next(parent for parent in folder.parents if os.path.isdir(parent))  # noqa: PTH112
        return f"{folder} is no folder; {folder_listing(nearest)}"
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


def file_fingerprint(path: Path) -> Fingerprint:
    """The fingerprint of one file: its size, and the SHA-256 of its content.

    Of a file of more than 100 MB, 1024 blocks in equal distances are read, 100 MB in all.
    """
    return {path.name: [1, *_digest_of(str(path), _MOST_BYTES)]}


def dataset_fingerprint(parts: Mapping[str, Sequence[tuple[str, Any]]]) -> Fingerprint:
    """The fingerprint of many files: their names relative to their common folder, labels, sizes and contents.

    At most 4096 files are read, in equal distances, and at most 100 MB of all of them: of larger files blocks
    in equal distances.

    Args:
        parts: by split, pairs of the path of a file and its label, which is another path or a number.
    """
    samples = [sample for part in sorted(parts) for sample in sorted(parts[part], key=lambda sample: sample[0])]
    pairs = [[(path, ""), (label, "")] if isinstance(label, str) else [(path, label)] for path, label in samples]
    files = [file for pair in pairs for file in pair]
    root = _common_folder([path for path, _ in files])
    read = [path for pair in pairs[:: -(-len(files) // _MOST_READ) or 1] for path, _ in pair]
    with ThreadPoolExecutor(_READERS) as pool:  # reading and hashing release the GIL
        contents = dict(zip(read, pool.map(lambda path: _digest_of(path, _MOST_BYTES // len(read)), read)))
    entries: dict[str, Any] = {}
    for path, label in files:
        name, (size, content) = path[len(root) :], contents.get(path, (0, ""))
        key = name if len(files) <= _MOST_FILES else f"{name.rpartition('/')[0] or '.'}/"
        entry = entries.setdefault(key, [0, 0, hashlib.sha256()])
        entry[0] += 1
        entry[1] += size
        entry[2].update(f"{name}\0{label}\0{size}\0{content}\n".encode("utf-8", "surrogateescape"))
    return {key: [count, size, digest.hexdigest()] for key, (count, size, digest) in entries.items()}


def _digest_of(path: str, most: int) -> tuple[int, str]:
    """Size and SHA-256 of a file; if it has more than ``most`` bytes, of as many, in blocks in equal distances."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - for many files; Path is slower
            size = os.fstat(file.fileno()).st_size
            block = size if size <= most else max(most // _BLOCKS, 2**12)
            for number in range(blocks := 1 if size <= most else max(most // block, 2)):
                file.seek((size - block) * number // max(blocks - 1, 1))
                remaining = block
                while remaining > 0:
                    piece = file.read(min(remaining, 2**20))
                    digest.update(piece)
                    remaining -= len(piece) or remaining  # nothing read: the file was truncated meanwhile
        return size, digest.hexdigest()
    except OSError:
        return -1, ""  # for example a broken link; the code that reads the file reports it


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
