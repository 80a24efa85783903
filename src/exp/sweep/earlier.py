"""Which job of an earlier sweep is the same as one of this: the same configuration, wherever and however it ran."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Sequence

from omegaconf.errors import OmegaConfBaseException

from exp.config.differences import as_plain
from exp.config.schema import ExpConfig
from exp.config.structures import load
from exp.result import selecting_value
from exp.runfolder import RunFolder, read_result, to_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Finished", "find_finished", "identity"]

_ELSEWHERE = ("figures", "launcher", "output_dir", "overwrite", "plots", "record", "report_placement", "resume",
              "resume_changed_data", "sweep")  # fmt: skip
"""Keys that do not change what a run computes."""


@dataclass(frozen=True)
class Finished:
    """A job of an earlier sweep."""

    folder: Path
    completed: bool
    metric: float | None


def identity(config: ExpConfig) -> str:
    """A digest of a configuration, less the keys that do not change what a run computes."""
    kept = {key: value for key, value in as_plain(config).items() if key not in _ELSEWHERE}
    return hashlib.sha256(to_json(kept, sort_keys=True, default=str).encode()).hexdigest()


def find_finished(folders: Sequence[Path]) -> dict[str, list[Finished]]:
    """The jobs in these run folders by identity; of those that are the same, the completed ones first."""
    found: dict[str, list[Finished]] = {}
    for path in folders:
        folder = RunFolder(path)
        result = read_result(folder) or {}
        job = Finished(path, result.get("status") == "completed", selecting_value(result))
        try:
            key = identity(load(folder.config))  # typed, so that keys which are new since then have their defaults
        except OmegaConfBaseException:
            continue  # written by another version of exp, with keys that are no more
        found.setdefault(key, []).append(job)
    return {key: sorted(jobs, key=lambda job: not job.completed) for key, jobs in found.items()}
