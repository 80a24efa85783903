"""Features in a folder: memory-mapped arrays, what they were made of, and which blocks of them are done.

    about.json                  shapes, names of the classes, and the fingerprint
    <part>_cls.npy              (N, D), of the image
    <part>_mean.npy             (N, D), the mean of its patches
    <part>_patches.npy          (N, h, w, D), where they were asked for
    <part>_labels.npy           (N,) int64, -1: does not count; (N, H, W) uint8 of pixels
    <part>_skipped.npy          (N,) uint8, 1: the image could not be used (data.on_error=skip)
    <part>_done.npy             (blocks,) uint8

Imports neither torch nor what a backbone is made of: the parent process looks at ``about.json``, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from exp.data.fingerprint import differences
from exp.errors import ConfigError
from exp.runs.files import write_json

__all__ = ["BLOCK", "ArraySpec", "Store"]

BLOCK = 256
"""Images of a block: what a run that is killed has to compute again, at most, on each rank."""
_VERSION = 1


class ArraySpec(NamedTuple):
    """Shape of an image's share of an array, and the array's dtype."""

    shape: Sequence[int]
    dtype: str


class Store:
    """The arrays of one folder.

    Attributes:
        folder: where they are.
        about: content of ``about.json``.

    Raises:
        ConfigError: the folder holds no features.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.about: dict[str, Any] = json.loads((self.folder / "about.json").read_text(encoding="utf-8"))
            known = self.about["version"] == _VERSION
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ConfigError(
                f"task.store={folder} holds no features (about.json is missing, damaged or of another version); make "
                f"some with task=features task.store={folder} init_from=<weights>"
            )

    @classmethod
    def prepare(
        cls, folder: str | Path, about: Mapping[str, Any], arrays: Mapping[str, ArraySpec], counts: Mapping[str, int]
    ) -> None:
        """Make an empty store; one process does.

        Args:
            folder: of the store.
            about: content of ``about.json`` beside what is derived.
            arrays: by name (``cls``, ``mean``, ``patches``, ``labels``).
            counts: images of each split.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for split, count in counts.items():
            whole = {name: ArraySpec((count, *spec.shape), spec.dtype) for name, spec in arrays.items()}
            whole["skipped"] = ArraySpec((count,), "uint8")
            whole["done"] = ArraySpec((-(-count // BLOCK),), "uint8")
            for name, spec in whole.items():
                # A sparse file: nothing is written but its header, however large it is to become.
                path = str(place / f"{split}_{name}.npy")
                np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(spec.dtype), shape=tuple(spec.shape))
        kinds = [name for name in arrays if name != "labels"]
        # Last: a folder without it is none.
        write_json(place / "about.json", {"version": _VERSION, **about, "kinds": kinds, "parts": dict(counts)})

    def array(self, split: str, name: str) -> np.ndarray:
        """An array, mapped: only what is looked at takes memory.

        Raises:
            ConfigError: it is missing, or shorter than it should be.
        """
        path, count = self.folder / f"{split}_{name}.npy", self.about["parts"][split]
        try:
            found: np.ndarray = np.load(str(path), mmap_mode="r")
            if len(found) == (-(-count // BLOCK) if name == "done" else count):
                return found
            trouble = f"{len(found)} rows"
        except (OSError, ValueError, EOFError) as error:
            trouble = str(error)
        raise ConfigError(
            f"task.store={self.folder} is damaged: {path.name} is missing or truncated ({trouble}); remove the "
            "folder, and make it again with task=features"
        )

    def used(self) -> dict[str, Any]:
        """What the features were made by, for the record of a run: weights and preprocessing."""
        return {key: self.about["fingerprint"][key] for key in ("weights", "preprocessing")}

    def missing(self, split: str) -> list[int]:
        """Numbers of the blocks that are not done.

        Raises:
            ConfigError: an array is missing, or shorter than it should be.
        """
        for name in (*self.about["kinds"], "labels"):
            self.array(split, name)
        return np.flatnonzero(np.array(self.array(split, "done")) == 0).tolist()

    def begun(self) -> bool:
        """Whether any block is done; a store without is as good as none, such as a refused run leaves."""
        return any(bool(self.array(split, "done").any()) for split in self.about["parts"])

    def write_block(self, split: str, number: int, values: Mapping[str, np.ndarray]) -> None:
        """Write a block to every array, and then that it is done."""
        for name, value in values.items():
            self._write(split, name, number * BLOCK, value)
        self._write(split, "done", number, np.ones(1))

    def _write(self, split: str, name: str, first: int, value: np.ndarray) -> None:
        """A positioned write, no map: several machines may write to one file of a shared folder."""
        array = self.array(split, name)
        assert isinstance(array, np.memmap)
        content = np.ascontiguousarray(value, array.dtype)
        if content.shape[1:] != array.shape[1:]:
            raise ValueError(f"{split}_{name}.npy holds {array.shape[1:]} of each image, not {content.shape[1:]}")
        with (self.folder / f"{split}_{name}.npy").open("r+b") as file:
            file.seek(array.offset + first * array.strides[0])
            file.write(content.tobytes())

    def check(self, fingerprint: Mapping[str, Any], kinds: Sequence[str]) -> None:
        """Refuse to go on with other features than would be computed now.

        Args:
            fingerprint: of weights, preprocessing and data, as it would be made now.
            kinds: what is wanted of each image.

        Raises:
            ConfigError: they are others; says what differs, and how.
        """
        kept, wrong = self.about["fingerprint"], [f"no {kind}" for kind in kinds if kind not in self.about["kinds"]]
        for name in ("weights", "preprocessing"):
            old, new = kept[name], fingerprint[name]
            keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            wrong += [f"{name}: {key} {old.get(key)}, now {new.get(key)}" for key in keys]
        wrong += [f"data: {each}" for each in differences(kept["data"], fingerprint["data"])[:2]]
        if wrong:
            raise ConfigError(
                f"task.store={self.folder} holds other features ({'; '.join(wrong)}); take another folder, or remove it"
            )

    def check_complete(self) -> None:
        """Refuse a store whose blocks are not all done.

        Raises:
            ConfigError: some are not, or an array is damaged.
        """
        lacking = sum(len(self.missing(split)) for split in self.about["parts"])
        if lacking:
            raise ConfigError(
                f"task.store={self.folder} is not done ({lacking} blocks of {BLOCK} images are missing); "
                "run task=features again with the same settings: it goes on"
            )
