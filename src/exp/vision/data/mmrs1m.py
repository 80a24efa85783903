"""Layouts of MMRS-1M (EarthGPT, Zhang et al., arXiv 2401.16822). Imports neither torch nor numpy.

Scenes: ``root/classification/<data set>/{train,test}/<category>/*``, or ``.../images/*`` with the categories only in
``root/json/classification/*_cls.json``. Masks, which users add themselves:
``root/segmentation/[<data set>/][{train,val,test}/]images`` beside ``labels``, ``masks`` or ``annotations``.
Any of the data sets may be missing.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from exp.errors import DataError
from exp.vision.data import layouts
from exp.vision.data.layouts import Layout, SampleIndex, Splits

__all__ = ["MMRS1M", "MMRS1MMasks"]


class MMRS1M(Layout):
    """The scenes of MMRS-1M, with the union of the classes of the chosen data sets.

    Categories that differ only in case, spaces and punctuation are one class; a single data set keeps its own names. If
    a data set has no validation split, a tenth of each class of its training split is used.

    Keys: ``data.datasets`` (null: all that are there), ``data.split_ratio``, ``data.classes``.
    """

    kind = "classification"
    expected = "<data.root>/classification/<data set>/{train,test}/<category>/*"

    def check(self, root: Path) -> None:
        """See :meth:`Layout.check`."""
        self._selected_folders(root)

    def find(self, root: Path) -> SampleIndex:
        """See :meth:`Layout.find`."""
        folders = self._selected_folders(root)
        notes: dict[str, Any] = {"datasets": [folder.name for folder in folders]}
        answers: dict[str, dict[str, str]] | None = None
        splits: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for folder in folders:
            labeled = _samples_in_folders(folder)
            if not labeled:
                answers = _read_answers(root) if answers is None else answers
                labeled, unlabeled = _samples_from_answers(folder, answers[_dataset_key(folder.name)])
                if unlabeled:
                    notes.setdefault("without_label", {})[folder.name] = unlabeled
            complete = layouts.add_missing_splits(labeled, self.config.split_ratio, root, by_class=True)
            for split, samples in complete.items():
                splits[split] += samples
        labels = {label for samples in splits.values() for _, label in samples}
        classes = list(self.config.classes or sorted(_merge_spellings(labels, keep_spelling=len(folders) == 1)))
        return SampleIndex(classes, layouts.encode_labels(splits, classes, _key), notes)

    def _selected_folders(self, root: Path) -> list[Path]:
        """Folders of the data sets that the keys choose, sorted.

        Raises:
            DataError: one of ``data.datasets`` is missing, or there are none; the message lists those that exist.
        """
        names, parent = self.config.datasets, root / self.kind
        if not parent.is_dir():
            raise layouts.layout_error(f"data.root={root} has no folder {self.kind} of MMRS-1M", self.expected, root)
        folders = {_dataset_key(folder.name): folder for folder in self._dataset_folders(parent)}
        selected = sorted(folders if names is None else {_dataset_key(name) for name in names})
        if not selected or not set(selected) <= folders.keys():
            available = ", ".join(folder.name for folder in folders.values()) or "none"
            raise DataError(f"data.datasets={names}: {parent} lacks some; available: {available}")
        return [folders[key] for key in selected]

    def _dataset_folders(self, parent: Path) -> list[Path]:
        return layouts.subfolders(parent)


class MMRS1MMasks(MMRS1M):
    """Masks beside MMRS-1M, with the classes of ``data.classes``. Further keys: ``data.images``, ``data.masks``."""

    kind = "segmentation"
    defines_classes = False
    expected = (
        "<data.root>/segmentation/[<data set>/][{train,val,test}/]images beside labels, masks or annotations, where a "
        "mask has its image's name; MMRS-1M as published has no masks: add yours"
    )

    def find(self, root: Path) -> SampleIndex:
        """See :meth:`Layout.find`."""
        folders = self._selected_folders(root)
        names = list(dict.fromkeys([self.config.masks, "labels", "masks", "annotations"]))
        splits: Splits = defaultdict(list)
        for folder in folders:
            labeled: Splits = {}
            for split, split_folder in layouts.split_folders(folder).items():
                pairs = []
                for images in layouts.find_folders(split_folder, self.config.images):
                    masks = [images.parent / name for name in names]
                    pairs.append((images, next(filter(Path.is_dir, masks), masks[0])))
                labeled[split], _ = layouts.pair_masks(pairs, self.config.on_error == "skip")
                if not labeled[split]:
                    raise DataError(f"{split_folder} has no folder {self.config.images} with images")
            complete = layouts.add_missing_splits(labeled, self.config.split_ratio, root, by_class=False)
            for split, samples in complete.items():
                splits[split] += samples
        return SampleIndex([], dict(splits), {"datasets": [folder.name for folder in folders]})

    def _dataset_folders(self, parent: Path) -> list[Path]:
        is_single = (parent / self.config.images).is_dir() or "" not in layouts.split_folders(parent)
        return [parent] if is_single else layouts.subfolders(parent)


def _samples_in_folders(folder: Path) -> Splits:
    """Samples of ``{train,test}/<category>/*`` by split; empty if there are no such folders."""
    folders = layouts.split_folders(folder)
    splits = {split: layouts.images_by_folder(folders[split]) for split in folders if split}
    if not all(splits.values()):
        raise DataError(f"{folder} has a split without images; expected: {folder}/<split>/<category>/*.jpg")
    return splits


def _samples_from_answers(folder: Path, answers: dict[str, str]) -> tuple[Splits, int]:
    """Images of a data set with their categories, and the number of images without one, which are left out."""
    files = {path[len(str(folder)) + 1 :]: path for path in layouts.images_below(folder)}
    not_found = [name for name in answers if name not in files]
    if not_found or not answers:
        missing = f" ({folder / not_found[0]} is missing, and {len(not_found) - 1} more)" if not_found else ""
        raise DataError(
            f"{folder} has neither train and test folders nor the images of json/classification/*_cls.json{missing}; "
            "copy them anew, or choose others with data.datasets"
        )
    return {"": [(files[name], answer) for name, answer in sorted(answers.items())]}, len(files) - len(answers)


def _read_answers(root: Path) -> dict[str, dict[str, str]]:
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
                answers[_dataset_key(name)][below] = answer.strip().rstrip(".")
        except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError) as error:
            raise DataError(
                f"{file} is no list of images and answers ({error!r}); expected: "
                '{"image": ..., "conversations": [{"from": "human", ...}, {"from": "gpt", "value": <category>}]}'
            ) from error
    return answers


def _dataset_key(name: str) -> str:
    """The name of a data set in lower case, without punctuation and ``_split``."""
    return _key(re.sub(r"_split$", "", name.lower()))


def _key(label: str) -> str:
    return re.sub(r"[^a-z0-9]", "", label.lower())


def _merge_spellings(labels: set[str], keep_spelling: bool) -> set[str]:
    """One name for all spellings of each category.

    Args:
        labels: all spellings.
        keep_spelling: whether names stay as they are; else they become separate words in lower case.
    """
    by_key: dict[str, set[str]] = defaultdict(set)
    for label in labels:
        words = re.sub(r"[\s_\-]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", label)).strip().lower()
        by_key[_key(label)].add(label if keep_spelling else words)
    return {min(names, key=lambda name: (-name.count(" "), name)) for names in by_key.values()}
