"""Several sources in one data set: each has its folder, layout, classes, bands and modality.

``data.sources`` is a list. The keys of a source are keys of ``data`` that it overrides, and two of its own:
``weight``, its share of the samples of each training epoch, and ``class_map``, its class -> a class of the data (null:
ignored). A data set without ``data.sources`` is one source.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from exp.data.fingerprint import shortened
from exp.errors import DataError
from exp.vision.data.bands import ImageReader, ReaderBySource
from exp.vision.data.dataset import NO_LABEL
from exp.vision.data.layouts import SampleIndex, build_layout, data_root, source_configs
from exp.vision.data.masks import ColorMasks, IndexMasks

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MasksBySource", "Source", "SourceDraw", "find_sources", "join_classes", "join_splits",
           "read_sources"]  # fmt: skip


@dataclass
class Source:
    """One source of a data set.

    Attributes:
        name: as in metrics and records.
        keys: of the source in ``data.sources``; empty for a data set of one source.
        config: the keys of ``data``, with those of the source.
        root: its folder.
        index: its samples; labels are numbers of its own classes until :func:`join_splits`.
        read: reads its images.
        class_map: its class -> a class of the data; None: ignored.
        labeled: whether its samples have labels; else they are training images for distillation.
        masks: reads its masks; None: samples have class numbers, or no labels.
    """

    name: str
    keys: Mapping[str, Any]
    config: Any
    root: Path
    index: SampleIndex
    read: ImageReader
    class_map: Mapping[str, str | None]
    labeled: bool = True
    masks: Any = None

    @property
    def own_classes(self) -> Sequence[str]:
        """Names of its classes, in the order of its numbers; empty: its numbers are those of the data."""
        return self.index.classes or self.keys.get("classes") or ()

    def masks_for(self, classes: Sequence[str]) -> ColorMasks | IndexMasks:
        """A reader of its masks that gives the numbers of ``classes``, those of the data.

        Raises:
            DataError: a class of the source is none of the data's.
        """
        config, index = self.config, self.index
        if index.ignored is None and config.palette:
            numbers = self.numbers_of(list(config.palette), classes)
            known = {number: color for number, color in zip(numbers, config.palette.values()) if number is not None}
            dropped = [color for number, color in zip(numbers, config.palette.values()) if number is None]
            return ColorMasks(known, [*config.ignore_colors, *dropped])
        values = config.label_map if index.ignored is None else index.label_map
        ignored = [*(config.ignore_values if index.ignored is None else index.ignored)]
        if self.keys and self.own_classes:
            numbers = self.numbers_of(self.own_classes, classes)
            own = values or {number: number for number in range(len(numbers)) if number not in ignored}
            joined = {value: numbers[number] for value, number in own.items()}
            values = {value: number for value, number in joined.items() if number is not None}
            ignored += [value for value, number in joined.items() if number is None]
        return IndexMasks(len(classes), values, ignored)

    def numbers_of(self, names: Sequence[str], classes: Sequence[str]) -> list[int | None]:
        """The number of each of its classes among those of the data; None: ignored.

        Raises:
            DataError: a name is no class of the data, and ``class_map`` does not have it.
        """
        mapped = [self.class_map.get(name, name) for name in names]
        unknown = [name for name in mapped if name is not None and name not in classes]
        if unknown:
            raise DataError(
                f"data.sources: {self.name} has the class {unknown[0]}, which is none of {shortened(classes)}; map it "
                f"to one, or to null, which ignores it: class_map: {{{unknown[0]}: ...}}"
            )
        return [None if name is None else list(classes).index(name) for name in mapped]


def find_sources(config: Any) -> list[Source]:
    """The sources of the keys of ``data``, each with its samples.

    Raises:
        DataError: a source has an unknown key, or its files are not found.
    """
    sources = []
    for name, keys, own in source_configs(config):
        root = data_root(own.root, own.sample_data, name)
        class_map = dict(keys.get("class_map") or {})
        layout = build_layout(own)
        labeled = layout.labeled or own.layout == config.layout  # data that have no labels at all
        sources.append(Source(name, keys, own, root, layout.find(root), ImageReader(own), class_map, labeled))
    return sources


def join_classes(sources: Sequence[Source], given: Sequence[str]) -> list[str]:
    """The classes of the data: those in the configuration, or all that the sources have, sorted."""
    if given or len(sources) == 1:
        return list(given or sources[0].index.classes)
    labeled = [source for source in sources if source.labeled]
    names = [source.class_map.get(name, name) for source in labeled for name in source.own_classes]
    return sorted({name for name in names if name is not None})


def join_splits(sources: Sequence[Source], classes: Sequence[str], labels: bool) -> dict[str, list[tuple[str, Any]]]:
    """The samples of each split, those of a source beside each other, in the order of the sources.

    A source without a test split gives its validation split to both. One without labels gives all of its images to the
    training, with ``NO_LABEL`` or None as label.

    Args:
        sources: all sources.
        classes: of the data.
        labels: whether samples have numbers of classes, which become those of the data.

    Raises:
        DataError: two sources have the same file, or no source has labels.
    """
    if len(sources) == 1:
        return sources[0].index.splits
    if not any(source.labeled for source in sources):
        raise DataError("data.sources: none has labels, which validation needs; give one another layout")
    has_test = any("test" in source.index.splits for source in sources if source.labeled)
    splits: dict[str, list[tuple[str, Any]]] = {split: [] for split in ("train", "val", *["test"] * has_test)}
    for source in sources:
        if not source.labeled:
            paths = sorted(path for members in source.index.splits.values() for path, _ in members)
            source.index.splits = {split: [] for split in splits}
            source.index.splits["train"] = [(path, NO_LABEL if labels else None) for path in paths]
            splits["train"] += source.index.splits["train"]
            continue
        own, numbers = source.index.splits, source.numbers_of(source.index.classes, classes) if labels else []
        for split, samples in splits.items():
            members = own.get(split, own["val"])
            if labels:
                pairs = [(path, numbers[label]) for path, label in members]
                members = [(path, number) for path, number in pairs if number is not None]
            source.index.splits[split] = members
            samples += members
    for split, samples in splits.items():
        if len({path for path, _ in samples}) < len(samples):
            raise DataError(f"data.sources: two of them have the same files in {split}", "give each its own folder")
    return splits


def read_sources(sources: Sequence[Source]) -> ImageReader:
    """The reader of all sources.

    Raises:
        DataError: sources have other numbers of channels, or a joint mean of values in other units is to be measured.
    """
    readers = [source.read for source in sources]
    if len(readers) == 1:
        return readers[0]
    first = sources[0].config
    if len({reader.channels for reader in readers}) > 1:
        given = ", ".join(f"{source.name} {reader.channels}" for source, reader in zip(sources, readers))
        raise DataError(f"data.sources have other numbers of channels: {given}; choose as many data.bands of each")
    if first.mean == "train" and any(reader.value_range != readers[0].value_range for reader in readers):
        raise DataError(
            "data.mean=train: the values of data.sources have other ranges, so that they have no mean in common; give "
            "mean and std of each modality, 0..255, in data.modality_statistics"
        )
    paths = [[path for samples in source.index.splits.values() for path, _ in samples] for source in sources]
    return ReaderBySource(first, readers, paths)


class MasksBySource:
    """Reads the masks of several sources.

    Args:
        sources: all sources, each with ``masks``.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.readers: list[Any] = [source.masks for source in sources]
        self._by_path = {
            label: number
            for number, source in enumerate(sources)
            for samples in source.index.splits.values()
            for _, label in samples
        }
        self.ignored_note = "pixels that each source ignores do not count"
        self.dtype = next(reader.dtype for reader in self.readers if reader is not None)

    @property
    def unknown(self) -> int:
        """Number of ignored pixels of unknown colors in the masks that were read."""
        return sum(getattr(reader, "unknown", 0) for reader in self.readers)

    def read(self, path: str) -> np.ndarray:
        """Read a mask: class numbers of the data, uint8 (H, W), 255 where ignored."""
        labels: np.ndarray = self.readers[self._by_path[path]].read(path)
        return labels


class SourceDraw:
    """Draws the samples of an epoch so that every epoch has the same share of each source.

    A function of (seed, epoch, position) alone, like augmentation. Within a source no sample repeats before all have
    been drawn.

    Args:
        counts: number of training samples of each source, which stand beside each other.
        weights: share of each source, relative to the sum of all.
        seed: of the order.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.shares = [weight / sum(weights) for weight in weights]
        self._firsts = np.cumsum([0, *counts]).tolist()
        self._ends = np.rint(np.cumsum(self.shares) * sum(counts)).astype(int).tolist()
        self._counts, self._seed = list(counts), seed

    def __call__(self, position: int, epoch: int) -> int:
        """The number of the sample at a position of an epoch."""
        source = int(np.searchsorted(self._ends, position, side="right"))
        begin, count = self._ends[source - 1] if source else 0, self._counts[source]
        cycle, offset = divmod(epoch * (self._ends[source] - begin) + position - begin, count)
        return self._firsts[source] + int(_order(self._seed, source, cycle, count)[offset])


@functools.lru_cache(maxsize=16)
def _order(seed: int, source: int, cycle: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, source, cycle)).permutation(count)
