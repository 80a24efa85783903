"""Scene classification sets of MMRS-1M (EarthGPT, Zhang et al., arXiv 2401.16822), as users have them on disk.

``root/classification/<data set>/{train,test}/<category>/*``, or ``.../images/*`` with the categories only in
``root/json/classification/*_cls.json``. A user may have any of the sets.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from exp.data.places import content_of
from exp.errors import DataError
from exp.vision.data.folders import HELD_OUT, part_folders
from exp.vision.data.listing import Listing, files_below, folders_in, split

__all__ = ["MODALITIES", "PUBLISHED", "chosen", "find", "modality_in", "modality_of"]

PUBLISHED = ("DCSR", "EuroSAT", "FGSCR", "NWPU-RESISC45", "RSSCN7", "UCMerced", "WHU-RS19")
"""Scene classification sets that MMRS-1M has."""
MODALITIES = ("optical", "sar", "infrared")
_SAR = ("hrsid", "sarv2", "ssdd")
_SIC = {"dscr": "dcsr"}  # its file of answers is DSCR_cls.json


class _Found(NamedTuple):
    """What one data set holds: (path, name of the category) by part, or without parts."""

    parts: dict[str, list[tuple[str, str]]]
    rest: list[tuple[str, str]]


def modality_of(name: str) -> str:
    """``sar``, ``infrared`` or ``optical``: the name of a data set tells."""
    if plain(name) in _SAR:
        return "sar"
    if "infrared" in name.lower() or plain(name).startswith("hituav") or "IR" in re.split(r"[^A-Za-z]+", name):
        return "infrared"
    return "optical"


def modality_in(path: str | os.PathLike[str]) -> str:
    """The modality of an image file: the name of its data set tells, the folder below that of its kind of task."""
    pieces = Path(path).parts
    for number, piece in enumerate(pieces[:-1]):
        if piece in ("classification", "segmentation", "detection"):
            return modality_of(pieces[number + 1])
    return "optical"


def plain(name: str) -> str:
    """A data set's name without case, signs and ``_split``, and as its folder has it."""
    bare = re.sub(r"[^a-z0-9]", "", re.sub(r"_(split|cls)$", "", name.lower()))
    return _SIC.get(bare, bare)


def chosen(root: Path, names: Sequence[str] | None, modality: str | None) -> tuple[list[Path], list[str]]:
    """Folders of the data sets that a configuration means; looks at folder names only.

    Args:
        root: see the module.
        names: of data sets; None: all that are there.
        modality: only those; None: any.

    Returns:
        Folders, sorted, and the names of published sets that are not there (where ``names`` is None).

    Raises:
        DataError: one that is asked for is missing, or there are none; lists what there is.
    """
    above = root / "classification"
    if not above.is_dir():
        near = (root.parent, root / "data", root / "mmrs1m" / "data")
        hints = [f"there is one here: data.root={place}" for place in near if (place / "classification").is_dir()]
        expected = "expected: <data.root>/classification/<data set>/{train,test}/<category>/*"
        raise DataError("\n  ".join([f"data.root={root} holds no MMRS-1M", expected, content_of(root), *hints]))
    folders = {plain(folder.name): folder for folder in folders_in(above)}
    if names is None:
        wanted = [key for key in sorted(folders) if modality in (None, modality_of(folders[key].name))]
        missing = [name for name in PUBLISHED if plain(name) not in folders and modality in (None, modality_of(name))]
    else:
        lacking = [name for name in names if plain(name) not in folders]
        if lacking:
            raise DataError(
                f"data.datasets: {', '.join(lacking)} is not in {above}; there are "
                f"{', '.join(folder.name for folder in folders.values()) or 'none'}"
            )
        wanted, missing = sorted({plain(name) for name in names}), []
        others = [name for name in names if modality not in (None, modality_of(name))]
        if others:
            raise DataError(
                f"data.datasets: {', '.join(others)} is not of data.modality={modality}; set one of them only"
            )
    if not wanted:
        there = ", ".join(f"{folder.name} ({modality_of(folder.name)})" for folder in folders.values())
        raise DataError(f"{above} holds no data set of data.modality={modality}; there are {there or 'none'}")
    return [folders[key] for key in wanted], missing


def find(
    root: Path,
    names: Sequence[str] | None,
    modality: str | None,
    fractions: Sequence[float],
    classes: Sequence[str] | None,
) -> Listing:
    """All samples of the chosen data sets, in the union of their label spaces.

    Categories that differ in case, spaces and signs only are one; a data set alone keeps its own names. Where a data
    set has no validation split, a tenth of its training split, by class, becomes it.

    Args:
        root: see the module.
        names: of data sets; None: all that are there.
        modality: ``optical``, ``sar``, ``infrared``; None: any.
        fractions: of train, val and test for data sets without parts.
        classes: names in the order of their numbers; None: all, sorted.

    Raises:
        DataError: a data set is missing or has no labels, or a category is none of ``classes``.
    """
    folders, missing = chosen(root, names, modality)
    found = {folder: _from_folders(folder) for folder in folders}
    notes: dict[str, Any] = {"datasets": [folder.name for folder in folders]}
    if missing:
        notes["missing_datasets"] = missing
    bare = [folder for folder, content in found.items() if not content.parts]
    if bare:
        answers = _answers(root, bare)
        for folder in bare:
            labelled, unlabelled = _labelled(folder, answers[folder], root)
            found[folder] = _Found({}, labelled)
            if unlabelled:
                notes.setdefault("without_label", {})[folder.name] = unlabelled
    spellings = {label for content in found.values() for samples in (*content.parts.values(), content.rest)
                 for _, label in samples}  # fmt: skip
    names_of = _united(spellings, own=len(folders) == 1)
    listed = list(classes or sorted(set(names_of.values())))
    numbers = {_key(name): number for number, name in enumerate(listed)}
    parts: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for content in found.values():
        for part, samples in _complete(content, fractions, root).items():
            for path, label in samples:
                if _key(label) not in numbers:
                    raise DataError(
                        f"{path}: {label} is none of the classes {', '.join(listed[:12])}; correct data.classes"
                    )
                parts[part].append((path, numbers[_key(label)]))
    return Listing(listed, dict(parts), notes)


def _complete(content: _Found, fractions: Sequence[float], root: Path) -> Mapping[str, list[tuple[str, str]]]:
    """Samples by part, with a validation split."""
    if not content.parts:
        return split(content.rest, fractions, root, by_class=True)
    parts = dict(content.parts)
    if "val" not in parts:
        parts.update(split(parts["train"], HELD_OUT, root, by_class=True))
    return parts


def _from_folders(folder: Path) -> _Found:
    """Samples of ``{train,test}/<category>/*``; nothing where there are no such folders."""
    parts = {}
    for part, place in part_folders(folder).items():
        parts[part] = [(path, category.name) for category in folders_in(place) for path in files_below(category)]
        if not parts[part]:
            raise DataError(f"{place} holds no images; expected: {place}/<category>/*.jpg")
    if parts and "train" not in parts:
        raise DataError(f"{folder} has no train folder\n  {content_of(folder)}")
    return _Found(parts, [])


def _labelled(folder: Path, answers: Mapping[str, str], root: Path) -> tuple[list[tuple[str, str]], int]:
    """Its images with their answers, and the number of those without one, which are left out."""
    files = {path[len(str(folder)) + 1 :]: path for path in files_below(folder)}
    lost = [name for name in answers if name not in files]
    if not answers:
        raise DataError(
            f"{folder} has neither train and test folders nor answers in {root / 'json' / 'classification'}; "
            f"add its *_cls.json, or choose others with data.datasets"
        )
    if lost:
        raise DataError(
            f"{folder / lost[0]} is missing, and {len(lost) - 1} more that its *_cls.json names; copy them anew"
        )
    return [(files[name], answer) for name, answer in sorted(answers.items())], len(files) - len(answers)


def _answers(root: Path, folders: Sequence[Path]) -> dict[Path, dict[str, str]]:
    """For each folder: path below it -> category. Files named after a data set are read first, others if need be."""
    place = root / "json" / "classification"
    files = sorted(place.glob("*.json")) if place.is_dir() else []
    answers: dict[Path, dict[str, str]] = {folder: {} for folder in folders}
    by_plain = {plain(folder.name): folder for folder in folders}
    named = [file for file in files if plain(file.stem) in by_plain]
    for group in (named, [file for file in files if file not in named]):
        if all(answers.values()):
            break
        for file in group:
            for path, answer in _entries(file):
                pieces = path.replace("\\", "/").split("/")
                if "classification" not in pieces:
                    continue
                below = pieces[pieces.index("classification") + 1 :]
                folder = by_plain.get(plain(below[0])) if below else None
                if folder is not None:
                    answers[folder]["/".join(below[1:])] = answer
    return answers


def _entries(file: Path) -> Iterator[tuple[str, str]]:
    """(path, answer) of a file of instructions.

    Raises:
        DataError: it is no such file; names the entry.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}; copy it anew") from error
    for number, entry in enumerate(entries):
        try:
            path = entry["image"] if "image" in entry else entry["image_path"]
            answer = next(turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt")
        except (KeyError, TypeError, StopIteration) as error:
            raise DataError(
                f"{file}, entry {number}: has no image and answer; expected: "
                '{"image": ..., "conversations": [{"from": "human", ...}, {"from": "gpt", "value": <category>}]}'
            ) from error
        yield path, answer.strip().rstrip(".")


def _key(label: str) -> str:
    return re.sub(r"[^a-z0-9]", "", label.lower())


def _united(spellings: set[str], own: bool) -> dict[str, str]:
    """One name for all spellings of a category.

    Args:
        spellings: all of them.
        own: whether a name stays as it is spelt; else it becomes words, where one spelling has them, in small letters.
    """
    by_key: dict[str, set[str]] = defaultdict(set)
    for label in spellings:
        words = re.split(r"[\s_\-]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", label).strip())
        by_key[_key(label)].add(label if own else " ".join(words).lower())
    names = {key: min(found, key=lambda name: (-name.count(" "), name)) for key, found in by_key.items()}
    return {label: names[_key(label)] for label in spellings}
