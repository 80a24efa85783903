"""The run folder: the paths of a run's files, and how a refused start leaves the folder unchanged; and its records.

``result.json`` has the keys of :func:`blank_result`. Imports no torch: for a run that failed, the parent process writes
this file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping

from omegaconf import OmegaConf

from exp.errors import RunError
from exp.runs.files import digest_of, digest_without_own, read_json, seal_of, to_json, write_atomically, write_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = [
    "CHECKPOINT_NAME", "TAIL_BYTES", "RunFolder", "Snapshot", "blank_result", "last_known", "read_records",
    "selecting_value",
]  # fmt: skip

CHECKPOINT_NAME = re.compile(r"^step_(\d+)\.pth$")
"""File name of a checkpoint from which training can resume; the number counts optimizer steps."""
TAIL_BYTES = 2**16
"""Of ``metrics.jsonl``, for its last records; many lines."""
_RECORDS = ("result.json", "config.yaml", "overrides.yaml", "env.json", "metrics.jsonl")
_CLAIM = "recorded"  # in ``logs``
_LOGS = {"logs", "slurm", "tensorboard", "trackers", "vis_data"}
_OUTPUTS = (  # of all tasks; logs are not in the list, since a new start appends to them
    "checkpoints", "differences.csv", "doctor", "doctor.json", "env.json", "features", "features.csv", "forecasts",
    "metrics.jsonl", "metrics_*.csv", "parity.json", "plots", "predictions", "predictions.csv", "probes.csv",
    "reference", "tensorboard", "tested", "trace.npz", "trackers",
)  # fmt: skip

_NOT_YET_KNOWN = (
    "metric_name", "metric", "selected_by", "reported", "published", "trained_in", "device_type", "process_group",
    "fallback", "samples_per_second", "time_to_first_step_s", "memory_peak", "flops_per_second", "flops_share",
    "left_device", "wall_s", "resumed_from", "error",
)  # fmt: skip


class RunFolder:
    """Paths of one run; all ranks share the folder.

    If the folder has an earlier run, a new start writes its ``config.yaml`` and other records to ``.start``
    (:meth:`stage`). When the new run begins (:meth:`begin`), they replace the earlier records. If it is refused before
    that, the earlier records stay unchanged.

    Args:
        path: the folder; :meth:`create` makes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.overrides = self.path / "overrides.yaml"
        self.env = self.path / "env.json"
        self.result = self.path / "result.json"
        self.metrics = self.path / "metrics.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.forecasts = self.path / "forecasts"
        self.start = self.path / ".start"

    def create(self) -> None:
        """Make the folder and its subfolder ``logs``."""
        self.logs.mkdir(mode=0o750, parents=True, exist_ok=True)

    def check_there(self) -> None:
        """Check that the folder still exists; otherwise a result would be written into a new, empty folder.

        Raises:
            RunError: the folder that :meth:`create` made is gone.
        """
        if not self.logs.is_dir():
            raise RunError(f"the run folder {self.path} was deleted or moved while the run was going on")

    def stage(self, files: Mapping[str, bytes]) -> None:
        """Write the configuration of a new start: to ``.start`` if the folder has an earlier run, else to the folder.

        Args:
            files: contents by file name, with ``config.yaml`` among them.
        """
        self.drop_start()
        place = self.start if self.config.is_file() else self.path
        # The configuration comes last: its presence makes the other files valid.
        for name in sorted(files, key=lambda name: name == self.config.name):
            write_atomically(place / name, files[name])

    @property
    def pending(self) -> bool:
        """Whether a start has written its configuration to ``.start``, and has not begun."""
        return self.start.is_dir()

    def in_use(self, path: Path) -> Path:
        """The file in ``.start`` with the name of ``path``, if a start is pending and has it; else ``path``."""
        staged = self.start / path.name
        return staged if staged.is_file() else path

    def begin(self, overwrite: bool) -> None:
        """Replace the records of the earlier run by those of the pending start; called by one process of the run.

        Args:
            overwrite: remove the outputs of the earlier run, too.
        """
        if not self.pending:
            return
        for pattern in (*_OUTPUTS, self.result.name) if overwrite else (self.result.name, self.env.name):
            for old in self.path.glob(pattern):
                _remove(old)
        for file in sorted(self.start.iterdir()):
            file.replace(self.path / file.name)
        self.start.rmdir()

    def drop_start(self) -> None:
        """Remove the files of a start that never began."""
        shutil.rmtree(str(self.start), ignore_errors=True)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json``, with the run's id and digests of itself, configuration, records and checkpoints."""
        beside = {path.name: digest_of(path) for path in (self.config, self.metrics) if path.is_file()}
        for path in sorted(self.checkpoints.glob("*.pth")):
            seal = seal_of(path)
            beside[path.relative_to(self.path).as_posix()] = digest_of(path) if seal is None else seal.digest
        content = json.loads(to_json({**result, "run_id": self.run_id(), "digests": beside}))
        content["digests"][self.result.name] = digest_without_own(content, self.result.name)
        write_json(self.result, content)

    def recorded(self) -> dict[str, Any]:
        """``run_id`` and, once the run has ended, ``digests`` of its checkpoints; empty: no run has left its id."""
        found: dict[str, Any] = read_json(self.result) or read_json(self.env) or {}
        return found if found.get("run_id") else {}

    def run_id(self) -> str | None:
        """The id of the run whose folder this is, or that wrote the checkpoints in it; None: not known."""
        seals = map(seal_of, sorted(self.checkpoints.glob("step_*.pth")))
        return (read_json(self.env) or {}).get("run_id") or next((seal.run_id for seal in seals if seal), None)

    def altered(self, result: Mapping[str, Any]) -> list[str]:
        """Names of the files that were changed after ``result.json`` was written.

        Args:
            result: content of ``result.json``; files without a digest there (older versions) are not checked.
        """
        digests = result.get("digests") or {}
        kept = [path for path in (self.config, self.metrics) if path.name in digests]
        return [path.name for path in kept if not path.is_file() or digest_of(path) != digests[path.name]]

    def records(self, tail: int | None = None) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl`` (:func:`read_records`); empty if there is no such file to read.

        Args:
            tail: read only so many bytes at the end of the file; None: all.
        """
        try:
            with self.metrics.open("rb") as file:
                file.seek(0 if tail is None else max(file.seek(0, os.SEEK_END) - tail, 0))
                return [*read_records(file.read().splitlines())]
        except OSError:
            return []

    def has_checkpoint(self) -> bool:
        """Whether the folder has a checkpoint of a training."""
        return any(self.checkpoints.glob("step_*.pth"))

    def log_file(self, rank: int) -> Path:
        """The log file of one (global) rank."""
        return self.logs / f"rank{rank}.log"

    def forget_failures(self, ranks: Iterable[int] = ()) -> None:
        """Remove what an earlier launch has left: error files (of ``ranks``; empty: of all), and views of nodes."""
        errors = [*map(self.error_file, ranks)] or self.logs.glob("rank*.error.json")
        for stale in (*errors, *self.logs.glob("stuck-*.json"), self.logs / _CLAIM):
            stale.unlink(missing_ok=True)

    def claim_end(self) -> bool:
        """Whether the caller is the first to record the end of this launch; of several nodes, one does."""
        try:
            (self.logs / _CLAIM).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def error_file(self, rank: int) -> Path:
        """The file in which a failing rank leaves its error for the launcher."""
        return self.logs / f"rank{rank}.error.json"


class Snapshot:
    """The content of a run folder before a start, so that a refused start can be undone.

    Args:
        folder: the run folder; it may have an earlier run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._before = {path: path.lstat() for path in folder.path.rglob("*")}

    def take_back(self) -> bool:
        """Remove the files that the start added, and truncate logs to their old length.

        Returns:
            True if this was done. False, and nothing is removed, if the start has computed results, or has begun in the
            folder of an earlier run.
        """
        config, new = self._folder.config, [path for path in self._folder.path.rglob("*") if path not in self._before]
        # The file of an earlier run is replaced when this one begins.
        inode = config.lstat().st_ino if config.is_file() else None
        begun = config in self._before and self._before[config].st_ino != inode
        if begun or any(map(self._is_result, new)):
            return False
        for path in new:
            _remove(path)
        for path, before in self._before.items():
            if self._is_log(path) and path.is_file() and path.stat().st_size > before.st_size:
                os.truncate(str(path), before.st_size)
        return True

    def _is_log(self, path: Path) -> bool:
        return bool(_LOGS.intersection(path.relative_to(self._folder.path).parts))

    def _is_result(self, path: Path) -> bool:
        if path.is_dir() or self._is_log(path):
            return False
        return path.stat().st_size > 0 if path == self._folder.metrics else path.name not in _RECORDS


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path))
    else:
        path.unlink(missing_ok=True)


def read_records(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The records in lines of ``metrics.jsonl``; lines that are truncated or not valid records are left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and "split" in record and isinstance(record.get("step"), int):
            yield record


def last_known(folder: RunFolder) -> dict[str, int]:
    """Progress of a training that ended without a result, from ``metrics.jsonl`` and the names of checkpoints.

    Returns:
        Optimizer ``steps`` and completed ``epochs``; zeros if the folder has neither.
    """
    trained = (each for each in folder.records(TAIL_BYTES) if each["split"] in ("train", "val") and "epoch" in each)
    *_, last = {"step": 0, "epoch": 0}, *trained
    names = [CHECKPOINT_NAME.match(path.name) for path in folder.checkpoints.glob("step_*")]
    return {"steps": max([last["step"], *(int(name.group(1)) for name in names if name)]), "epochs": last["epoch"]}


def selecting_value(result: Mapping[str, Any] | None) -> float | None:
    """The metric by which runs are compared and the best is chosen; never one of the test split. None: no such metric.

    Args:
        result: content of ``result.json``.
    """
    chosen = (result or {}).get("selected_by")
    return chosen["value"] if isinstance(chosen, dict) else None


def blank_result(config: ExpConfig) -> dict[str, Any]:
    """Every key of ``result.json``: values that follow from the configuration, and null for the rest.

    Args:
        config: the frozen configuration.
    """
    weights: Any = OmegaConf.to_container(OmegaConf.create(config.record.weights))
    return {
        "status": "failed",
        "task": config.task.name,
        "experiment": config.name,
        "metrics": {},
        "metric_units": {},
        "greater_is_better": False,
        "measured_on": "test",
        "differs": [],
        "warnings": [],
        "weights": weights or None,
        "backend": config.backend.name,
        "simulated": config.backend.simulate,
        "devices": [],
        "wrapper": config.wrapper.kind,
        "precision": config.precision,
        "world_size": config.nproc * config.launcher.nnodes,
        "batch_size": config.batch_size,
        "accumulate": config.accumulate,
        "global_batch_size": config.global_batch_size,
        "steps": 0,
        "epochs": 0,
        "restarts": 0,
        "changed_on_resume": {},
        **dict.fromkeys(_NOT_YET_KNOWN),
    }
