"""Scenes in folders by class: ``root/<class>/*``, or ``root/{train,val,test}/<class>/*``."""

from __future__ import annotations

import difflib
from collections import Counter
from pathlib import Path
from typing import Any, Mapping, Sequence

from exp.data.places import content_of
from exp.errors import DataError
from exp.vision.data.listing import (
    PARTS,
    Listing,
    archives_in,
    files_below,
    folders_in,
    image_files,
    not_read,
    refuse_twins,
    split,
)

__all__ = ["HELD_OUT", "check", "find", "part_folders"]

HELD_OUT = (0.9, 0.1, 0.0)
"""Shares of train and val where a data set comes without a validation split."""
_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
_LOOSE = "images in no folder"
_EXPECTED = "expected: <data.root>/<class>/*.jpg, or <data.root>/{train,val,test}/<class>/*.jpg"


def check(root: Path, unlabelled: bool = False) -> None:
    """Refuse a root without folders of images, by looking at folder names, and into the first that is not empty.

    Args:
        root: see the module.
        unlabelled: whether images need no class: then they may lie in ``root``, or in a part, themselves.

    Raises:
        DataError: says what was expected, what is there, and which root may be meant.
    """
    parts = part_folders(root)
    if parts and "train" not in parts:
        raise DataError(f"data.root={root} has no train folder\n  {_EXPECTED}\n  {content_of(root)}")
    place = parts["train"] if parts else root
    if unlabelled and image_files(place):
        return
    folders = folders_in(place)
    if any(image_files(folder) for folder in folders):  # the first that is not empty ends the search
        return
    hints = _taken_for_parts(root, parts)
    hints += [f"a level deeper there is one: data.root={folder}" for folder in folders if _is_root(folder)]
    if not unlabelled and image_files(root):
        hints.append(f"data.root seems to be the folder of one class: data.root={root.parent}")
    hints += not_read([place, *folders])
    raise DataError(
        "\n  ".join([f"data.root={root} has no folders of images by class", _EXPECTED, content_of(root), *hints])
    )


def find(root: Path, fractions: Sequence[float], classes: Sequence[str] | None, unlabelled: bool = False) -> Listing:
    """All samples.

    Args:
        root: see the module.
        fractions: of train, val and test where the folders do not say.
        classes: names in the order of their numbers; None: all folders, sorted.
        unlabelled: see :func:`check`.

    Raises:
        DataError: a folder is no class, or a part is empty.
    """
    check(root, unlabelled)
    places = part_folders(root)
    above = list(places.values()) or [root]
    for place in above:
        refuse_twins(folders_in(place), "two classes")
    found = {place: {folder.name: files_below(folder) for folder in folders_in(place)} for place in above}
    if unlabelled:
        for place, folders in found.items():
            folders[_LOOSE] = image_files(place)
    filled = {name for folders in found.values() for name, files in folders.items() if files}
    empty = sorted({name for folders in found.values() for name in folders} - filled - {_LOOSE})
    names = list(sorted(filled) if unlabelled else classes or sorted(filled))
    notes: dict[str, Any] = {}
    said = archives_in(dict.fromkeys([root, *above]))
    said += [f"warning: {hint}" for hint in _taken_for_parts(root, places)]
    for title, left_out in (("empty_folders", empty), ("classes_without_images", sorted(set(names) - filled))):
        if left_out:
            notes[title] = left_out
            said.append(f"warning: {title.replace('_', ' ')} of {root}: {', '.join(left_out)}")
    if not unlabelled:
        said += _odd_classes(root, names)
    unread = not_read(folder for place in above for folder in folders_in(place) if folder.name in empty)
    said += [f"warning: in empty folders {line}" for line in unread]
    labelled = {place: _labelled(place, folders, names) for place, folders in found.items()}
    if not places:
        parts = split(labelled[root], fractions, root, by_class=True)
        return Listing(names, parts, notes if unlabelled else {**notes, **_uneven(names, parts, said)}, said)
    parts = {part: labelled[place] for part, place in places.items()}
    if "val" not in parts:
        parts.update(split(parts["train"], HELD_OUT, root, by_class=True))
    for part, samples in parts.items():
        if not samples:
            place = places.get(part, root)
            hints = not_read([place, *folders_in(place)])
            raise DataError("\n  ".join([f"{place} holds no images; {_EXPECTED}", *hints]))
    return Listing(names, parts, notes if unlabelled else {**notes, **_uneven(names, parts, said)}, said)


def _odd_classes(root: Path, names: Sequence[str]) -> list[str]:
    """Classes that are hardly meant: one alone, or two whose names differ in case alone."""
    if len(names) == 1:
        return [f"warning: {names[0]} is the only class of {root}: every figure is perfect, whatever is learned"]
    alike = [group for group in _by_casefold(names).values() if len(group) > 1]
    return [
        f"warning: classes {' and '.join(group)} differ in case alone; join their folders if they are one"
        for group in alike
    ]


def _by_casefold(names: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.casefold(), []).append(name)
    return groups


def _taken_for_parts(root: Path, parts: Mapping[str, Path]) -> list[str]:
    """What to say where folders with images lie beside those that were taken for parts: these may be classes."""
    if not parts:
        return []
    beside = [folder.name for folder in folders_in(root) if folder not in parts.values() and image_files(folder)]
    if not beside:
        return []
    taken = ", ".join(f"{folder.name} ({part})" for part, folder in parts.items())
    return [
        f"{root}: folders were taken for parts of the data: {taken}; {', '.join(beside)} beside them is not used: if "
        "all of them are classes, rename those that have a part's name"
    ]


def part_folders(root: Path) -> dict[str, Path]:
    """Folders of parts, by part.

    Raises:
        DataError: two are for the same one.
    """
    found: dict[str, Path] = {}
    for folder in folders_in(root):
        for part in PARTS:
            if folder.name.lower() in _NAMES[part] and found.setdefault(part, folder) != folder:
                raise DataError(f"{found[part]} and {folder} are both the {part} split; rename or join them")
    return {part: found[part] for part in PARTS if part in found}


def _labelled(place: Path, folders: Mapping[str, Sequence[str]], classes: Sequence[str]) -> list[tuple[str, int]]:
    """(path, class number) of every image.

    Args:
        place: for messages.
        folders: images by the name of their folder.
        classes: names.

    Raises:
        DataError: a folder with images is none of the classes.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    samples = []
    for name, files in folders.items():
        if files and name not in numbers:
            raise DataError(f"{place / name} is none of the classes {', '.join(classes)}; correct data.classes")
        samples += [(path, numbers[name]) for path in files]
    return samples


def _uneven(classes: Sequence[str], parts: Mapping[str, Sequence[tuple[str, int]]], said: list[str]) -> dict[str, Any]:
    """Classes that cannot be learned, or that no figure knows of; said, and noted.

    Args:
        classes: names.
        parts: (path, class number) of each sample, by part.
        said: gets a line for each.

    Returns:
        ``classes_without_training_images`` and ``classes_not_measured``, as far as there are such.
    """
    counts = {part: Counter(classes[number] for _, number in samples) for part, samples in parts.items()}
    trained = [name for name in classes if counts["train"][name]]
    held = [part for part in counts if part != "train"]
    unknown = [name for name in classes if not counts["train"][name] and any(counts[part][name] for part in held)]
    unmeasured = [name for name in trained if not any(counts[part][name] for part in held)]
    for name in unknown:
        there = ", ".join(f"{part}: {counts[part][name]}" for part in held if counts[part][name])
        folded = [other for other in trained if other.lower() == name.lower()]
        near = folded or difflib.get_close_matches(name, trained, 1, 0.8)
        hint = f"; do you mean {near[0]}?" if near else ""
        said.append(f"warning: no training image of class {name} ({there}), so it cannot be learned{hint}")
    for name in unmeasured:
        said.append(f"warning: no image of class {name} in {' or '.join(held)}, so no figure tells of it")
    found = {"classes_without_training_images": unknown, "classes_not_measured": unmeasured}
    return {title: names for title, names in found.items() if names}


def _is_root(folder: Path) -> bool:
    inner = folders_in(folder)
    return any(image_files(place) for place in inner[:3])
