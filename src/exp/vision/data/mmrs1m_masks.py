"""Masks in the layout of MMRS-1M, which has none as it is published: users add theirs.

``root/segmentation/[<data set>/][{train,val,test}/]images`` beside ``labels``, ``masks`` or ``annotations``.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Mapping, Sequence

from exp.data.places import content_of
from exp.errors import DataError
from exp.vision.data.folders import HELD_OUT, part_folders
from exp.vision.data.listing import Listing, folders_in, split
from exp.vision.data.masks import pairs_below
from exp.vision.data.mmrs1m import modality_of, plain

__all__ = ["check", "find"]

_MASKED = (
    "expected: <data.root>/segmentation/[<data set>/][{train,val,test}/]images beside labels, masks or annotations, "
    "where a mask has its image's name"
)


def check(root: Path) -> None:
    """Refuse a root without a folder of segmentation.

    Raises:
        DataError: says what was expected; MMRS-1M as published has no masks.
    """
    if not (root / "segmentation").is_dir():
        raise DataError(
            f"data.root={root} has no folder segmentation; MMRS-1M as published has no masks: add yours\n  {_MASKED}"
            f"\n  {content_of(root)}"
        )


def find(
    root: Path,
    names: Sequence[str] | None,
    modality: str | None,
    images: str,
    mask_folders: Sequence[str],
    fractions: Sequence[float],
) -> Listing:
    """All pairs of an image and a mask below ``root/segmentation``; the classes are not in the layout.

    Args:
        root: see the module.
        names: of data sets; None: all that are there.
        modality: ``optical``, ``sar``, ``infrared``; None: any.
        images: name of the folders of images.
        mask_folders: names of the folders of masks beside them: the first that is there.
        fractions: of train, val and test for data sets without folders of these names.

    Raises:
        DataError: there are none, or an image has no mask.
    """
    check(root)
    above = root / "segmentation"
    single = (above / images).is_dir() or bool(part_folders(above))
    sets = {plain(place.name): place for place in ([above] if single else folders_in(above))}
    lacking = [name for name in names or () if plain(name) not in sets]
    if lacking:
        there = ", ".join(place.name for place in sets.values()) or "none"
        raise DataError(f"data.datasets: {', '.join(lacking)} is not in {above}; there are {there}")
    wanted = sorted(sets) if names is None else sorted({plain(name) for name in names})
    chosen_sets = [sets[key] for key in wanted if single or modality in (None, modality_of(sets[key].name))]
    parts: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for place in chosen_sets:
        folders = {part: pairs_below(folder, images, mask_folders) for part, folder in part_folders(place).items()}
        if "train" in folders:
            found: Mapping[str, list[tuple[str, Any]]] = folders
            if "val" not in folders:
                found = {**folders, **split(folders["train"], HELD_OUT, root, by_class=False)}
        else:
            found = split(pairs_below(place, images, mask_folders), fractions, root, by_class=False)
        for part, pairs in found.items():
            parts[part] += pairs
    if not parts:
        raise DataError(f"{above} holds no data set of data.modality={modality}\n  {_MASKED}")
    return Listing([], dict(parts), {"datasets": [place.name for place in chosen_sets]})
