"""Scenes in folders by class: ``root/<class>/*``, or ``root/{train,val,test}/<class>/*``."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from exp.data.images.listing import PARTS, Listing, content_of, files_below, folders_in, image_files, split
from exp.errors import DataError

__all__ = ["HELD_OUT", "check", "class_folders", "find"]

HELD_OUT = (0.9, 0.1, 0.0)
"""Shares of train and val where a data set comes without a validation part."""
_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
_EXPECTED = "expected: <data.root>/<class>/*.jpg, or <data.root>/{train,val,test}/<class>/*.jpg"


def check(root: Path) -> None:
    """Refuse a root without folders of images, by looking at folder names and the first class only.

    Raises:
        DataError: says what was expected, what is there, and which root may be meant.
    """
    parts = part_folders(root)
    folders = folders_in(parts["train"] if parts else root)
    if parts and "train" not in parts:
        raise DataError(f"data.root={root} has no train folder\n  {_EXPECTED}\n  {content_of(root)}")
    if any(image_files(folder) for folder in folders[:3]):
        return
    hints = [f"a level deeper there is one: data.root={folder}" for folder in folders if _is_root(folder)]
    if image_files(root):
        hints.append(f"data.root seems to be the folder of one class: data.root={root.parent}")
    raise DataError(
        "\n  ".join([f"data.root={root} has no folders of images by class", _EXPECTED, content_of(root), *hints])
    )


def find(root: Path, fractions: Sequence[float], classes: Sequence[str] | None) -> Listing:
    """All samples.

    Args:
        root: see the module.
        fractions: of train, val and test where the folders do not say.
        classes: names in the order of their numbers; None: all folders, sorted.

    Raises:
        DataError: a folder is no class, or a part is empty.
    """
    check(root)
    places = part_folders(root)
    names = list(
        classes or sorted({folder.name for place in places.values() or [root] for folder in folders_in(place)})
    )
    if not places:
        return Listing(names, split(class_folders(root, names), fractions, root, by_class=True))
    parts = {part: class_folders(place, names) for part, place in places.items()}
    if "val" not in parts:
        parts.update(split(parts["train"], HELD_OUT, root, by_class=True))
    for part, samples in parts.items():
        if not samples:
            raise DataError(f"{places.get(part, root)} holds no images; {_EXPECTED}")
    return Listing(names, parts)


def part_folders(root: Path) -> dict[str, Path]:
    """Folders of parts, by part."""
    found = {folder.name.lower(): folder for folder in folders_in(root)}
    return {part: found[name] for part in PARTS for name in _NAMES[part] if name in found}


def class_folders(place: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """(path, class number) of every image in the folders of ``place``.

    Raises:
        DataError: a folder is none of the classes.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    samples = []
    for folder in folders_in(place):
        if folder.name not in numbers:
            raise DataError(f"{folder} is none of the classes {', '.join(classes)}; correct data.classes")
        samples += [(path, numbers[folder.name]) for path in files_below(folder)]
    return samples


def _is_root(folder: Path) -> bool:
    inner = folders_in(folder)
    return any(image_files(place) for place in inner[:3])
