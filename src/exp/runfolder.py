"""The run folder: where each file of a run lies, and how files are written so that none is ever half there."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from exp.errors import RunError

__all__ = ["RunFolder", "read_json", "write_atomically", "write_json"]

_LEAST_BYTES = 2**16  # what the records of the shortest run may need


class RunFolder:
    """Paths of one run; every rank shares one.

    Args:
        path: the folder; made by :meth:`create`, with the permissions of the user's umask less those of others.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.overrides = self.path / "overrides.yaml"
        self.reference = self.path / "reference.yaml"
        self.env = self.path / "env.json"
        self.result = self.path / "result.json"
        self.metrics = self.path / "metrics.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.plots = self.path / "plots"
        self.forecasts = self.path / "forecasts"

    def create(self) -> None:
        """Make the folder and its ``logs``.

        Raises:
            RunError: it cannot be made or written.
        """
        try:
            self.logs.mkdir(mode=0o750, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as file:
                file.write(b"\1" * _LEAST_BYTES)  # a full disk lets empty files be made
        except OSError as error:
            raise RunError(f"cannot write to the run folder {self.path}: {error.strerror}; set output_dir") from error

    def has_checkpoint(self) -> bool:
        """Whether a training has saved its state here."""
        return any(self.checkpoints.glob("step_*.pth"))

    def log_file(self, rank: int) -> Path:
        """The log of one (global) rank."""
        return self.logs / f"rank{rank}.log"

    def error_file(self, rank: int) -> Path:
        """Where a failing rank leaves its error for the launcher."""
        return self.logs / f"rank{rank}.error.json"


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write ``content`` under a temporary name in the same folder, flush it to the disk, and rename it to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        if temporary.exists():
            temporary.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, atomically."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """The JSON value in ``path``, or None where there is no such file.

    Raises:
        RunError: the file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}); remove it, or use another output_dir") from error
