"""Kept features as rows of a matrix on the host: what a probe sees."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import numpy as np

from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.vision.probe.store import Store

__all__ = ["Rows", "check_sizes", "patch_labels", "per_class", "rows_of"]

_BLOCK = 4096


@dataclass(frozen=True)
class Rows:
    """Rows (n, D) of one split, and their labels.

    Attributes:
        arrays: (N, D_i) each, mapped; side by side they make the rows.
        labels: of the chosen rows, int64 (n,).
        numbers: which of the N, ascending; int64 (n,).
        memory_bytes: tables that take more are kept in a temporary file, which is mapped.
    """

    arrays: Sequence[np.ndarray]
    labels: np.ndarray
    numbers: np.ndarray
    memory_bytes: int

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def dim(self) -> int:
        """Elements of a row (D)."""
        return sum(int(array.shape[1]) for array in self.arrays)

    def blocks(self) -> Iterator[np.ndarray]:
        """All rows in their order, some at a time: float64 (b, D)."""
        for begin in range(0, len(self), _BLOCK):
            numbers = self.numbers[begin : begin + _BLOCK]
            yield np.concatenate([array[numbers] for array in self.arrays], axis=1, dtype=np.float64)

    def table(self, change: Callable[[np.ndarray], np.ndarray] = np.asarray) -> np.ndarray:
        """All rows at once, each block after ``change``: float64 (n, D)."""
        shape, begin = (len(self), self.dim), 0
        if 8 * shape[0] * shape[1] <= self.memory_bytes:
            made = np.empty(shape)
        else:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with the array
            made = np.memmap(file, np.float64, "w+", shape=shape)
        for block in self.blocks():
            made[begin : begin + len(block)] = change(block)
            begin += len(block)
        return made


def rows_of(
    store: Store, split: str, kind: str, memory_bytes: int, num_classes: int, images: np.ndarray | None = None
) -> Rows:
    """The rows of a split that have a label; a patch has the label of most of its pixels.

    Args:
        store: of features.
        split: ``train``, ``val`` or ``test``.
        kind: ``cls``, ``mean``, ``cls+mean`` or ``patches``.
        memory_bytes: see :class:`Rows`.
        num_classes: classes (K).
        images: numbers of the images to use, ascending; None: all.

    Raises:
        ConfigError: the store has no such features, or no image has a label.
    """
    names = kind.split("+")
    lacking = [name for name in names if name not in store.about["kinds"]]
    if lacking:
        raise ConfigError(
            f"task.features={kind}: {store.folder} has no {', '.join(lacking)}; make one with task=features "
            "task.patches=true"
        )
    arrays, labels = [store.array(split, name) for name in names], np.array(store.array(split, "labels"))
    of_image = np.arange(len(labels))
    if kind == "patches":
        of_image = of_image.repeat(arrays[0].shape[1] * arrays[0].shape[2])
        arrays, labels = [arrays[0].reshape(-1, arrays[0].shape[-1])], patch_labels(store, split, num_classes)
    used = (labels >= 0) & (labels < num_classes)
    if images is not None:
        used &= np.isin(of_image, images)
    numbers = np.flatnonzero(used)
    if not len(numbers):
        raise ConfigError(f"{store.folder}: no image of {split} has a label; nothing can be probed")
    return Rows(arrays, labels[numbers].astype(np.int64), numbers, memory_bytes)


def patch_labels(store: Store, split: str, num_classes: int) -> np.ndarray:
    """The class of most known pixels of each patch, -1 where none is known: int64 (N * h * w,)."""
    masks, (count, tall, wide, _) = store.array(split, "labels"), store.array(split, "patches").shape
    patch = int(store.about["patch_size"])
    found = np.empty((count, tall * wide), np.int64)
    for number in range(count):
        mask = masks[number][: tall * patch, : wide * patch]
        edges = ((0, tall * patch - mask.shape[0]), (0, wide * patch - mask.shape[1]))
        cells = np.pad(mask, edges, constant_values=255).reshape(tall, patch, wide, patch)
        counts = np.stack([(cells == label).sum(axis=(1, 3)).ravel() for label in range(num_classes)], axis=1)
        found[number] = np.where(counts.any(axis=1), counts.argmax(axis=1), -1)
    return found.reshape(-1)


def per_class(rows: Rows, shots: int, seed: int) -> Rows:
    """At most ``shots`` rows of each class, drawn by a seed."""
    generator = np.random.default_rng([seed, shots])
    chosen = [generator.permutation(np.flatnonzero(rows.labels == label))[:shots] for label in np.unique(rows.labels)]
    places = np.sort(np.concatenate(chosen))
    return Rows(rows.arrays, rows.labels[places], rows.numbers[places], rows.memory_bytes)


def check_sizes(task: Any, train: Rows) -> list[str]:
    """Compare ``task.k`` and ``task.shots`` with the number of training rows.

    Returns:
        What is done otherwise than asked, a line each.

    Raises:
        ConfigError: nothing would be done as asked.
    """
    notes, fewest = [], len(train)
    if task.shots:
        counts = np.unique(train.labels, return_counts=True)[1]
        if max(task.shots) > counts.max():
            raise ConfigError(
                f"task.shots={max(task.shots)} is more than any class has: the largest has {counts.max()} training rows"
            )
        for shots in task.shots:
            if shots > counts.min():
                notes.append(f"task.shots={shots}: {(counts < shots).sum()} of {len(counts)} classes have fewer rows")
        fewest = int(np.minimum(counts, min(task.shots)).sum())
    beyond = [k for k in task.k if k > fewest] if "knn" in task.probes else []
    if beyond and min(task.k) > fewest:
        raise ConfigError(f"task.k={list(task.k)}: there are only {fewest} training rows; take fewer neighbors")
    if beyond:
        notes.append(f"task.k={beyond}: left out where there are fewer training rows; the least are {fewest}")
    return notes
