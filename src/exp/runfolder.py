"""The run folder: where each file of a run lies, and how files are written so that none is ever half there."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from exp.errors import RunError

__all__ = ["RunFolder", "read_json", "to_json", "write_atomically", "write_json"]

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
    """Write ``value`` as JSON, atomically; see :func:`to_json`."""
    write_atomically(path, (to_json(value, indent=2) + "\n").encode())


def to_json(value: Any, **options: Any) -> str:
    """``value`` as JSON, which has neither infinity nor nan: such numbers are null.

    What they were is told beside them, in the outermost object that holds them (of a list of records: in each of them),
    under ``not_finite``: by dotted path ``"nan"``, ``"inf"`` or ``"-inf"``, such as ``{"metrics.mse": "nan"}``.

    Args:
        value: of what ``json.dumps`` takes.
        **options: of ``json.dumps``.
    """
    return json.dumps(_told(value), allow_nan=False, **options)  # noqa: TID251 - the one place


def _told(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_told(item) for item in value]
    found: dict[str, str] = {}
    plain = _finite(value, "", found)
    if found and isinstance(plain, dict):
        plain["not_finite"] = found
    return plain


def _finite(value: Any, path: str, found: dict[str, str]) -> Any:
    """``value`` with null for what is not finite, which goes to ``found`` by its path."""
    if isinstance(value, dict):
        return {key: _finite(item, f"{path}.{key}" if path else str(key), found) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, f"{path}.{index}" if path else str(index), found) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        found[path] = str(float(value))
        return None
    return value


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
