"""What a start adds to its run folder, so that one that is refused can be taken back: the folder is as it was."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from exp.runs.folder import RunFolder

__all__ = ["Footprint", "missing_folders", "remove_empty"]

_RECORDS = {"config.yaml", "overrides.yaml", "env.json", "result.json"}
_LOGS = {"logs", "slurm", "tensorboard", "trackers", "vis_data"}
_MOST_BYTES = 2**24  # larger logs are only cut back to their length


def missing_folders(path: Path) -> list[Path]:
    """``path`` and those above it that are not there, the innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that are empty, in this order; somebody else may use one by now."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


class Footprint:
    """A run folder as it is before a start.

    Args:
        folder: it may hold a run that is to be continued.
        missing: what was not there before (:func:`missing_folders`).
    """

    def __init__(self, folder: RunFolder, missing: list[Path]) -> None:
        self._path = folder.path
        self._missing = missing
        self._before = set(folder.path.rglob("*"))
        small = [path for path in folder.path.glob("*") if path.name in _RECORDS or path == folder.metrics]
        small += [path for name in _LOGS for path in (folder.path / name).glob("*") if path.is_file()]
        self._size = {path: path.stat().st_size for path in small}
        self._content = {path: path.read_bytes() for path, size in self._size.items() if size <= _MOST_BYTES}

    def take_back(self) -> bool:
        """Remove what the start has added, and restore what it has changed.

        Returns:
            False, and nothing is removed, where there are results: what was computed is worth more than order.
        """
        new = [path for path in self._path.rglob("*") if path not in self._before]
        if any(self._is_result(path) for path in new) or self._has_metrics():
            return False
        for path in sorted(new, reverse=True):  # what lies in a folder before the folder
            with contextlib.suppress(FileNotFoundError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for path, content in self._content.items():
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)
        for path, size in self._size.items():
            if path.is_file() and path.stat().st_size > size:
                os.truncate(str(path), size)
        return True

    def remove_folders(self) -> None:
        """Remove the folders that were made, where nothing is left in them."""
        remove_empty(self._missing)

    def _is_result(self, path: Path) -> bool:
        if path.is_dir() or path.name in _RECORDS or path.name == "metrics.jsonl":
            return False
        return not _LOGS.intersection(path.relative_to(self._path).parts)

    def _has_metrics(self) -> bool:
        """Whether losses were written, here or in one of two runs that are compared."""
        for path in self._path.rglob("metrics.jsonl"):
            if path in self._before and path not in self._content:
                continue
            content = path.read_bytes()
            if content and not self._content.get(path, b"").startswith(content):
                return True
        return False
