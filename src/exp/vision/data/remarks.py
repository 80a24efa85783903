"""What a user is told of the files of a data set before anything is loaded."""

from __future__ import annotations

import filecmp
import os
from pathlib import Path
from typing import Any, Sequence

from exp.vision.data.listing import SUFFIXES, Listing, other_files

__all__ = ["remarks"]

_ALIKE = 8


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
    """Held-out images of which the training part has a file of the same name and content.

    Names that many files have, as of numbered tiles, tell nothing, and would take long to compare.
    """
    trained: dict[str, list[str]] = {}
    for path, *_ in listing.parts.get("train", []):
        trained.setdefault(Path(path).name, []).append(path)
    held = [sample[0] for part, members in listing.parts.items() if part != "train" for sample in members]
    found = []
    for path in held:
        alike = trained.get(Path(path).name, [])
        if len(alike) <= _ALIKE and any(path != each and filecmp.cmp(path, each, shallow=False) for each in alike):
            found.append(path)
    return found
