"""What a user is told of the files of a data set before anything is loaded."""

from __future__ import annotations

import contextlib
import filecmp
import os
from collections import defaultdict
from typing import Any, Callable, Sequence

from exp.vision.data.listing import SUFFIXES, Listing, other_files

__all__ = ["remarks"]

_ALIKE = 8
_MOST_FILES = 4096  # whose sizes are looked at, which is slow on some file systems
_END = 4096  # bytes


def remarks(listing: Listing, name: str, bands: Sequence[int | str] | None) -> tuple[dict[str, Any], list[str]]:
    """What is remarkable about files and bands.

    Args:
        listing: the samples, with what its layout says.
        name: of the data set.
        bands: that a model gets; None: all.

    Returns:
        Notes for the record of a run, and a line for each thing that is said.
    """
    notes, said = dict(listing.notes), list(listing.said)
    samples = [sample for members in listing.parts.values() for sample in members]
    folders = {os.path.dirname(path) for sample in samples for path in sample if isinstance(path, str)}  # noqa: PTH120
    others = other_files(folders)
    if others:
        notes["other_files"] = others
        told = ", ".join(f"{count} {suffix}" for suffix, count in others.items())
        said.append(
            f"warning: files beside the images of {name} are not read, as exp reads {' '.join(SUFFIXES)} only: {told}; "
            "convert them, or move them elsewhere"
        )
    copies = _in_two_parts(listing)
    if copies:
        notes["files_in_two_parts"] = len(copies)
        said.append(
            f"warning: {len(copies)} images of {name} are in two parts, such as {copies[0]}: figures are measured on "
            "what was trained on; remove them from one"
        )
    wanted = list(bands or ())
    twice = sorted({str(band) for band in wanted if wanted.count(band) > 1})
    if twice:
        said.append(f"note: data.bands names {', '.join(twice)} more than once: the model gets it as often")
    return notes, said


def _in_two_parts(listing: Listing) -> list[str]:
    """Held-out images of which the training part has a file of the same content.

    Among more than 4096 files only those of the same name are compared. Names that many files have, as of numbered
    tiles, tell nothing then, and would take long to compare.
    """
    trained = {path for path, *_ in listing.parts["train"]}
    held = {path for members in listing.parts.values() for path, *_ in members} - trained
    groups = [[*trained, *held]]
    if len(groups[0]) > _MOST_FILES:
        groups = [each for each in _split(groups, os.path.basename) if len(each) <= _ALIKE]
    for key in (_size, _end):
        groups = [each for each in _split(groups, key) if trained.intersection(each) and held.intersection(each)]
    return sorted(
        path
        for members in groups
        for path in held.intersection(members)
        if any(filecmp.cmp(path, other, shallow=False) for other in trained.intersection(members))
    )


def _split(groups: list[list[str]], key: Callable[[str], Any]) -> list[list[str]]:
    found: dict[Any, list[str]] = defaultdict(list)
    for number, members in enumerate(groups):
        for path in members:
            with contextlib.suppress(OSError):  # it is reported when it is read
                found[number, key(path)].append(path)
    return [each for each in found.values() if len(each) > 1]


def _size(path: str) -> int:
    return os.stat(path).st_size  # noqa: PTH116 - of thousands


def _end(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123
        file.seek(max(_size(path) - _END, 0))
        return file.read()
