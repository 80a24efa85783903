"""A feature store: a folder of memory-mapped arrays, with their origin and the state of each image.

    about.json             experiment, classes, fingerprint, number of images of each split, channels of every level
    <split>_cls.npy        (N, D), CLS tokens
    <split>_mean.npy       (N, D), means of the patches
    <split>_patches.npy    (N, h, w, D), with task.patches=true
    <split>_labels.npy     int64 (N,), -1: ignored; or uint8 (N, H, W), a label for each pixel
    <split>_state.npy      uint8 (N,): TO_DO, DONE or SKIPPED (data.on_error=skip)

Imports no torch, since the parent process reads ``about.json``, too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from exp.data.fingerprint import differences
from exp.errors import ConfigError
from exp.runs.files import read_json, write_json

__all__ = ["DONE", "SKIPPED", "TO_DO", "FeatureStore", "order_digest"]

TO_DO, DONE, SKIPPED = range(3)
_VERSION = 2


def order_digest(samples: Any) -> list[Any]:
    """A digest of the order of the images in the arrays, independent of the folder above the data."""
    digest = hashlib.sha256()
    for path, label in samples:
        text = f"{Path(path).parent.name}/{Path(path).name}\0{'' if isinstance(label, str) else label}\n"
        digest.update(text.encode("utf-8", "surrogateescape"))
    return [len(samples), 0, digest.hexdigest()]


class FeatureStore:
    """The arrays of one folder.

    Attributes:
        folder: path of the store.
        about: content of ``about.json``.

    Raises:
        ConfigError: the folder holds no features.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.about: dict[str, Any] = read_json(self.folder / "about.json")
            is_valid = self.about["version"] == _VERSION
        except (ConfigError, OSError, KeyError, TypeError):
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"task.store={folder} holds no features (about.json is missing, damaged or of another version); make "
                f"some with task=features task.store={folder} init_from=<weights>"
            )

    @classmethod
    def create(
        cls, folder: Path, about: Mapping[str, Any], example: Mapping[str, np.ndarray], counts: Mapping[str, int]
    ) -> FeatureStore:
        """Make an empty store. Only one process may call this.

        Args:
            folder: of the store.
            about: content of ``about.json``; version, kinds and counts are added.
            example: arrays of a batch, by name (``cls``, ``mean``, ``patches``, ``labels``), for shapes and dtypes.
            counts: number of images of each split.
        """
        for split, count in counts.items():
            for name, value in {**example, "state": np.zeros(1, np.uint8)}.items():
                # A sparse file: only its header is written now.
                path, shape = str(folder / f"{split}_{name}.npy"), (count, *value.shape[1:])
                np.lib.format.open_memmap(path, mode="w+", dtype=value.dtype, shape=shape)
        kinds = [name for name in example if name != "labels"]
        # Last, since this file marks the folder as a store.
        write_json(folder / "about.json", {"version": _VERSION, **about, "kinds": kinds, "splits": dict(counts)})
        return cls(folder)

    def array(self, split: str, name: str) -> Any:
        """A memory-mapped array: only the parts that are read take memory."""
        return np.load(str(self.folder / f"{split}_{name}.npy"), mmap_mode="r")

    def images(self, state: int) -> list[tuple[str, int]]:
        """Split and number of each image in that state."""
        return [
            (split, int(number))
            for split in self.about["splits"]
            for number in np.flatnonzero(np.array(self.array(split, "state")) == state)
        ]

    def used(self) -> dict[str, Any]:
        """The fingerprints of weights and preprocessing, for the record of a run."""
        return {key: self.about["fingerprint"][key] for key in ("weights", "preprocessing")}

    def write(self, split: str, numbers: Sequence[int], values: Mapping[str, np.ndarray]) -> None:
        """Write the values of some images.

        Args:
            split: of the images.
            numbers: of the images in the split.
            values: arrays by name, a row per image; ``state`` must come last, since it marks the others as complete.

        Raises:
            ValueError: a row has another shape than the store's.
        """
        for name, value in values.items():
            array = self.array(split, name)
            content = np.ascontiguousarray(value, array.dtype)
            if content.shape[1:] != array.shape[1:]:
                raise ValueError(f"{split}_{name}.npy holds {array.shape[1:]} of each image, not {content.shape[1:]}")
            # Positioned writes instead of a memory map: several machines may write to one file of a shared folder.
            with (self.folder / f"{split}_{name}.npy").open("r+b") as file:
                for number, row in zip(numbers, content):
                    file.seek(array.offset + number * array.strides[0])
                    file.write(row.tobytes())

    def check(self, fingerprint: Mapping[str, Any], kinds: Sequence[str]) -> None:
        """Refuse a store whose features differ from those that this run would compute.

        Args:
            fingerprint: of this run's weights, preprocessing and data.
            kinds: features that this run needs: ``cls``, ``mean``, ``patches``.

        Raises:
            ConfigError: something differs; the message says what.
        """
        stored, wrong = self.about["fingerprint"], [f"no {kind}" for kind in kinds if kind not in self.about["kinds"]]
        for name in ("weights", "preprocessing"):
            old, new = stored[name], fingerprint[name]
            keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            wrong += [f"{name}: {key} {old.get(key)}, now {new.get(key)}" for key in keys]
        wrong += [f"data: {difference}" for difference in differences(stored["data"], fingerprint["data"])[:2]]
        if wrong:
            raise ConfigError(
                f"task.store={self.folder} holds other features ({'; '.join(wrong)}); take another folder, or remove it"
            )

    def check_complete(self) -> None:
        """Refuse a store that lacks the features of some images.

        Raises:
            ConfigError: features are missing.
        """
        num_missing = len(self.images(TO_DO))
        if num_missing:
            raise ConfigError(
                f"task.store={self.folder} is incomplete ({num_missing} images are missing); to continue, run "
                "task=features again with the same settings"
            )
