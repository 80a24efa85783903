"""Layouts of MMRS-1M (EarthGPT, Zhang et al., arXiv 2401.16822). Imports neither torch nor numpy.

Scenes: ``root/classification/<data set>/{train,test}/<category>/*``, or ``.../images/*`` with the categories only in
``root/json/classification/*_cls.json``. Masks, which users add themselves:
``root/segmentation/[<data set>/][{train,val,test}/]images`` beside ``labels``, ``masks`` or ``annotations``.
Any of the data sets may be missing.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Mapping

from exp.errors import DataError, nearest
from exp.vision.data import layouts
from exp.vision.data.layouts import Layout, Listing, Splits

__all__ = ["MMRS1M", "MMRS1MMasks", "modality_in", "modality_of"]

_SAR = ("hrsid", "sarv2", "ssdd")
_MODALITIES = ("optical", "sar", "infrared")


def modality_of(name: str, declared: Mapping[str, str] | None = None) -> str:
    """The modality of a data set: ``sar``, ``infrared`` or ``optical``.

    Args:
        name: of the data set.
        declared: ``data.modalities``; a set that it lacks is judged by its name.
    """
    for each, modality in (declared or {}).items():
        if _plain(each) == _plain(name):
            return modality
    if _plain(name) in _SAR or re.search(r"(?<![A-Z])SAR(?![A-Z])", name):
        return "sar"
    if "infrared" in name.lower() or _plain(name).startswith("hituav") or "IR" in re.split(r"[^A-Za-z]+", name):
        return "infrared"
    return "optical"


def modality_in(path: str | os.PathLike[str], declared: Mapping[str, str] | None = None) -> str:
    """The modality of an image file, by its data set: the folder in ``classification``, ``segmentation`` or
    ``detection``; ``declared`` as in :func:`modality_of`.
    """
    pieces = Path(path).parts
    for number, piece in enumerate(pieces[:-1]):
        if piece in ("classification", "segmentation", "detection"):
            return modality_of(pieces[number + 1], declared)
    return "optical"


class MMRS1M(Layout):
    """The scenes of MMRS-1M, with the union of the classes of the chosen data sets.

    Categories that differ only in case, spaces and punctuation are one class; a single data set keeps its own names. If
    a data set has no validation split, a tenth of each class of its training split is used.

    Keys: ``data.datasets`` and ``data.modality`` (null: all that are there), ``data.split_ratio``, ``data.classes``.
    """

    kind = "classification"
    expected = "<data.root>/classification/<data set>/{train,test}/<category>/*"

    def check(self, root: Path) -> None:
        """See :meth:`Layout.check`."""
        self._chosen(root)

    def find(self, root: Path) -> Listing:
        """See :meth:`Layout.find`."""
        folders = self._chosen(root)
        notes: dict[str, Any] = {"datasets": [folder.name for folder in folders]}
        answers: dict[str, dict[str, str]] | None = None
        splits: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for folder in folders:
            found = _in_folders(folder)
            if not found:
                answers = _answers(root) if answers is None else answers
                found, unlabeled = _answered(folder, answers[_plain(folder.name)])
                if unlabeled:
                    notes.setdefault("without_label", {})[folder.name] = unlabeled
            for split, samples in layouts.complete(found, self.config.split_ratio, root, by_class=True).items():
                splits[split] += samples
        labels = {label for samples in splits.values() for _, label in samples}
        classes = list(self.config.classes or sorted(_united(labels, own=len(folders) == 1)))
        return self._described(Listing(classes, layouts.numbered(splits, classes, _key), notes), folders)

    def _chosen(self, root: Path) -> list[Path]:
        """Folders of the data sets that the keys choose, sorted.

        Raises:
            DataError: one of ``data.datasets`` is missing, or there are none; the message lists those that exist.
        """
        names, modality = self.config.datasets, self.config.modality
        above = root / self.kind
        if not above.is_dir():
            raise layouts.refusal(f"data.root={root} has no folder {self.kind} of MMRS-1M", self.expected, root)
        sets = {_plain(folder.name): folder for folder in self._sets(above)}
        wanted = sorted(sets if names is None else {_plain(name) for name in names})
        declared = self.config.modalities or {}
        for name, value in declared.items():
            if value not in _MODALITIES or _plain(name) not in sets:
                raise DataError(
                    f"data.modalities={{{name}: {value}}} must give a folder in {above} one of the modalities "
                    f"{', '.join(_MODALITIES)}{nearest(name, [folder.name for folder in sets.values()])}"
                )
        fits = {
            key for key, each in sets.items() if each == above or modality in (None, modality_of(each.name, declared))
        }
        if not fits.intersection(wanted) or (names is not None and not fits.issuperset(wanted)):
            kinds = [f"{folder.name} ({modality_of(folder.name, declared)})" for folder in sets.values()]
            there = ", ".join(kinds) or "none"
            raise DataError(
                f"data.datasets={names}, data.modality={modality}: {above} has not all of it; there are {there}"
            )
        return [sets[key] for key in wanted if key in fits]

    def _sets(self, above: Path) -> list[Path]:
        return layouts.folders_in(above)

    def _described(self, listing: Listing, folders: list[Path]) -> Listing:
        """Add the modalities to a listing if they have an effect; those that follow from a name are reported."""
        config = self.config
        if not (config.modality_statistics or config.modality_weights or config.modality):
            return listing
        found = {folder.name: modality_of(folder.name, config.modalities) for folder in folders}
        listing.notes["modalities"] = found
        guessed = [name for name in found if _plain(name) not in map(_plain, config.modalities or ())]
        if guessed:
            kinds = ", ".join(f"{name} {found[name]}" for name in guessed)
            listing.warnings.append(f"note: modalities by the names of the data sets: {kinds}; others: data.modalities")
        return listing


class MMRS1MMasks(MMRS1M):
    """Masks beside MMRS-1M, with the classes of ``data.classes``. Further keys: ``data.images``, ``data.masks``."""

    kind = "segmentation"
    knows_classes = False
    expected = (
        "<data.root>/segmentation/[<data set>/][{train,val,test}/]images beside labels, masks or annotations, where a "
        "mask has its image's name; MMRS-1M as published has no masks: add yours"
    )

    def find(self, root: Path) -> Listing:
        """See :meth:`Layout.find`."""
        folders = self._chosen(root)
        names = list(dict.fromkeys([self.config.masks, "labels", "masks", "annotations"]))
        splits: Splits = defaultdict(list)
        for folder in folders:
            found: Splits = {}
            for split, place in layouts.split_folders(folder).items():
                images = layouts.folders_named(place, self.config.images)
                masks = [[each.parent / name for name in names] for each in images]
                beside = [(each, next(filter(Path.is_dir, some), some[0])) for each, some in zip(images, masks)]
                found[split], _ = layouts.paired(beside, self.config.on_error == "skip")
                if not found[split]:
                    raise DataError(f"{place} has no folder {self.config.images} with images")
            for split, samples in layouts.complete(found, self.config.split_ratio, root, by_class=False).items():
                splits[split] += samples
        return self._described(Listing([], dict(splits), {"datasets": [folder.name for folder in folders]}), folders)

    def _sets(self, above: Path) -> list[Path]:
        is_single = (above / self.config.images).is_dir() or "" not in layouts.split_folders(above)
        return [above] if is_single else layouts.folders_in(above)


def _in_folders(folder: Path) -> Splits:
    """Samples of ``{train,test}/<category>/*`` by split; empty if there are no such folders."""
    splits = {split: layouts.by_folder(place) for split, place in layouts.split_folders(folder).items() if split}
    if not all(splits.values()):
        raise DataError(f"{folder} has a split without images; expected: {folder}/<split>/<category>/*.jpg")
    return splits


def _answered(folder: Path, answers: dict[str, str]) -> tuple[Splits, int]:
    """Images of a data set with their categories, and the number of images without one, which are left out."""
    files = {path[len(str(folder)) + 1 :]: path for path in layouts.files_below(folder)}
    lost = [name for name in answers if name not in files]
    if lost or not answers:
        missing = f" ({folder / lost[0]} is missing, and {len(lost) - 1} more)" if lost else ""
        raise DataError(
            f"{folder} has neither train and test folders nor the images of json/classification/*_cls.json{missing}; "
            "copy them anew, or choose others with data.datasets"
        )
    return {"": [(files[name], answer) for name, answer in sorted(answers.items())]}, len(files) - len(answers)


def _answers(root: Path) -> dict[str, dict[str, str]]:
    """Read ``*_cls.json``: plain name of a data set -> path of an image below its folder -> category.

    Raises:
        DataError: a file is not a list of images and answers.
    """
    answers: dict[str, dict[str, str]] = defaultdict(dict)
    for file in sorted((root / "json" / "classification").glob("*.json")):
        try:
            for entry in json.loads(file.read_text(encoding="utf-8")):
                path = entry["image"] if "image" in entry else entry["image_path"]
                answer = next(turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt")
                name, _, below = f"/{path}".replace("\\", "/").partition("/classification/")[2].partition("/")
                answers[_plain(name)][below] = answer.strip().rstrip(".")
        except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError) as error:
            raise DataError(
                f"{file} is no list of images and answers ({error!r}); expected: "
                '{"image": ..., "conversations": [{"from": "human", ...}, {"from": "gpt", "value": <category>}]}'
            ) from error
    return answers


def _plain(name: str) -> str:
    """The name of a data set in lower case, without punctuation and ``_split``."""
    return _key(re.sub(r"_split$", "", name.lower()))


def _key(label: str) -> str:
    return re.sub(r"[^a-z0-9]", "", label.lower())


def _united(labels: set[str], own: bool) -> set[str]:
    """One name for all spellings of each category.

    Args:
        labels: all spellings.
        own: whether names stay as they are; else they become separate words in lower case.
    """
    by_key: dict[str, set[str]] = defaultdict(set)
    for label in labels:
        words = re.sub(r"[\s_\-]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", label)).strip().lower()
        by_key[_key(label)].add(label if own else words)
    return {min(names, key=lambda name: (-name.count(" "), name)) for names in by_key.values()}
