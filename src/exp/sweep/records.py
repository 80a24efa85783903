"""What a sweep has left in its folder: its run folders, its files, and the jobs of an earlier one."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from omegaconf.errors import OmegaConfBaseException

from exp.config.compose import load
from exp.config.differences import as_plain
from exp.config.schema import ExpConfig
from exp.errors import ConfigError
from exp.runs.files import to_json
from exp.runs.folder import RunFolder, read_result
from exp.runs.snapshot import remove_empty

if TYPE_CHECKING:
    from exp.report.runs import Run

__all__ = ["find_earlier", "identity", "remove_unused", "results", "run_folders"]

_OF_HYDRA = "multirun.yaml"
_ELSEWHERE = ("figures", "launcher", "output_dir", "overwrite", "plots", "record", "report_placement", "resume",
              "resume_changed_data", "sweep")  # fmt: skip
"""Keys that do not change what a run computes."""


def run_folders(folder: Path) -> list[Path]:
    """The run folders of a sweep."""
    return [path.parent for path in sorted(folder.glob("*/config.yaml"))]


def identity(config: ExpConfig) -> str:
    """A digest of a configuration, less the keys that do not change what a run computes."""
    kept = {key: value for key, value in as_plain(config).items() if key not in _ELSEWHERE}
    return hashlib.sha256(to_json(kept, sort_keys=True, default=str).encode()).hexdigest()


def find_earlier(folders: Sequence[Path]) -> dict[str, list[tuple[Path, bool]]]:
    """The run folders of an earlier sweep by their identity, and whether each is completed; those come first."""
    found: dict[str, list[tuple[Path, bool]]] = {}
    for path in folders:
        try:
            key = identity(load(RunFolder(path).config))  # typed: keys which are new since then have their defaults
        except OmegaConfBaseException:
            continue  # written by another version of exp, with keys that are no more
        result = read_result(RunFolder(path)) or {}
        found.setdefault(key, []).append((path, result.get("status") == "completed"))
    return {key: sorted(jobs, key=lambda job: not job[1]) for key, jobs in found.items()}


def remove_unused(folder: Path, missing: list[Path]) -> None:
    """Remove what was made for a sweep of which no job has begun.

    Args:
        folder: of the sweep.
        missing: the folders that were not there before (:func:`exp.runs.snapshot.missing_folders`).
    """
    if run_folders(folder):
        return
    if folder in missing:
        shutil.rmtree(str(folder), ignore_errors=True)
    else:
        (folder / _OF_HYDRA).unlink() if (folder / _OF_HYDRA).is_file() else None
    remove_empty(missing)


def results(folder: Path) -> list[Run]:
    """Runs of a sweep that can be compared; none where all jobs examine something, as those of ``task=doctor``."""
    from exp.report.runs import find_runs

    try:
        return find_runs([folder]) if run_folders(folder) else []
    except ConfigError:
        return []
