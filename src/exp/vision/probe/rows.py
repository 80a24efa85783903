"""Kept features as rows of a matrix on the host: what a probe sees."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import numpy as np

from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.vision.probe.store import Store

__all__ = ["INPUTS", "Rows", "check_sizes", "patch_labels", "per_class", "rows_of"]

INPUTS = {"cls": ("cls",), "mean": ("mean",), "cls+mean": ("cls", "mean"), "patches": ("patches",)}
"""``task.features``: which arrays stand side by side."""
_BLOCK = 4096


class Rows:
    """Rows (n, D) of one split, and their labels.

    Attributes:
        labels: int64 (n,), or float32 (n, K) of several labels each.
        dim: elements of a row (D).

    Args:
        arrays: (N, D_i) each, mapped; side by side they make the rows.
        labels: of the chosen rows.
        numbers: which of the N, ascending; int64 (n,).
        memory_bytes: tables that take more are kept in a temporary file, which is mapped.
    """

    def __init__(
        self, arrays: Sequence[np.ndarray], labels: np.ndarray, numbers: np.ndarray, memory_bytes: int
    ) -> None:
        self.arrays, self.labels, self.numbers, self.memory_bytes = arrays, labels, numbers, memory_bytes
        self.dim = sum(int(array.shape[1]) for array in arrays)

    def __len__(self) -> int:
        return len(self.numbers)

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """All rows in their order: which they are, and float64 (b, D).

        Raises:
            ConfigError: a feature is not finite.
        """
        for begin in range(0, len(self), _BLOCK):
            numbers = self.numbers[begin : begin + _BLOCK]
            block = np.concatenate([array[numbers] for array in self.arrays], axis=1, dtype=np.float64)
            strange = np.flatnonzero(~np.isfinite(block).all(axis=1))
            if len(strange):
                raise ConfigError(
                    f"task.store: features of row {numbers[strange[0]]} are not finite, so the store is damaged; "
                    "remove the folder, and make it again with task=features"
                )
            yield slice(begin, begin + len(numbers)), block

    def table(self, change: Callable[[np.ndarray], np.ndarray] = np.asarray) -> np.ndarray:
        """All rows at once, each block after ``change``: float64 (n, D)."""
        shape = (len(self), self.dim)
        if 8 * shape[0] * shape[1] <= self.memory_bytes:
            made = np.empty(shape)
        else:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with the array
            made = np.memmap(file, np.float64, "w+", shape=shape)
        for where, block in self.blocks():
            made[where] = change(block)
        return made


def rows_of(
    store: Store, split: str, kind: str, memory_bytes: int, num_classes: int, images: np.ndarray | None = None
) -> Rows:
    """The rows of a split that have a label; a patch has the label of most of its pixels.

    Args:
        store: of features.
        split: ``train``, ``val`` or ``test``.
        kind: of :data:`INPUTS`.
        memory_bytes: see :class:`Rows`.
        num_classes: classes (K).
        images: numbers of the images to use, ascending; None: all.

    Raises:
        ConfigError: the store has no such features, or no image has a label.
    """
    lacking = [name for name in INPUTS[kind] if name not in store.about["kinds"]]
    if lacking:
        raise ConfigError(
            f"task.features={kind}: {store.folder} has no {', '.join(lacking)}; make one with task=features "
            "task.patches=true"
        )
    labels = np.array(store.array(split, "labels")) if kind != "patches" else patch_labels(store, split, num_classes)
    arrays = [store.array(split, name) for name in INPUTS[kind]]
    of_image = np.arange(len(labels))
    if kind == "patches":
        arrays = [array.reshape(-1, array.shape[-1]) for array in arrays]
        of_image //= len(labels) // len(store.array(split, "labels"))
    used = np.ones(len(labels), bool) if images is None else np.isin(of_image, images)
    if labels.ndim == 1:
        used &= (labels >= 0) & (labels < num_classes)
    numbers = np.flatnonzero(used)
    if not len(numbers):
        raise ConfigError(f"{store.folder}: no image of {split} has a label; nothing can be probed")
    return Rows(arrays, labels[numbers].astype(np.int64 if labels.ndim == 1 else np.float32), numbers, memory_bytes)


def patch_labels(store: Store, split: str, num_classes: int) -> np.ndarray:
    """The class of most known pixels of each patch, -1 where none is known: int64 (N * h * w,)."""
    masks, features = store.array(split, "labels"), store.array(split, "patches")
    patch = int(store.about["patch_size"])
    count, tall, wide = features.shape[:3]
    found = np.full((count, tall * wide), -1, np.int64)
    for number in range(count):
        mask = np.full((tall * patch, wide * patch), 255, np.uint8)
        picture = masks[number][: tall * patch, : wide * patch]
        mask[: picture.shape[0], : picture.shape[1]] = picture
        cells = mask.reshape(tall, patch, wide, patch).transpose(0, 2, 1, 3).reshape(tall * wide, patch * patch)
        counts = np.stack([(cells == label).sum(axis=1) for label in range(num_classes)], axis=1)
        found[number] = np.where(counts.sum(axis=1) > 0, counts.argmax(axis=1), -1)
    return found.reshape(-1)


def per_class(rows: Rows, shots: int, seed: int) -> Rows:
    """At most ``shots`` rows of each class, drawn by a seed; ``rows`` have one label each."""
    generator = np.random.default_rng([seed, shots])
    chosen = [generator.permutation(np.flatnonzero(rows.labels == label))[:shots] for label in np.unique(rows.labels)]
    places = np.sort(np.concatenate(chosen))
    return Rows(rows.arrays, rows.labels[places], rows.numbers[places], rows.memory_bytes)


def check_sizes(task: Any, train: Rows, classes: Sequence[str]) -> list[str]:
    """Compare ``task.k`` and ``task.shots`` with the number of training rows.

    Args:
        task: :class:`exp.vision.tasks.Probe`.
        train: all training rows.
        classes: names.

    Returns:
        What is done otherwise than asked, a line each.

    Raises:
        ConfigError: nothing would be done as asked.
    """
    notes, fewest = [], len(train)
    if task.shots:
        counts = np.bincount(train.labels, minlength=len(classes)).tolist()
        there = {name: count for name, count in zip(classes, counts) if count}
        most, least = max(there.values()), min(there, key=lambda name: there[name])
        if max(task.shots) > most:
            raise ConfigError(
                f"task.shots={max(task.shots)} is more than any class has: the largest has {most} training rows; leave "
                "it out, or take task.shots=[] for all of them"
            )
        for shots in task.shots:
            fewer = sum(count < shots for count in there.values())
            if fewer:
                notes.append(
                    f"task.shots={shots}: {fewer} of {len(there)} classes have fewer training rows ({least}: "
                    f"{there[least]}), and take part with all of them"
                )
        fewest = sum(min(count, min(task.shots)) for count in there.values())
    if "knn" in task.probes:
        if min(task.k) > fewest:
            raise ConfigError(f"task.k={list(task.k)}: there are only {fewest} training rows; take fewer neighbours")
        beyond = [k for k in task.k if k > fewest]
        if beyond:
            notes.append(f"task.k={beyond}: left out where there are fewer training rows; the least are {fewest}")
    return notes
