"""Layouts: where the images and labels of a data set are on disk. Imports neither torch nor numpy, for the parent.

``data.layout._target_`` names a :class:`Layout`. A new layout is a class, and a YAML file that names it.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import os
from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.resolve import resolve
from exp.data.fingerprint import folder_listing, sample_folder, shortened
from exp.errors import DataError, nearest

__all__ = ["ClassFolders", "ImageFolders", "Layout", "LoveDA", "MaskFolders", "SampleIndex", "image_files",
           "source_configs", "split_by_hash"]  # fmt: skip

SPLITS = ("train", "val", "test")
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".jp2", ".bmp", ".webp")
NAMED_FILES = 20  # most skipped files that a record or a message names
HELD_OUT = (0.9, 0.1, 0.0)  # shares of train, val and test of a training split without a validation split
_UNREAD = (
    ".zip", ".tar", ".gz", ".tgz", ".7z", ".rar", ".avif", ".heic", ".heif", ".gif", ".jxl", ".jfif", ".npy", ".npz",
    ".mat", ".h5", ".hdf5", ".hdf", ".nc", ".vrt", ".img", ".ecw", ".sid", ".dng", ".exr", ".ppm", ".pgm", ".tga",
)  # fmt: skip  # of images and archives
_ARCHIVE = "__MACOSX"  # a folder in archives made on a Mac, without images
_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_SOURCE_KEYS = {
    *("name", "root", "sample_data", "layout", "datasets", "bands", "value_range", "modality", "split_ratio", "splits"),
    *("classes", "images", "masks", "palette", "ignore_colors", "label_map", "ignore_values"),
}
_LOOSE = "images in no folder"

Sample = Tuple[str, Any]  # path of an image, and its class number or the path of its mask
Splits = Dict[str, List[Sample]]


@dataclass
class SampleIndex:
    """Samples of a data set.

    Attributes:
        classes: names; empty for masks whose classes are in ``data.palette`` or ``data.classes``.
        splits: samples of ``train``, ``val`` and optionally ``test``; without ``test``, ``val`` is the test split, too.
        notes: entries for the record of a run.
        warnings: lines that are shown before a run.
        label_map: file value -> class number; None: the keys of ``data`` decide.
        ignored: file values of ignored pixels; None: the keys of ``data`` decide.
    """

    classes: list[str]
    splits: Splits
    notes: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    label_map: dict[int, int] | None = None
    ignored: Sequence[int] | None = None


class Layout(abc.ABC):
    """Finds the files of a data set.

    Attributes:
        defines_classes: whether :meth:`find` returns classes; else masks need ``data.palette`` or ``data.classes``.
        labeled: whether samples have labels. Of several sources, one without is for distillation: all of its images are
            training images.

    Args:
        config: the keys of ``data``; keys of a custom layout are in ``config.layout``.
    """

    defines_classes = True
    labeled = True

    def __init__(self, config: Any) -> None:
        self.config = config

    def check(self, root: Path) -> None:
        """Refuse a folder without this layout, by its folders only; called before any process starts.

        Raises:
            DataError: the layout does not fit; the message has what was expected and what was found.
        """

    @abc.abstractmethod
    def find(self, root: Path) -> SampleIndex:
        """All samples below ``root``.

        Raises:
            DataError: files are missing, or not where the layout expects them.
        """


def build_layout(config: Any) -> Layout:
    """The layout that the keys of ``data`` name."""
    layout: Layout = resolve("data.layout._target_", str(config.layout["_target_"]), Layout)(config)
    return layout


class ClassFolders(Layout):
    """Scenes in folders by class: ``root/<class>/*``, or ``root/{train,val,test}/<class>/*``.

    Keys: ``data.split_ratio``, without folders of splits; ``data.classes``, names in the order of their numbers.
    """

    def check(self, root: Path) -> None:
        """See :meth:`Layout.check`."""
        folder = next(iter(split_folders(root).values()))
        folders = subfolders(folder)
        if not any(map(image_files, folders if self.labeled else [folder, *folders])):
            expected = "<data.root>/<class>/*.jpg, or <data.root>/{train,val,test}/<class>/*.jpg"
            raise layout_error(f"data.root={root} has no folders of images by class", expected, root)

    def find(self, root: Path) -> SampleIndex:
        """See :meth:`Layout.find`."""
        splits = {split: images_by_folder(folder) for split, folder in split_folders(root).items()}
        for split, folder in () if self.labeled else split_folders(root).items():
            splits[split] += [(path, _LOOSE) for path in image_files(folder)]
        class_names = sorted({name for members in splits.values() for _, name in members})
        index = SampleIndex(list((self.labeled and self.config.classes) or class_names), {})
        encoded = encode_labels(splits, index.classes)
        index.splits = add_missing_splits(encoded, self.config.split_ratio, root, by_class=True)
        folded = [name.casefold() for name in class_names]
        variants = [name for name, key in zip(class_names, folded) if folded.count(key) > 1]
        if self.labeled and variants:
            index.warnings.append(f"warning: classes {' and '.join(variants)} differ in case alone; join their folders")
        if self.labeled and len(index.classes) == 1:
            index.warnings.append(f"warning: {class_names[0]} is the only class of {root}: every figure is perfect")
        return index


class ImageFolders(ClassFolders):
    """Images without labels: like :class:`ClassFolders`, or files directly in ``root`` or in folders of splits."""

    labeled = False


class MaskFolders(Layout):
    """Images and masks in two folders, also at deeper levels: ``tile1/images/x.jpg`` and ``tile1/masks/x.png``.

    Keys: ``data.images`` and ``data.masks``, the names of these folders; ``data.split_ratio``, or ``data.splits``: for
    each split, patterns of image paths below ``root``; ``data.on_error=skip`` leaves out files without a partner.
    """

    defines_classes = False

    def check(self, root: Path) -> None:
        """See :meth:`Layout.check`."""
        images, masks = self.config.images, self.config.masks
        if not find_folders(root, images):
            expected = f"<data.root>/{images}/x.jpg beside <data.root>/{masks}/x.png, or both in folders below"
            what = f"data.root={root} has no folder {images}; set data.images and data.masks to their names"
            raise layout_error(what, expected, root)

    def find(self, root: Path) -> SampleIndex:
        """See :meth:`Layout.find`."""
        folders = [(folder, folder.parent / self.config.masks) for folder in find_folders(root, self.config.images)]
        pairs, unpaired = pair_masks(folders, self.config.on_error == "skip")
        index = SampleIndex([], {})
        if unpaired:
            index.notes["without_partner"] = len(unpaired)
            skipped = f"{len(unpaired)} files have no partner and are left out, such as: {unpaired[0]}"
            index.warnings.append(f"warning: {skipped}")
        if not self.config.splits:
            index.splits = split_by_hash(pairs, self.config.split_ratio, root, by_class=False)
            return index
        for split, patterns in self.config.splits.items():
            index.splits[split] = [
                pair for pair in pairs if any(fnmatch(_relative(pair[0], root), pattern) for pattern in patterns)
            ]
            if not index.splits[split]:
                raise DataError(
                    f"data.splits.{split}={list(patterns)} matches none of the {len(pairs)} images in {root}"
                )
        train, *others = (set(index.splits.get(split, ())) for split in SPLITS)
        both = train & set().union(*others)
        if both:
            raise DataError(
                f"data.splits: {min(both)[0]} and {len(both) - 1} more are in train and in another split; do not test "
                "a model on what it was trained on"
            )
        return index


class LoveDA(Layout):
    """LoveDA (Wang et al., NeurIPS 2021), as published or as converted by OpenMMLab's tools.

    The published test split has no masks, so ``val`` is the test split, too.
    """

    classes = ("background", "building", "road", "water", "barren", "forest", "agriculture")
    expected = (
        "<data.root>/{Train,Val}/{Urban,Rural}/{images_png,masks_png}, or OpenMMLab's "
        "<data.root>/{img_dir,ann_dir}/{train,val}"
    )

    def check(self, root: Path) -> None:
        """See :meth:`Layout.check`."""
        for split in ("train", "val"):
            if not self._folders(root, split):
                raise layout_error(f"data.root={root} holds no LoveDA: no images for {split}", self.expected, root)

    def find(self, root: Path) -> SampleIndex:
        """See :meth:`Layout.find`."""
        splits = {split: pair_masks(self._folders(root, split))[0] for split in SPLITS[:2]}
        index = SampleIndex(list(self.classes), splits)
        if (root / "Train").is_dir():  # as published: 0 is no data, 1 to 7 are the classes
            index.label_map, index.ignored = {value: value - 1 for value in range(1, 8)}, [0]
        else:
            index.ignored = [255]
        return index

    def _folders(self, root: Path, split: str) -> list[tuple[Path, Path]]:
        """Folders of images, each with its folder of masks."""
        areas = [root / split.capitalize() / area for area in ("Urban", "Rural")]
        pairs = [(area / "images_png", area / "masks_png") for area in areas]
        pairs += [(root / "img_dir" / split, root / "ann_dir" / split)]
        return [pair for pair in pairs if pair[0].is_dir()]


def layout_error(what: str, expected: str, root: Path) -> DataError:
    """The error for a root without the expected layout: problem, expected layout, and content of the folder."""
    read = f"files that are read: {' '.join(SUFFIXES)}"
    return DataError(what, details=[f"expected: {expected}", read, folder_listing(root)], key="data.root", file=root)


def source_configs(config: Any) -> list[tuple[str, dict[str, Any], Any]]:
    """The sources in the keys of ``data``: name, own keys, and the keys of ``data`` with them.

    Without ``data.sources`` there is one, without keys of its own.

    Raises:
        DataError: a source has a key that no source has, or the name of another, or only some have a ``weight``.
    """
    if not config.sources:
        return [(config.name, {}, config)]
    base: Any = OmegaConf.to_object(config) if OmegaConf.is_config(config) else config
    sources: dict[str, tuple[str, dict[str, Any], Any]] = {}
    for number, entry in enumerate(base.sources):
        keys = dict(entry)
        for wrong in keys.keys() - _SOURCE_KEYS - {"weight", "class_map"}:
            raise DataError(f"data.sources[{number}].{wrong} is no key of a source{nearest(wrong, _SOURCE_KEYS)}")
        own = {key: value for key, value in keys.items() if key in _SOURCE_KEYS}
        try:
            typed: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(type(base)), own))
        except OmegaConfBaseException as error:
            reason = str(error.msg).splitlines()[0]
            raise DataError(f"data.sources[{number}].{error.full_key}: {reason}") from error
        own = {key: typed[key] for key in own}
        name = str(own.get("name") or Path(str(own.get("root") or own.get("sample_data") or f"source{number}")).name)
        if name in sources or not isinstance(keys.get("weight", 1.0), (int, float)) or keys.get("weight", 1.0) <= 0:
            raise DataError(f"data.sources[{number}]: {name} needs a name of its own, and a weight above 0, if any")
        if "root" in own or "sample_data" in own:
            own = {"root": None, "sample_data": None, **own}
        if not hasattr(base, "palette") and "classes" not in own:
            own["classes"] = None  # the names of its files
        sources[name] = (name, keys, dataclasses.replace(base, **own, sources=[]))
    if len({"weight" in keys for _, keys, _ in sources.values()}) > 1:
        raise DataError("data.sources: only some have a weight", "give all of them one, or none")
    return list(sources.values())


def encode_labels(splits: Mapping[str, Sequence[tuple[str, str]]], classes: Sequence[str], key: Any = str) -> Splits:
    """Replace names of classes by their numbers.

    Args:
        splits: (path, name of the class) each.
        classes: names in the order of their numbers.
        key: a function of a name; names with the same result are one class.

    Raises:
        DataError: a name is no class.
    """
    numbers = {key(name): number for number, name in enumerate(classes)}
    for members in splits.values():
        for path, name in members:
            if key(name) not in numbers:
                names = shortened(classes)
                raise DataError(f"{path}: {name} is none of the classes {names}; correct data.classes")
    return {split: [(path, numbers[key(name)]) for path, name in members] for split, members in splits.items()}


def data_root(root: str | os.PathLike[str] | None, sample_data: str | None, name: str) -> Path:
    """The folder of the data.

    Args:
        root: folder of the user's files; None: ``sample_data``.
        sample_data: folder among the sample data that come with exp; None: there are none for this data set.
        name: of the data set, for messages.

    Raises:
        DataError: there is no such folder.
    """
    if root is not None:
        folder = Path(root).expanduser().absolute()
        if not folder.is_dir():
            content = folder_listing(folder.parent)
            raise DataError(
                f"data.root={folder} is no folder", f"set it to the folder of {name}", [content], key="data.root"
            )
        return folder
    if sample_data is None:
        raise DataError(f"data.root is not set, and {name} does not come with exp; set data.root to its folder")
    return sample_folder(sample_data)


def split_folders(root: Path) -> dict[str, Path]:
    """Folders of splits, in the order of :data:`SPLITS`; ``{"": root}`` if there are none.

    Raises:
        DataError: two folders are for the same split, or there is no train folder.
    """
    folders: dict[str, Path] = {}
    for folder in subfolders(root):
        split = _FOLDERS.get(folder.name.lower())
        if split and folders.setdefault(split, folder) != folder:
            raise DataError(f"{folders[split]} and {folder} are both the {split} split; rename or join them")
    if folders and "train" not in folders:
        raise DataError(f"data.root={root} has no train folder", details=[folder_listing(root)], key="data.root")
    return {split: folders[split] for split in SPLITS if split in folders} or {"": root}


def add_missing_splits(splits: Splits, fractions: Sequence[float], root: Path, by_class: bool) -> Splits:
    """Split samples without splits by hash, and take a tenth of ``train`` if there is no validation split.

    Args:
        splits: samples by the names of :func:`split_folders`.
        fractions: see :func:`split_by_hash`; used if there are no splits.
        root: see :func:`split_by_hash`.
        by_class: see :func:`split_by_hash`.
    """
    if "" in splits:
        return split_by_hash(splits[""], fractions, root, by_class)
    return splits if "val" in splits else {**splits, **split_by_hash(splits["train"], HELD_OUT, root, by_class)}


def split_by_hash(samples: Sequence[Sample], fractions: Sequence[float], root: Path, by_class: bool) -> Splits:
    """Split samples into train, val and test.

    The order is that of a hash of the path below ``root``: it is the same on every machine, and an added file moves
    hardly any other file to another split.

    Args:
        samples: of all splits.
        fractions: of train, val and test; they add up to 1, and a test split of 0 is left out.
        root: a folder above all paths.
        by_class: whether to split each label separately, so that all splits have the same shares of classes.

    Raises:
        DataError: a split gets nothing.
    """
    groups: dict[Any, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample[1] if by_class else None].append(sample)
    splits: Splits = defaultdict(list)
    for group in groups.values():
        group.sort(key=lambda sample: hashlib.sha256(os.path.relpath(sample[0], root).encode()).digest())
        ends = [round(sum(fractions[: number + 1]) * len(group)) for number in range(len(fractions))]
        for split, begin, end in zip(SPLITS, [0, *ends], ends):
            splits[split] += group[begin:end]
    for split, share in zip(SPLITS, fractions):
        if share > 0 and not splits[split]:
            raise DataError(
                f"data.split_ratio={list(fractions)} leaves nothing of the {len(samples)} samples in {root} for "
                f"{split}; give it a larger share"
            )
    return {split: sorted(members) for split, members in splits.items() if members}


def pair_masks(folders: Iterable[tuple[Path, Path]], skip_errors: bool = False) -> tuple[list[Sample], list[str]]:
    """Pair images with masks of the same name.

    Args:
        folders: (folder of images, folder of their masks) each.
        skip_errors: whether files without a partner are left out.

    Returns:
        The pairs, and a line for each file that is left out.

    Raises:
        DataError: a file has no partner, or two files of a folder have the same name.
    """
    pairs: list[Sample] = []
    unpaired: list[str] = []
    for images, masks in folders:
        image_paths, mask_paths = _paths_by_stem(images), _paths_by_stem(masks)
        pairs += [(image_paths[stem], mask_paths[stem]) for stem in sorted(image_paths.keys() & mask_paths.keys())]
        unpaired += [f"{path} has no mask in {masks}" for stem, path in image_paths.items() if stem not in mask_paths]
        unpaired += [f"{mask_paths[stem]} has no image in {images}" for stem in mask_paths if stem not in image_paths]
    if unpaired and not skip_errors:
        raise DataError(
            f"{unpaired[0]}, and {len(unpaired)} such files in all; add it, or leave them out with data.on_error=skip"
        )
    return pairs, unpaired


def _paths_by_stem(folder: Path) -> dict[str, str]:
    paths: dict[str, str] = {}
    for path in images_below(folder) if folder.is_dir() else ():
        other = paths.setdefault(os.path.splitext(_relative(path, folder))[0], path)  # noqa: PTH122 - one of a million
        if other != path:
            raise DataError(f"{other} and {path} have the same name, by which masks are found; remove one of them")
    return paths


def images_by_folder(parent: Path) -> list[tuple[str, str]]:
    """All images in the subfolders of a folder, each with the name of its subfolder."""
    return [(path, folder.name) for folder in subfolders(parent) for path in images_below(folder)]


def find_folders(root: Path, name: str, depth: int = 3) -> list[Path]:
    """Folders of this name in a folder, at most two levels deeper."""
    folders = []
    for folder in subfolders(root):
        if folder.name == name:
            folders.append(folder)
        elif depth > 1:
            folders += find_folders(folder, name, depth - 1)
    return folders


def subfolders(folder: Path) -> list[Path]:
    """The subfolders of a folder, sorted; without hidden ones, and links to the folder itself or above it."""
    above = {str(ancestor) for ancestor in (folder.resolve(), *folder.resolve().parents)}
    with os.scandir(folder) as entries:
        folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith((".", _ARCHIVE))]
    return sorted(Path(entry.path) for entry in folders if os.path.realpath(entry.path) not in above)


def image_files(folder: Path) -> list[str]:
    """Paths of the images directly in a folder, sorted."""
    with os.scandir(folder) as entries:
        names = [entry for entry in entries if entry.name.lower().endswith(SUFFIXES) and entry.name[0] != "."]
        return sorted(entry.path for entry in names if not entry.is_dir())


def images_below(folder: Path) -> list[str]:
    """Paths of all images in a folder and its subfolders, sorted; links to folders are followed."""
    return sorted([*image_files(folder), *(path for below in subfolders(folder) for path in images_below(below))])


def archive_notes(root: Path) -> list[str]:
    """A note if there is a ``__MACOSX`` folder; else empty."""
    folder = root / _ARCHIVE
    note = f"note: {folder} is not read: archives that are made on a Mac have it, without images"
    return [note] if folder.is_dir() else []


def unread_note(root: Path) -> str | None:
    """A note that counts the images and archives in a folder and its subfolders that exp does not read; None: none."""
    names = [os.path.join(folder, name) for folder, _, files in os.walk(root) for name in files  # noqa: PTH118
             if name.lower().endswith(_UNREAD) and name[0] != "."]  # fmt: skip
    kinds = sorted({Path(name).suffix.lower() for name in names})
    note = f"note: {len(names)} files ({', '.join(kinds)}) are not read, such as {min(names, default='')}"
    return f"{note}; files that are read: {' '.join(SUFFIXES)}" if names else None


def _relative(path: str, root: Path) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/")
