"""The run folder: where each file of a run lies, and how a start that is refused leaves it as it was."""

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
"""What a checkpoint is called that a training goes on from: by the optimizer steps behind it."""
_LEAST_BYTES = 2**16  # what the records of the shortest run may need
_TAIL_BYTES = 2**16  # of metrics.jsonl: many of its lines
_RECORDS = ("result.json", "config.yaml", "overrides.yaml", "env.json", "metrics.jsonl")
_LOGS = {"logs", "slurm", "tensorboard", "trackers", "vis_data"}
_OUTPUTS = (  # of all tasks; logs stay, and are added to
    "checkpoints", "differences.csv", "doctor", "doctor.json", "env.json", "features", "features.csv", "forecasts",
    "metrics.jsonl", "metrics_*.csv", "parity.json", "plots", "predictions", "predictions.csv", "probes.csv",
    "reference", "tensorboard", "tested", "trace.npz", "trackers",
)  # fmt: skip


class RunFolder:
    """Paths of one run; every rank shares one.

    A start in a folder that holds a record writes its own ``config.yaml`` and what goes with it to ``.start`` (see
    :meth:`stage`). They take the place of those of the earlier run once it has started (:meth:`begin`), which lie in
    ``.earlier`` until the run has something to show; a start that comes to nothing leaves the record as it was.

    Args:
        path: the folder; made by :meth:`create`.
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
        """Make the folder and its ``logs``.

        Raises:
            ConfigError: it cannot be made or written.
            RunError: the disk is full.
        """
        try:
            self.logs.mkdir(mode=0o750, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as file:
                file.write(b"\1" * _LEAST_BYTES)  # a full disk lets empty files be made
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
            kind = RunError if full else ConfigError
            raise kind(f"cannot write to the run folder {self.path}: {error.strerror}; set output_dir") from error

    def check_there(self) -> None:
        """A result in a folder that somebody has deleted would be all that there is of the run.

        Raises:
            RunError: what :meth:`create` has made is gone.
        """
        if not self.logs.is_dir():
            raise RunError(f"the run folder {self.path} was deleted or moved while the run was going on")

    def stage(self, files: Mapping[str, bytes]) -> None:
        """Write the configuration of a start: at once where there is none, else beside the record.

        Args:
            files: contents by name; ``config.yaml`` among them.
        """
        self.drop_start()
        self.drop_earlier()  # a run that was killed has left it
        place = self.start if self.config.is_file() else self.path
        # The configuration last: with it the others count.
        for name in sorted(files, key=lambda name: name == self.config.name):
            write_atomically(place / name, files[name])

    @property
    def pending(self) -> bool:
        """Whether a start has written its configuration beside the record, and has not begun."""
        return self.start.is_dir()

    def in_use(self, path: Path) -> Path:
        """``path`` as the start has it that has not begun; that of the record where there is none."""
        staged = self.start / path.name
        return staged if staged.is_file() else path

    def begin(self, overwrite: bool) -> None:
        """Put the files of a start in the place of the record; called by one process of the run.

        The earlier ones are set aside first, and all is moved file by file: killed in between, the start is still
        pending, and what has moved is found where it is.

        Args:
            overwrite: set aside what the earlier run has computed, too.
        """
        if not self.pending:
            return
        self.earlier.mkdir(mode=0o750, exist_ok=True)
        if self.metrics.is_file() and not overwrite:  # a run that goes on adds to it
            shutil.copy2(str(self.metrics), str(self.earlier))
        for pattern in (*_OUTPUTS, *_RECORDS) if overwrite else _RECORDS:
            for old in self.path.glob(pattern):
                if not (self.earlier / old.name).exists():
                    old.replace(self.earlier / old.name)
        for file in sorted(self.start.iterdir()):
            file.replace(self.path / file.name)
        self.start.rmdir()

    def put_back(self) -> None:
        """Undo :meth:`begin`; what the run has written since under the same names goes."""
        for old in self.earlier.iterdir() if self.earlier.is_dir() else ():
            place = self.path / old.name
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(str(place))
            old.replace(place)
        self.drop_earlier()

    def drop_earlier(self) -> None:
        """Forget what :meth:`begin` has set aside: the run has not been refused."""
        shutil.rmtree(str(self.earlier), ignore_errors=True)

    def drop_start(self) -> None:
        """Forget a start that has come to nothing."""
        if self.pending:
            self.put_back()  # killed while it began
        shutil.rmtree(str(self.start), ignore_errors=True)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json``, with the digests of what :meth:`altered` looks at, and its own."""
        beside = {path.name: digest_of(path) for path in self._recorded if path.is_file()}
        content = json.loads(to_json({**result, "digests": beside}))
        content["digests"][self.result.name] = digest_without_own(content, self.result.name)
        write_json(self.result, content)
        if result.get("status") != "failed":  # one that has failed may be refused, and be taken back
            self.drop_earlier()

    @property
    def _recorded(self) -> tuple[Path, ...]:
        return self.config, self.metrics

    def altered(self, result: Mapping[str, Any]) -> list[str]:
        """Names of the files that are not as they were when ``result.json`` was written.

        Args:
            result: its content; one of an older version has no digests.
        """
        digests = result.get("digests") or {}
        kept = [path for path in self._recorded if path.name in digests]
        return [path.name for path in kept if not path.is_file() or digest_of(path) != digests[path.name]]

    def records(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl`` (:func:`read_records`); none where there is no such file."""
        return list(read_records(self.metrics.read_bytes().splitlines())) if self.metrics.is_file() else []

    def has_checkpoint(self) -> bool:
        """Whether a training has saved its state here."""
        return any(self.checkpoints.glob("step_*.pth"))

    def log_file(self, rank: int) -> Path:
        """The log of one (global) rank."""
        return self.logs / f"rank{rank}.log"

    def error_file(self, rank: int) -> Path:
        """Where a failing rank leaves its error for the launcher."""
        return self.logs / f"rank{rank}.error.json"


class Snapshot:
    """A run folder before a start, so that one that is refused can be taken back.

    Args:
        folder: it may hold a run that is to be continued.
        missing: what was not there before (:func:`missing_folders`).
    """

    def __init__(self, folder: RunFolder, missing: list[Path]) -> None:
        self.missing = missing
        self._folder = folder
        self._before = set(folder.path.rglob("*"))
        self._logs = {path: path.stat().st_size for path in self._before if self._is_log(path) and path.is_file()}

    def take_back(self) -> bool:
        """Remove what the start has added, and put back what it has set aside; logs are cut back to their length.

        Returns:
            False, and nothing is removed, where there are results: what was computed is worth more than order.
        """
        folder, earlier = self._folder, set(self._folder.earlier.rglob("*"))
        before = self._before - {folder.path / path.relative_to(folder.earlier) for path in earlier}
        new = [path for path in folder.path.rglob("*") if path not in {*before, *earlier, folder.earlier}]
        if any(map(self._is_result, new)):
            folder.drop_earlier()
            return False
        for path in sorted(new, reverse=True):  # what lies in a folder before the folder
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
    """``path`` and those above it that are not there, the innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders that are empty, in this order; somebody else may use one by now."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def read_result(folder: RunFolder) -> dict[str, Any] | None:
    """What ``result.json`` of a run folder says, or None where there is none.

    Raises:
        ConfigError: it is not what a run leaves.
    """
    try:
        result = read_json(folder.result)
    except RunError as error:
        raise ConfigError(str(error)) from error
    if result is not None and not isinstance(result, dict):
        raise ConfigError(f"{folder.result} is not the result of a run; remove it, or use another output_dir")
    return result


def read_records(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The records in lines of a ``metrics.jsonl``; a line that was cut off, or is none, is left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "split" in record and isinstance(record.get("step"), int):
            yield record


def last_records(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """The last records of ``metrics.jsonl``, from the end on."""
    try:
        with folder.metrics.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return
    yield from read_records(reversed(lines))


def last_known(folder: RunFolder) -> dict[str, int]:
    """How far a training has come that cannot tell it any more: what it last logged, or has saved since.

    Returns:
        Optimizer ``steps`` and completed ``epochs``; of a folder without either, zeros.
    """
    trained = (record for record in last_records(folder) if record["split"] in ("train", "val") and "epoch" in record)
    last = next(trained, {"step": 0, "epoch": 0})
    names = [CHECKPOINT_NAME.match(path.name) for path in folder.checkpoints.glob("step_*")]
    return {"steps": max([last["step"], *(int(name.group(1)) for name in names if name)]), "epochs": last["epoch"]}
