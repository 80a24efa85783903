"""Images and masks in two folders, below any others: ``tile1/images/x.jpg`` and ``tile1/masks/x.png``."""

from __future__ import annotations

import logging
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Mapping, Sequence

from exp.data.places import content_of
from exp.errors import DataError
from exp.vision.data.listing import Listing, archives_in, files_below, folders_in, refuse_twins, split

__all__ = ["check", "find", "pairs_below"]

logger = logging.getLogger(__name__)


def check(root: Path, images: str, masks: str) -> None:
    """Refuse a root without such folders; looks at folders only.

    Raises:
        DataError: says what was expected and what is there.
    """
    if _image_folders(root, images):
        return
    expected = f"expected: <data.root>/{images}/x.jpg beside <data.root>/{masks}/x.png, or both in folders below"
    hints = []
    if root.name in (images, masks):
        hints.append(f"a level higher there is one: data.root={root.parent}")
    lines = [f"data.root={root} has no folder {images}; set data.images and data.masks to their names", expected]
    raise DataError("\n  ".join([*lines, content_of(root), *hints]))


def find(
    root: Path,
    images: str,
    masks: str,
    fractions: Sequence[float],
    patterns: Mapping[str, Sequence[str]] | None,
    skip_errors: bool,
) -> Listing:
    """All pairs of an image and a mask; the classes are not in the layout.

    Args:
        root: see the module.
        images: name of the folders of images.
        masks: name of the folders of masks beside them.
        fractions: of train, val and test.
        patterns: if any, instead of fractions: for each part, patterns of image paths below ``root``.
        skip_errors: whether an image without its mask is left out; the number of them goes into the notes.

    Raises:
        DataError: an image has no mask, a mask no image, or a part is empty.
    """
    check(root, images, masks)
    pairs: list[tuple[str, str]] = []
    lone: list[str] = []
    folders = _image_folders(root, images)
    refuse_twins(folders, "would count twice")
    for folder in folders:
        by_stem = _by_stem(folder)
        place = folder.parent / masks
        masks_by_stem = _by_stem(place)
        pairs += [(path, masks_by_stem[stem]) for stem, path in sorted(by_stem.items()) if stem in masks_by_stem]
        lone += [f"{path} has no mask in {place}" for stem, path in by_stem.items() if stem not in masks_by_stem]
        lone += [f"{path} has no image in {folder}" for stem, path in masks_by_stem.items() if stem not in by_stem]
    if lone and not skip_errors:
        raise DataError(
            f"{lone[0]}; add it, or leave such files out with data.on_error=skip"
            + (f"\n  and {len(lone) - 1} more" if len(lone) > 1 else "")
        )
    for line in lone:
        logger.warning("left out: %s", line)
    said = archives_in([root])
    if lone:
        said.append(f"warning: {len(lone)} files have no partner and are left out, such as: {lone[0]}")
    notes: dict[str, Any] = {"without_partner": len(lone)} if lone else {}
    if not patterns:
        return Listing([], split(pairs, fractions, root, by_class=False), notes, said)
    parts: dict[str, list[tuple[str, str]]] = {}
    for part, wanted in patterns.items():
        parts[part] = [pair for pair in pairs if any(fnmatch(_below(pair[0], root), pattern) for pattern in wanted)]
        if not parts[part]:
            raise DataError(
                f"data.parts.{part}={list(wanted)} matches none of the {len(pairs)} images in {root}, "
                f"which are like {_below(pairs[0][0], root) if pairs else 'none'}"
            )
    _refuse_leaks(parts, root)
    unused = set(pairs) - {pair for members in parts.values() for pair in members}
    if unused:
        notes["in_no_part"] = len(unused)
    return Listing([], {part: list(members) for part, members in parts.items()}, notes, said)


def pairs_below(root: Path, images: str, mask_folders: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs of an image and a mask in folders of these names.

    Args:
        root: a folder ``images`` lies in it, or in folders below.
        images: name of the folders of images.
        mask_folders: names of the folders of masks beside them: the first that is there.

    Raises:
        DataError: there is no image, or one has no mask; names it.
    """
    pairs: list[tuple[str, str]] = []
    for folder in _image_folders(root, images):
        place = next((folder.parent / name for name in mask_folders if (folder.parent / name).is_dir()), None)
        if place is None:
            raise DataError(f"{folder} has no folder of masks beside it; expected one of {', '.join(mask_folders)}")
        masks = _by_stem(place)
        for stem, path in sorted(_by_stem(folder).items()):
            if stem not in masks:
                raise DataError(f"{path} has no mask in {place}; add it, or remove the image")
            pairs.append((path, masks[stem]))
    if not pairs:
        raise DataError(f"{root} has no folder {images} with images; {content_of(root)}")
    return pairs


def _refuse_leaks(parts: Mapping[str, Sequence[tuple[str, str]]], root: Path) -> None:
    for part in ("val", "test"):
        both = sorted(set(parts["train"]) & set(parts.get(part, ())))
        if both:
            raise DataError(
                f"data.parts: {_below(both[0][0], root)} and {len(both) - 1} more are in train and in {part}; a model "
                "is not tested on what it was trained on"
            )


def _by_stem(folder: Path) -> dict[str, str]:
    """Paths of all images below a folder, by what names them for their masks.

    Raises:
        DataError: two have the same name but for the suffix.
    """
    found: dict[str, str] = {}
    for path in files_below(folder):
        other = found.setdefault(_stem(path, folder), path)
        if other != path:
            raise DataError(f"{other} and {path} have the same name, by which masks are found; remove one of them")
    return found


def _image_folders(root: Path, name: str, depth: int = 3) -> list[Path]:
    """Folders of that name, at most ``depth`` levels below."""
    found = []
    for folder in folders_in(root):
        if folder.name == name:
            found.append(folder)
        elif depth > 1:
            found += _image_folders(folder, name, depth - 1)
    return found


def _below(path: str, root: Path) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/")


def _stem(path: str, folder: Path) -> str:
    return os.path.splitext(os.path.relpath(path, folder))[0]  # noqa: PTH122 - one of a million
