"""The run folder: the paths of a run's files, and how a refused start leaves the folder unchanged."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping

from exp.errors import ConfigError, RunError
from exp.runs.files import digest_of, digest_without_own, read_json, to_json, write_atomically, write_json

__all__ = [
    "CHECKPOINT_NAME",
    "RunFolder",
    "Snapshot",
    "last_known",
    "last_records",
    "missing_folders",
    "read_records",
    "read_result",
    "remove_empty",
]

CHECKPOINT_NAME = re.compile(r"^step_(\d+)\.pth$")
"""File name of a checkpoint from which training can resume; the number counts optimizer steps."""
_LEAST_BYTES = 2**16  # the records of the shortest run may need so much
_TAIL_BYTES = 2**16  # read from the end of metrics.jsonl; many lines
_RECORDS = ("result.json", "config.yaml", "overrides.yaml", "env.json", "metrics.jsonl")
_LOGS = {"logs", "slurm", "tensorboard", "trackers", "vis_data"}
_OUTPUTS = (  # of all tasks; logs are not in the list, since a new start appends to them
    "checkpoints", "differences.csv", "doctor", "doctor.json", "env.json", "features", "features.csv", "forecasts",
    "metrics.jsonl", "metrics_*.csv", "parity.json", "plots", "predictions", "predictions.csv", "probes.csv",
    "reference", "tensorboard", "tested", "trace.npz", "trackers",
)  # fmt: skip


class RunFolder:
    """Paths of one run; all ranks share the folder.

    If the folder has an earlier run, a new start writes its ``config.yaml`` and other records to ``.start``
    (:meth:`stage`). When the new run begins (:meth:`begin`), the records of the earlier run move to ``.earlier``, and
    those of ``.start`` take their place. ``.earlier`` is removed when the new run has results; if it is refused, the
    earlier records are put back.

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
        self.plots = self.path / "plots"
        self.forecasts = self.path / "forecasts"
        self.start = self.path / ".start"
        self.earlier = self.path / ".earlier"

    def create(self) -> None:
        """Make the folder and its subfolder ``logs``.

        Raises:
            ConfigError: the folder cannot be made or written.
            RunError: the disk is full.
        """
        try:
            self.logs.mkdir(mode=0o750, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as file:
                file.write(b"\1" * _LEAST_BYTES)  # a full disk accepts empty files
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
            kind = RunError if full else ConfigError
            raise kind(f"cannot write to the run folder {self.path}: {error.strerror}; set output_dir") from error

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
        self.drop_earlier()  # left by a run that was killed
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

        The earlier records move to ``.earlier`` first, and all files move one by one. If the process is killed in
        between, the start is still pending, and each file is in one of the folders.

        Args:
            overwrite: move the outputs of the earlier run to ``.earlier``, too.
        """
        if not self.pending:
            return
        self.earlier.mkdir(mode=0o750, exist_ok=True)
        if self.metrics.is_file() and not overwrite:  # a resumed run appends to the file
            shutil.copy2(str(self.metrics), str(self.earlier))
        for pattern in (*_OUTPUTS, *_RECORDS) if overwrite else _RECORDS:
            for old in self.path.glob(pattern):
                if not (self.earlier / old.name).exists():
                    old.replace(self.earlier / old.name)
        for file in sorted(self.start.iterdir()):
            file.replace(self.path / file.name)
        self.start.rmdir()

    def put_back(self) -> None:
        """Undo :meth:`begin`; files that the run has written since under the same names are lost."""
        for old in self.earlier.iterdir() if self.earlier.is_dir() else ():
            place = self.path / old.name
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(str(place))
            old.replace(place)
        self.drop_earlier()

    def drop_earlier(self) -> None:
        """Remove ``.earlier``: the run that began was not refused."""
        shutil.rmtree(str(self.earlier), ignore_errors=True)

    def drop_start(self) -> None:
        """Remove the files of a start that never began."""
        if self.pending:
            self.put_back()  # it may have been killed during begin()
        shutil.rmtree(str(self.start), ignore_errors=True)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json``, with its own digest and those of the files that :meth:`altered` checks."""
        beside = {path.name: digest_of(path) for path in self._recorded if path.is_file()}
        content = json.loads(to_json({**result, "digests": beside}))
        content["digests"][self.result.name] = digest_without_own(content, self.result.name)
        write_json(self.result, content)
        if result.get("status") != "failed":  # a failed run may be refused, which needs the earlier records
            self.drop_earlier()

    @property
    def _recorded(self) -> tuple[Path, ...]:
        return self.config, self.metrics

    def altered(self, result: Mapping[str, Any]) -> list[str]:
        """Names of the files that were changed after ``result.json`` was written.

        Args:
            result: content of ``result.json``; files without a digest there (older versions) are not checked.
        """
        digests = result.get("digests") or {}
        kept = [path for path in self._recorded if path.name in digests]
        return [path.name for path in kept if not path.is_file() or digest_of(path) != digests[path.name]]

    def records(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl`` (:func:`read_records`); empty if there is no such file."""
        return list(read_records(self.metrics.read_bytes().splitlines())) if self.metrics.is_file() else []

    def has_checkpoint(self) -> bool:
        """Whether the folder has a checkpoint of a training."""
        return any(self.checkpoints.glob("step_*.pth"))

    def log_file(self, rank: int) -> Path:
        """The log file of one (global) rank."""
        return self.logs / f"rank{rank}.log"

    def error_file(self, rank: int) -> Path:
        """The file in which a failing rank leaves its error for the launcher."""
        return self.logs / f"rank{rank}.error.json"


class Snapshot:
    """The content of a run folder before a start, so that a refused start can be undone.

    Args:
        folder: the run folder; it may have an earlier run.
        missing: folders that did not exist before (:func:`missing_folders`).
    """

    def __init__(self, folder: RunFolder, missing: list[Path]) -> None:
        self.missing = missing
        self._folder = folder
        self._before = set(folder.path.rglob("*"))
        self._logs = {path: path.stat().st_size for path in self._before if self._is_log(path) and path.is_file()}

    def take_back(self) -> bool:
        """Remove the files that the start added, put back what it set aside, and truncate logs to their old length.

        Returns:
            True if this was done. False, and nothing is removed, if the start has computed results.
        """
        folder, earlier = self._folder, set(self._folder.earlier.rglob("*"))
        before = self._before - {folder.path / path.relative_to(folder.earlier) for path in earlier}
        new = [path for path in folder.path.rglob("*") if path not in {*before, *earlier, folder.earlier}]
        if any(map(self._is_result, new)):
            folder.drop_earlier()
            return False
        for path in sorted(new, reverse=True):  # the content of a folder before the folder
            with contextlib.suppress(FileNotFoundError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.put_back()
        for path, size in self._logs.items():
            if path.is_file() and path.stat().st_size > size:
                os.truncate(str(path), size)
        return True

    def _is_log(self, path: Path) -> bool:
        return bool(_LOGS.intersection(path.relative_to(self._folder.path).parts))

    def _is_result(self, path: Path) -> bool:
        if path.is_dir() or self._is_log(path):
            return False
        if path.name != self._folder.metrics.name:
            return path.name not in _RECORDS
        old = self._folder.earlier / path.relative_to(self._folder.path)
        return not (old.read_bytes() if old.is_file() else b"").startswith(path.read_bytes())


def missing_folders(path: Path) -> list[Path]:
    """``path`` and its parents that do not exist, the innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that are empty, in this order; those that are not empty stay."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def read_result(folder: RunFolder) -> dict[str, Any] | None:
    """The content of ``result.json`` of a run folder, or None if there is no such file.

    Raises:
        ConfigError: the file is damaged, or is not the result of a run.
    """
    try:
        result = read_json(folder.result)
    except RunError as error:
        raise ConfigError(str(error)) from error
    if result is not None and not isinstance(result, dict):
        raise ConfigError(f"{folder.result} is not the result of a run; remove it, or use another output_dir")
    return result


def read_records(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The records in lines of ``metrics.jsonl``; lines that are truncated or not valid records are left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "split" in record and isinstance(record.get("step"), int):
            yield record


def last_records(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """The last records of ``metrics.jsonl``, the newest first."""
    try:
        with folder.metrics.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return
    yield from read_records(reversed(lines))


def last_known(folder: RunFolder) -> dict[str, int]:
    """Progress of a training that ended without a result, from ``metrics.jsonl`` and the names of checkpoints.

    Returns:
        Optimizer ``steps`` and completed ``epochs``; zeros if the folder has neither.
    """
    trained = (record for record in last_records(folder) if record["split"] in ("train", "val") and "epoch" in record)
    last = next(trained, {"step": 0, "epoch": 0})
    names = [CHECKPOINT_NAME.match(path.name) for path in folder.checkpoints.glob("step_*")]
    return {"steps": max([last["step"], *(int(name.group(1)) for name in names if name)]), "epochs": last["epoch"]}
