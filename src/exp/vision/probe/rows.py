"""Features as rows of a matrix, a block at a time: what a probe sees, whether they fit into memory or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, Sequence

import numpy as np
import torch

from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.vision.probe.store import Store

__all__ = ["INPUTS", "Rows", "check_sizes", "per_class", "rows_of"]

INPUTS = {"cls": ("cls",), "mean": ("mean",), "cls+mean": ("cls", "mean"), "patches": ("patches",)}
"""``task.features``: which arrays stand side by side."""
_BLOCK = 4096


class Rows:
    """Rows (n, D) of one part, and what they are to be told as.

    Attributes:
        labels: int64 (n,), or float32 (n, K) of several labels each.
        dim: elements of a row (D).

    Args:
        arrays: (N, D_i) each, mapped; side by side they make the rows.
        labels: of the chosen rows.
        numbers: which of the N, ascending; int64 (n,).
        device: that blocks come to.
        resident_bytes: rows that take no more as float32 are kept there.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        labels: np.ndarray,
        numbers: np.ndarray,
        device: torch.device,
        resident_bytes: int,
    ) -> None:
        self.arrays = arrays
        self.labels = labels
        self.numbers = numbers
        self.device = device
        self.dim = sum(int(array.shape[1]) for array in arrays)
        self._resident: torch.Tensor | None = None
        self.resident_bytes = resident_bytes
        self._fits = 4 * self.dim * len(numbers) <= resident_bytes

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, places: np.ndarray) -> torch.Tensor:
        """Rows by their places among these (not in the arrays): float32 (len(places), D), on the device."""
        if self._fits:
            if self._resident is None:
                self._resident = self._load(np.arange(len(self.numbers)))
            if len(places) == len(self.numbers) and len(places) and places[0] == 0 and (np.diff(places) == 1).all():
                return self._resident
            return self._resident.index_select(0, torch.from_numpy(places).to(self.device))
        return self._load(places)

    def _load(self, places: np.ndarray) -> torch.Tensor:
        numbers = self.numbers[places]
        # By ascending numbers: a disk is read forwards.
        order = np.argsort(numbers, kind="stable")
        block = np.empty((len(numbers), self.dim), np.float32)
        left = 0
        for array in self.arrays:
            block[order, left : left + array.shape[1]] = array[numbers[order]]
            left += int(array.shape[1])
        return torch.from_numpy(block).to(self.device)

    def blocks(self, size: int = _BLOCK) -> Iterator[tuple[torch.Tensor, slice]]:
        """All rows in their order: float32 (b, D) on the device, and which of them they are."""
        for begin in range(0, len(self), size):
            places = np.arange(begin, min(begin + size, len(self)))
            yield self.read(places), slice(begin, begin + len(places))

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation (population) of each column: float32 (D,), on the CPU; 1 where it is constant.

        Constant by the bound of scikit-learn's StandardScaler, or where values differ less than float32 tells the mean:
        what would be divided by is the noise of rounding.
        """
        first = self.read(np.arange(1))[0]  # sums of differences from it are exact where a column is constant
        total = torch.zeros(self.dim, dtype=torch.float64)
        squares = torch.zeros(self.dim, dtype=torch.float64)
        for block, _ in self.blocks():
            total += (block - first).sum(dim=0).cpu().double()
        mean = first.cpu().double() + total / len(self)
        on_device = mean.float().to(self.device)
        for block, _ in self.blocks():
            centred = block - on_device
            squares += (centred * centred).sum(dim=0).cpu().double()
        variance, count = squares / len(self), len(self)
        exact, single = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps
        constant = variance <= count * exact * variance + (count * mean * exact) ** 2
        constant |= variance <= (single * mean) ** 2
        return mean.float(), torch.where(constant, torch.ones_like(variance), variance.sqrt()).float()

    def check_finite(self, shown: str) -> None:
        """Refuse features that are not finite.

        Args:
            shown: where they are, for the message.

        Raises:
            ConfigError: some are not.
        """
        for block, where in self.blocks():
            # Of what every card has: 0 times a number that is none is none.
            strange = np.flatnonzero(np.isnan((block * 0.0).sum(dim=1).cpu().numpy()))
            if len(strange):
                number = int(self.numbers[where.start + strange[0]])
                raise ConfigError(
                    f"{shown}: features of row {number} are not finite, so the store is damaged, or was made by other "
                    "means; remove the folder, and make it again with task=features"
                )


def rows_of(
    store: Store,
    part: str,
    kind: str,
    device: torch.device,
    resident_bytes: int,
    num_classes: int,
    images: np.ndarray | None = None,
) -> Rows:
    """The rows of a part that have a label; of patches, each is a row whose label is that of most of its pixels.

    Args:
        store: of features.
        part: ``train``, ``val`` or ``test``.
        kind: of :data:`INPUTS`.
        device: that blocks come to.
        resident_bytes: see :class:`Rows`.
        num_classes: classes (K).
        images: numbers of those that are meant, ascending; None: all.

    Raises:
        ConfigError: the store has no such features.
    """
    lacking = [name for name in INPUTS[kind] if name not in store.about["kinds"]]
    if lacking:
        raise ConfigError(
            f"task.features={kind}: {store.folder} has no {', '.join(lacking)}; make one with task=features "
            "task.patches=true"
        )
    labels = np.array(store.array(part, "labels")) if kind != "patches" else patch_labels(store, part, num_classes)
    arrays = [store.array(part, name) for name in INPUTS[kind]]
    of_image = np.arange(len(labels))
    if kind == "patches":
        arrays = [array.reshape(-1, array.shape[-1]) for array in arrays]
        of_image //= len(labels) // len(store.array(part, "labels"))
    meant = np.ones(len(labels), bool) if images is None else np.isin(of_image, images)
    if labels.ndim == 1:
        known = (labels >= 0) & (labels < num_classes) & meant
        numbers = np.flatnonzero(known)
        labels = labels[numbers].astype(np.int64)
    else:
        numbers = np.flatnonzero(meant)
        labels = labels[numbers].astype(np.float32)
    if not len(numbers):
        raise ConfigError(f"{store.folder}: no image of {part} has a label; nothing can be probed")
    return Rows(arrays, labels, numbers, device, resident_bytes)


def patch_labels(store: Store, part: str, num_classes: int) -> np.ndarray:
    """The class of most known pixels of each patch, -1 where none is known: int64 (N * h * w,)."""
    masks, features = store.array(part, "labels"), store.array(part, "patches")
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
    """So many rows of each class, drawn by a seed; of a class that has fewer, all.

    Args:
        rows: of one label each.
        shots: rows of each class.
        seed: of the draw.
    """
    generator = np.random.default_rng([seed, shots])
    chosen = [generator.permutation(np.flatnonzero(rows.labels == label))[:shots] for label in np.unique(rows.labels)]
    places = np.sort(np.concatenate(chosen))
    return Rows(rows.arrays, rows.labels[places], rows.numbers[places], rows.device, rows.resident_bytes)


def check_sizes(task: Any, train: Rows, classes: Sequence[str]) -> list[str]:
    """What of ``task.k`` and ``task.shots`` is more than there is.

    Args:
        task: :class:`exp.vision.tasks.Probe`.
        train: all training rows.
        classes: names.

    Returns:
        What is done instead, a line each.

    Raises:
        ConfigError: nothing would be done as it is asked.
    """
    notes = []
    if task.shots:
        counts = np.bincount(train.labels, minlength=len(classes)).tolist()
        there = {name: count for name, count in zip(classes, counts) if count}
        most, least = max(there.values()), min(there, key=lambda name: there[name])
        beyond = [shots for shots in task.shots if shots > most]
        if beyond:
            raise ConfigError(
                f"task.shots={beyond[0]} is more than any class has: the largest has {most} training rows; leave it "
                "out, or take task.shots=[] for all of them"
            )
        for shots in task.shots:
            fewer = sum(count < shots for count in there.values())
            if fewer:
                notes.append(
                    f"task.shots={shots}: {fewer} of {len(there)} classes have fewer training rows ({least}: "
                    f"{there[least]}), and take part with all of them"
                )
    if "knn" in task.probes:
        fewest = min([len(per_class(train, shots, 0)) for shots in task.shots] or [len(train)])
        if min(task.k) > fewest:
            raise ConfigError(f"task.k={list(task.k)}: there are only {fewest} training rows; take fewer neighbours")
        beyond = [k for k in task.k if k > fewest]
        if beyond:
            notes.append(f"task.k={beyond}: left out where there are fewer training rows; the least are {fewest}")
    return notes
