"""What a layout finds on disk, and what layouts share. Imports neither torch nor numpy: the parent looks, too."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Sequence

from exp.data.places import content_of, sample_folder
from exp.errors import DataError

__all__ = [
    "ARCHIVE",
    "NAMED_FILES",
    "PARTS",
    "SUFFIXES",
    "Listing",
    "archives_in",
    "data_root",
    "files_below",
    "folders_in",
    "image_files",
    "not_read",
    "other_files",
    "refuse_twins",
    "split",
]

PARTS = ("train", "val", "test")
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".jp2", ".bmp", ".webp")
ARCHIVE = "__MACOSX"
"""A folder that archives of a Mac bring along; there are no images in it."""
NAMED_FILES = 20
"""Of files that could not be used, so many are named in a record or a message."""
# Files that lie beside images, and are none: texts, tables, and what tells where on Earth an image is.
_BESIDE = {
    ".txt", ".md", ".rst", ".csv", ".tsv", ".xls", ".xlsx", ".json", ".jsonl", ".geojson", ".xml", ".html", ".htm",
    ".yaml", ".yml", ".toml", ".ini", ".cfg", ".log", ".pdf", ".doc", ".docx", ".py", ".ipynb", ".sh", ".db",
    ".dbf", ".shp", ".shx", ".gpkg", ".kml", ".tfw", ".tifw", ".jgw", ".j2w", ".pgw", ".bpw", ".wld", ".prj",
    ".cpg", ".ovr", ".msk", ".rrd", ".aux", ".lock", ".md5", ".sha1", ".sha256",
}  # fmt: skip


@dataclass
class Listing:
    """Samples of a data set.

    Attributes:
        classes: names.
        parts: (image path, class number or mask path) of each sample, by part; no ``test``: tested on ``val``.
        notes: for the record of a run.
        said: what the user is told before a run, a line each.
        mask_values: file value -> class number, where the layout says so.
        ignored: file values that do not count, likewise.
    """

    classes: list[str]
    parts: dict[str, list[tuple[str, Any]]]
    notes: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    mask_values: dict[int, int] | None = None
    ignored: list[int] = field(default_factory=list)


def data_root(root: str | os.PathLike[str] | None, sample_data: str | None, name: str) -> Path:
    """The folder that a configuration means.

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
            raise DataError(
                f"data.root={folder} is no folder; set it to where {name} lies\n  {content_of(folder.parent)}"
            )
        return folder
    if sample_data is None:
        raise DataError(f"data.root is not set, and {name} does not come with exp; set data.root to its folder")
    return sample_folder(sample_data)


def folders_in(folder: Path) -> list[Path]:
    """Its folders, sorted; left out are hidden ones, and links that lead back to it or above it."""
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if entry.is_dir() and not entry.name.startswith((".", ARCHIVE))]
    return sorted(Path(entry.path) for entry in found if not (entry.is_symlink() and _leads_back(entry.path, folder)))


def archives_in(folders: Iterable[Path]) -> list[str]:
    """A line for each folder of a Mac's archive directly in these."""
    found = [folder / ARCHIVE for folder in folders if (folder / ARCHIVE).is_dir()]
    return [f"note: {folder} is not read: archives of a Mac bring it along, without images" for folder in found]


def image_files(folder: Path) -> list[str]:
    """Paths of the images directly in it, sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if _is_image(entry.name) and not entry.is_dir())


def files_below(folder: Path) -> list[str]:
    """Paths of all images in it and in its folders, sorted; links to folders are followed, each of these once."""
    found: list[str] = []
    followed = {os.path.realpath(folder)}
    for place, folders, names in os.walk(folder, followlinks=True):
        kept = []
        for name in folders:
            path = os.path.join(place, name)  # noqa: PTH118 - a million of them
            if name.startswith((".", ARCHIVE)):
                continue
            if os.path.islink(path):  # noqa: PTH114
                real = os.path.realpath(path)
                if real in followed or _leads_back(path, folder) or _leads_back(path, Path(place)):
                    continue
                followed.add(real)
            kept.append(name)
        folders[:] = kept
        found += [os.path.join(place, name) for name in names if _is_image(name)]  # noqa: PTH118 - a million of them
    return sorted(found)


def other_files(folders: Iterable[str | os.PathLike[str]]) -> dict[str, int]:
    """How many files directly in these have suffixes that are not read, by suffix; texts and the like do not count."""
    found: Counter[str] = Counter()
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 - of a million
                if suffix in SUFFIXES or suffix in _BESIDE or not suffix or entry.name.startswith("."):
                    continue
                if entry.is_file():
                    found[suffix] += 1
    return dict(sorted(found.items()))


def not_read(folders: Iterable[str | os.PathLike[str]]) -> list[str]:
    """A line on such files directly in these, where there are some, for a refusal of folders without images."""
    others = other_files(folders)
    if not others:
        return []
    told = ", ".join(f"{count} {suffix}" for suffix, count in others.items())
    return [f"there are files that exp does not read: {told}; convert them to one of {' '.join(SUFFIXES)}"]


def refuse_twins(folders: Sequence[Path], what: str) -> None:
    """Refuse folders that are one and the same by way of links: their images would count twice.

    Raises:
        DataError: names two of them.
    """
    seen: dict[str, Path] = {}
    for folder in folders:
        twin = seen.setdefault(os.path.realpath(folder), folder)
        if twin is not folder:
            raise DataError(f"{folder} and {twin} are the same folder, by a link, but {what}; remove one of them")


def _leads_back(link: str, folder: Path) -> bool:
    """Whether a link leads to ``folder``, or to one above it."""
    return (os.path.realpath(folder) + os.sep).startswith(os.path.realpath(link).rstrip(os.sep) + os.sep)


def split(
    samples: Sequence[tuple[str, Any]], fractions: Sequence[float], root: Path, by_class: bool
) -> dict[str, list[tuple[str, Any]]]:
    """Deal samples out to train, val and test.

    The order comes from a hash of the path below ``root``: it is the same on every machine, and a file that is added
    moves hardly any other.

    Args:
        samples: (path, label) each.
        fractions: of train, val and test; they add up to 1, and a test split of 0 is left out.
        root: above all paths.
        by_class: deal out each label by itself, so that all parts have the same mixture.

    Raises:
        DataError: a part gets nothing.
    """
    groups: dict[Any, list[tuple[str, Any]]] = defaultdict(list)
    for sample in samples:
        groups[sample[1] if by_class else None].append(sample)
    parts: dict[str, list[tuple[str, Any]]] = {part: [] for part, share in zip(PARTS, fractions) if share > 0}
    for group in groups.values():
        group.sort(key=lambda sample: hashlib.sha256(os.path.relpath(sample[0], root).encode()).digest())
        begin, share = 0, 0.0
        for part, fraction in zip(PARTS, fractions):
            share += fraction
            end = round(share * len(group))
            if part in parts:
                parts[part] += group[begin:end]
            begin = end
    for part, members in parts.items():
        if not members:
            raise DataError(
                f"data.split={list(fractions)} leaves nothing of the {len(samples)} samples in {root} for {part}; "
                "give it a larger share"
            )
        members.sort()
    return parts


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")
