"""What a user is told of the files of a data set before anything is loaded."""

from __future__ import annotations

import os
from typing import Any, Sequence

from exp.vision.data.listing import SUFFIXES, Listing, other_files

__all__ = ["remarks"]


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
    wanted = list(bands or ())
    twice = sorted({str(band) for band in wanted if wanted.count(band) > 1})
    if twice:
        said.append(f"note: data.bands names {', '.join(twice)} more than once: the model gets it as often")
    return notes, said
