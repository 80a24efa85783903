"""The run folder: the paths of a run's files, and how a refused start leaves the folder unchanged; and its records.

:mod:`exp.runs.record` has what ``env.json`` and ``result.json`` contain.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping

from exp.errors import RunError
from exp.plugins import installed
from exp.runs.files import digest_without_self, file_digest, read_json, read_seal, to_json, write_atomically, write_json
from exp.runs.job import NODE_CONFIG, SCRATCH_VARIABLE

CHECKPOINT_NAME = re.compile(r"^step_(\d+)\.pth$")
"""File name of a checkpoint from which training can resume; the number counts optimizer steps."""
QUARANTINE = "quarantine"
"""Folder below ``checkpoints/`` for checkpoints from which no run resumes: of another training, or of later
steps than the one from which a run has resumed, for example because they are damaged."""
TAIL_BYTES = 2**16
"""Bytes at the end of ``metrics.jsonl`` that :func:`last_progress` reads; they have many records."""
_RECORD_FILES = ("result.json", "config.yaml", "overrides.yaml", "env.json", "inputs.json", "metrics.jsonl")
_END_CLAIM = "recorded"  # a file in ``logs``
_LOG_DIRS = {"logs", "slurm", "tensorboard", "trackers"}
_OUTPUTS = (  # files of exp's own tasks; without logs, since a new start appends to them
    "checkpoints", "differences.csv", "doctor", "doctor.json", "env.json", "inputs.json", "metrics.jsonl",
    "metrics_*.csv", "parity.json", "plots", "predictions", "reference", "tensorboard", "test_samples.npz", "tested",
    "trace.npz", "trackers",
)  # fmt: skip


class RunFolder:
    """Paths of one run; all ranks share the folder.

    If the folder has an earlier run, a new start writes its ``config.yaml`` and other records to ``.start``
    (:meth:`write_pending`). When the new run begins (:meth:`commit_pending`), they replace the earlier records. If it
    is refused before that, the earlier records stay unchanged.

    Args:
        path: the folder; :meth:`create` makes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.overrides = self.path / "overrides.yaml"
        self.env = self.path / "env.json"
        self.inputs = self.path / "inputs.json"
        self.result = self.path / "result.json"
        self.metrics = self.path / "metrics.jsonl"
        self.test_samples = self.path / "test_samples.npz"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.pending_dir = self.path / ".start"

    def create(self) -> None:
        """Make the folder and its subfolder ``logs``."""
        self.logs.mkdir(mode=0o750, parents=True, exist_ok=True)

    def check_exists(self) -> None:
        """Check that the folder still exists; otherwise the result would be written into a new, empty folder.

        Raises:
            RunError: the folder that :meth:`create` made is gone.
        """
        if not self.logs.is_dir():
            raise RunError(f"the run folder {self.path} was deleted or moved while the run was going on")

    def write_pending(self, files: Mapping[str, bytes]) -> None:
        """Write the configuration of a new start: to ``.start`` if the folder has an earlier run, else to the folder.

        Args:
            files: contents by file name, with ``config.yaml`` among them.
        """
        self.discard_pending()
        target = self.pending_dir if self.config.is_file() else self.path
        # The configuration comes last: its presence makes the other files valid.
        for name in sorted(files, key=lambda name: name == self.config.name):
            write_atomically(target / name, files[name])

    @property
    def has_pending(self) -> bool:
        """Whether a start has written its configuration to ``.start``, and has not begun."""
        return self.pending_dir.is_dir()

    def current_file(self, path: Path) -> Path:
        """The file in ``.start`` with the name of ``path``, if a start is pending and has it; else ``path``."""
        staged = self.pending_dir / path.name
        return staged if staged.is_file() else path

    def config_of_node(self) -> Path:
        """The configuration for the workers of this node: its own, in the job's private folder, or that of the run."""
        own = Path(os.environ.get(SCRATCH_VARIABLE, os.devnull), NODE_CONFIG)
        return own if own.is_file() else self.current_file(self.config)

    def commit_pending(self, overwrite: bool) -> None:
        """Replace the records of the earlier run by those of the pending start; called by one process of the run.

        Args:
            overwrite: remove the outputs of the earlier run, too.
        """
        if not self.has_pending:
            return
        patterns = [self.result.name, self.env.name]
        if overwrite:
            patterns += [*_OUTPUTS, *(name for plugin in installed().values() for name in plugin.outputs)]
        for pattern in patterns:
            for old in self.path.glob(pattern):
                _remove(old)
        for file in sorted(self.pending_dir.iterdir()):
            file.replace(self.path / file.name)
        self.pending_dir.rmdir()

    def discard_pending(self) -> None:
        """Remove the files of a start that never began."""
        shutil.rmtree(str(self.pending_dir), ignore_errors=True)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json``, with the run's id and digests of itself, configuration, records and checkpoints."""
        digests = {path.name: file_digest(path) for path in self._digested if path.is_file()}
        for path in sorted(self.checkpoints.glob("*.pth")):
            seal = read_seal(path)
            digests[path.relative_to(self.path).as_posix()] = file_digest(path) if seal is None else seal.digest
        content = json.loads(to_json({**result, "run_id": self.run_id(), "digests": digests}))
        content["digests"][self.result.name] = digest_without_self(content, self.result.name)
        write_json(self.result, content)

    @property
    def _digested(self) -> tuple[Path, ...]:
        """The records whose digests ``result.json`` has, besides checkpoints."""
        return self.config, self.inputs, self.metrics, self.test_samples

    def saved_identity(self) -> dict[str, Any]:
        """``run_id`` and, once the run has ended, ``digests`` of its checkpoints; empty: no run has written its id."""
        record: dict[str, Any] = read_json(self.result) or read_json(self.env) or {}
        return record if record.get("run_id") else {}

    def run_id(self) -> str | None:
        """The id of the run whose folder this is, or that wrote the checkpoints in it; None: not known."""
        seals = map(read_seal, sorted(self.checkpoints.glob("step_*.pth")))
        return (read_json(self.env) or {}).get("run_id") or next((seal.run_id for seal in seals if seal), None)

    def modified_files(self, result: Mapping[str, Any]) -> list[str]:
        """Names of the files that were changed after ``result.json`` was written.

        Args:
            result: content of ``result.json``; files without a digest there (older versions) are not checked.
        """
        digests = result.get("digests") or {}
        recorded = [path for path in self._digested if path.name in digests]
        return [path.name for path in recorded if not path.is_file() or file_digest(path) != digests[path.name]]

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

    def clear_error_files(self, ranks: Iterable[int] = ()) -> None:
        """Remove files of an earlier launch: error files (of ``ranks``; empty: of all ranks), and node reports."""
        errors = [*map(self.error_file, ranks)] or self.logs.glob("rank*.error.json")
        for stale in (*errors, *self.logs.glob("stuck-*.json"), self.logs / _END_CLAIM):
            stale.unlink(missing_ok=True)

    def claim_end(self) -> bool:
        """Whether the caller is the first to record the end of this launch; only one of several nodes records it."""
        try:
            (self.logs / _END_CLAIM).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def error_file(self, rank: int) -> Path:
        """The file in which a failing rank leaves its error for the launcher."""
        return self.logs / f"rank{rank}.error.json"


class FolderSnapshot:
    """The content of a run folder before a start, so that a refused start can be undone.

    Args:
        folder: the run folder; it may have an earlier run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._before = {path: path.lstat() for path in folder.path.rglob("*")}

    def rollback(self) -> bool:
        """Remove the files that the start added, and truncate logs to their old length.

        Returns:
            True if the folder was restored. False, and nothing is removed, if the start has computed results, or has
            replaced the records of an earlier run.
        """
        config, new = self._folder.config, [path for path in self._folder.path.rglob("*") if path not in self._before]
        # When a run begins, its file replaces that of the earlier run.
        inode = config.lstat().st_ino if config.is_file() else None
        committed = config in self._before and self._before[config].st_ino != inode
        if committed or any(map(self._is_result, new)):
            return False
        for path in new:
            _remove(path)
        for path, before in self._before.items():
            if self._is_log(path) and path.is_file() and path.stat().st_size > before.st_size:
                os.truncate(str(path), before.st_size)
        return True

    def _is_log(self, path: Path) -> bool:
        return bool(_LOG_DIRS.intersection(path.relative_to(self._folder.path).parts))

    def _is_result(self, path: Path) -> bool:
        if path.is_dir() or self._is_log(path):
            return False
        return path.stat().st_size > 0 if path == self._folder.metrics else path.name not in _RECORD_FILES


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


def last_progress(folder: RunFolder) -> dict[str, int]:
    """Progress of a training that ended without a result, from ``metrics.jsonl`` and the names of checkpoints.

    Returns:
        Optimizer ``steps`` and completed ``epochs``; zeros if the folder has neither.
    """
    progress = (r for r in folder.records(TAIL_BYTES) if r["split"] in ("train", "val") and "epoch" in r)
    *_, last = {"step": 0, "epoch": 0}, *progress
    names = [CHECKPOINT_NAME.match(path.name) for path in folder.checkpoints.glob("step_*")]
    return {"steps": max([last["step"], *(int(name.group(1)) for name in names if name)]), "epochs": last["epoch"]}


def validation_metric(result: Mapping[str, Any] | None) -> float | None:
    """The metric that compares runs and chooses the best one; never one of the test split. None: there is none.

    Args:
        result: content of ``result.json``.
    """
    metric = (result or {}).get("selected_by")
    return metric["value"] if isinstance(metric, dict) else None
