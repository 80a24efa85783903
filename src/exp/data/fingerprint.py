"""What files of data hold, in short: enough to notice, when a training is continued, that they are others now.

Imports neither torch nor numpy. A fingerprint is plain data, ``{name: [files, bytes, digest]}``: of each file, or,
where there are many, of each folder. Where the files lie and when they were written plays no part.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

__all__ = ["Fingerprint", "differences", "of_file", "of_samples"]

Fingerprint = Dict[str, List[Any]]

_EDGE = 2**20  # bytes at either end of a file that are looked at
_MOST_FILES = 1000  # that are listed one by one
_MOST_SIZES = 4096  # that are asked for: one call each, which is slow on some file systems


def of_file(path: Path) -> Fingerprint:
    """Of one file: its size, and the SHA-256 of its first and last MiB.

    Args:
        path: of the file.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(file.read(_EDGE))
        file.seek(max(size - _EDGE, file.tell()))
        digest.update(file.read(_EDGE))
    return {path.name: [1, size, digest.hexdigest()]}


def of_samples(parts: Mapping[str, Sequence[tuple[str, Any]]]) -> Fingerprint:
    """Of many files: their names below the folder that holds them all, their labels and their sizes.

    Of more than 4096 samples, sizes are asked for of so many that are spread over all.

    Args:
        parts: of each part of the data, the path of a file and its label: a path, too, or a number.
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
        return os.stat(path).st_size  # noqa: PTH116 - many
    except OSError:
        return -1  # such as a link that leads nowhere: what that means is for who reads it to say


def _common_folder(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    folder = os.path.commonpath([os.path.dirname(min(paths)), os.path.dirname(max(paths))])  # noqa: PTH120
    return folder.rstrip("/") + "/" if folder else ""


def differences(old: Mapping[str, Sequence[Any]], new: Mapping[str, Sequence[Any]]) -> list[str]:
    """How the files of two fingerprints differ, a short text for each name; empty: not at all.

    Args:
        old: of the data that a training began with.
        new: of those that are there now.
    """
    texts = []
    for name in sorted({*old, *new}):
        if name not in new:
            texts.append(f"{name} is no longer there")
        elif name not in old:
            texts.append(f"{name} was not there")
        elif list(old[name]) != list(new[name]):
            texts.append(f"{name} {_difference(old[name], new[name])}")
    return texts


def _difference(old: Sequence[Any], new: Sequence[Any]) -> str:
    if old[0] != new[0]:
        return f"has {new[0]} files, not {old[0]}"
    if old[1] != new[1]:
        return f"has {new[1]} bytes, not {old[1]}"
    return "has other contents" if old[0] == 1 else "has other files or labels"
