"""Features in a folder: memory-mapped arrays, what they were made of, and which blocks of them are done.

    about.json                  shapes, names of the classes, and the fingerprint
    <part>_cls.npy              (N, D), of the image
    <part>_mean.npy             (N, D), the mean of its patches
    <part>_patches.npy          (N, h, w, D), where they were asked for
    <part>_labels.npy           (N,) int64, -1: does not count; (N, K) of several; (N, H, W) uint8 of pixels
    <part>_skipped.npy          (N,) uint8, 1: the image could not be used (data.on_error=skip)
    <part>_done.npy             (blocks,) uint8

Imports neither torch nor what a backbone is made of: the parent looks at ``about.json``, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from exp.data.fingerprint import differences
from exp.errors import ConfigError
from exp.runfolder import write_json

__all__ = ["BLOCK", "ArraySpec", "Store", "read_about"]

BLOCK = 256
"""Images of a block: what a run that is killed has to compute again, at most, on each rank."""
_VERSION = 1


class ArraySpec(NamedTuple):
    """Shape of an image's share of an array, and the array's dtype."""

    shape: Sequence[int]
    dtype: str


def read_about(folder: str | Path) -> dict[str, Any]:
    """What a store says of itself.

    Raises:
        ConfigError: there is none, or not of this version.
    """
    path = Path(folder) / "about.json"
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = about["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"task.store={folder} holds no features ({path.name} is missing or damaged); make some with task=features "
            f"task.store={folder} init_from=<weights>"
        ) from error
    if version != _VERSION:
        raise ConfigError(f"task.store={folder} is of another version of exp; remove it, and make it again")
    return about


class Store:
    """The arrays of one folder.

    Attributes:
        folder: where they are.
        about: content of ``about.json``.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.about = read_about(folder)

    @classmethod
    def prepare(
        cls, folder: str | Path, about: Mapping[str, Any], arrays: Mapping[str, ArraySpec], counts: Mapping[str, int]
    ) -> None:
        """Make an empty store; one process does.

        Args:
            folder: of the store.
            about: what ``about.json`` is to say beside what is derived.
            arrays: by name (``cls``, ``mean``, ``patches``, ``labels``).
            counts: images of each part.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for part, count in counts.items():
            whole = {name: ArraySpec((count, *spec.shape), spec.dtype) for name, spec in arrays.items()}
            whole["skipped"] = ArraySpec((count,), "uint8")
            whole["done"] = ArraySpec((-(-count // BLOCK),), "uint8")
            for name, spec in whole.items():
                # A sparse file: nothing is written but its header, however large it is to become.
                np.lib.format.open_memmap(
                    str(place / f"{part}_{name}.npy"), mode="w+", dtype=np.dtype(spec.dtype), shape=tuple(spec.shape)
                )
        kinds = [name for name in arrays if name != "labels"]
        # Last: a folder without it is none.
        write_json(place / "about.json", {"version": _VERSION, **about, "kinds": kinds, "parts": dict(counts)})

    def array(self, part: str, name: str, writable: bool = False) -> np.ndarray:
        """An array, mapped: what is not looked at takes no memory.

        Raises:
            ConfigError: it is missing, or shorter than it says.
        """
        path = self.folder / f"{part}_{name}.npy"
        try:
            return np.load(str(path), mmap_mode="r+" if writable else "r")
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(
                f"task.store={self.folder} is damaged: {path.name} is missing or truncated ({error}); remove the "
                "folder, and make it again with task=features"
            ) from error

    def check_whole(self) -> None:
        """Whether all arrays are there, as long as the images are many.

        Raises:
            ConfigError: one is not; names it.
        """
        for part, count in self.about["parts"].items():
            for name in (*self.about["kinds"], "labels", "done"):
                found, wanted = len(self.array(part, name)), -(-count // BLOCK) if name == "done" else count
                if found != wanted:
                    raise ConfigError(
                        f"task.store={self.folder} is damaged: {part}_{name}.npy has {found} rows, not {wanted}; "
                        "remove the folder, and make it again with task=features"
                    )

    def skipped(self) -> dict[str, list[int]]:
        """By part the numbers of the images that could not be used; only parts that have such."""
        told = [part for part in self.about["parts"] if (self.folder / f"{part}_skipped.npy").exists()]  # older: none
        found = {part: np.flatnonzero(np.array(self.array(part, "skipped"))).tolist() for part in told}
        return {part: numbers for part, numbers in found.items() if numbers}

    def tell_skipped(self, count: int, files: Sequence[str]) -> None:
        """Name images that could not be used in ``about.json``; one process does."""
        told = {"count": count, "files": list(files)}
        if self.about.get("skipped") != told:
            self.about["skipped"] = told
            write_json(self.folder / "about.json", self.about)

    def told_skipped(self) -> dict[str, Any]:
        """``{"skipped": {"count", "files"}}``, as the result of a training has it; empty where nothing was."""
        return {"skipped": self.about["skipped"]} if "skipped" in self.about else {}

    def missing(self, part: str) -> list[int]:
        """Numbers of the blocks that are not done."""
        return np.flatnonzero(np.array(self.array(part, "done")) == 0).tolist()

    def begun(self) -> bool:
        """Whether any block is done; one without is as good as none, such as a refused run has left."""
        return any(bool(self.array(part, "done").any()) for part in self.about["parts"])

    def write_block(self, part: str, number: int, values: Mapping[str, np.ndarray]) -> None:
        """Write a block to every array, and then that it is done.

        Positioned writes, not a map: several machines may write to one file of a shared folder.
        """
        for name, value in values.items():
            self._write(part, name, number * BLOCK, value)
        self._write(part, "done", number, np.ones(1, np.uint8))

    def _write(self, part: str, name: str, first: int, value: np.ndarray) -> None:
        with (self.folder / f"{part}_{name}.npy").open("r+b") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            if tuple(shape[1:]) != value.shape[1:]:
                raise ValueError(f"{file.name} holds {shape[1:]} of each image, not {value.shape[1:]}")
            row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
            file.seek(file.tell() + first * row)
            file.write(np.ascontiguousarray(value, dtype=dtype).tobytes())

    def check(self, fingerprint: Mapping[str, Any], kinds: Sequence[str], shown: str) -> None:
        """Whether these are the features that would be computed.

        Args:
            fingerprint: of weights, preprocessing and data, as it would be made now.
            kinds: what is wanted of each image.
            shown: the folder as the user named it.

        Raises:
            ConfigError: they are others; says which part is not the same, and how.
        """
        kept, wrong = self.about["fingerprint"], []
        if kept["weights"] != fingerprint["weights"]:
            wrong.append(f"weights ({kept['weights']['sha256'][:12]}, now {fingerprint['weights']['sha256'][:12]})")
        old, new = kept["preprocessing"], fingerprint["preprocessing"]
        keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        if keys:
            wrong.append(
                f"preprocessing ({', '.join(f'{key} {old.get(key)}, now {new.get(key)}' for key in keys[:3])})"
            )
        found = differences(kept["data"], fingerprint["data"])
        if found:
            more = f" and {len(found) - 2} more" if len(found) > 2 else ""
            wrong.append(f"data ({'; '.join(found[:2])}{more})")
        if wrong:
            raise ConfigError(
                f"task.store={shown} holds other features, by {' and '.join(wrong)}; take another one or remove it"
            )
        lacking = [kind for kind in kinds if kind not in self.about["kinds"]]
        if lacking:
            raise ConfigError(f"task.store={shown} was made without {', '.join(lacking)}; take another folder")

    def check_complete(self) -> None:
        """Whether all blocks are done, and the arrays whole.

        Raises:
            ConfigError: some are not.
        """
        self.check_whole()
        lacking = {part: len(self.missing(part)) for part in self.about["parts"]}
        if any(lacking.values()):
            raise ConfigError(
                f"task.store={self.folder} is not done ({sum(lacking.values())} blocks of {BLOCK} images are missing); "
                "run task=features again with the same settings: it goes on"
            )
