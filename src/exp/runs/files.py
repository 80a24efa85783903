"""Files of a run: written whole or not at all, digested, and without passwords.

JSON has neither infinity nor nan, and CSV no formulas.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterable, Mapping

from exp.errors import RunError

__all__ = [
    "UMASK",
    "as_text",
    "csv_content",
    "digest_of",
    "read_json",
    "to_json",
    "without_credentials",
    "write_atomically",
    "write_json",
]

UMASK = 0o027
"""Of all processes of a run, whatever the user's: folders 0750, files 0640."""
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@?#\"']+(?=@)")
_PIECE = 2**22  # bytes


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write ``content`` under a temporary name in the same folder, flush it to the disk, and rename it to ``path``.

    Args:
        path: the file to be.
        content: what it is to hold, or what writes that into the file that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        if temporary.exists():
            temporary.unlink()


def digest_of(path: Path, less: int = 0, then: bytes = b"") -> str:
    """SHA-256 of a file, hexadecimal; without so many bytes at its end, and with ``then`` in their place."""
    digest, left = hashlib.sha256(), path.stat().st_size - less
    with path.open("rb") as file:
        while left > 0:
            piece = file.read(min(left, _PIECE))
            digest.update(piece)
            left -= len(piece) or left  # cut off since
    digest.update(then)
    return digest.hexdigest()


def digest_without_own(value: Mapping[str, Any], name: str) -> str:
    """SHA-256 of a JSON object that keeps its digest under ``digests``, by the name of its file."""
    digests = {file: digest for file, digest in value["digests"].items() if file != name}
    return hashlib.sha256(to_json({**value, "digests": digests}, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, atomically; see :func:`to_json`."""
    write_atomically(path, (to_json(value, indent=2) + "\n").encode())


def to_json(value: Any, **options: Any) -> str:
    """``value`` as JSON, which has neither infinity nor nan: such numbers are null. Addresses lose their credentials.

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
    return without_credentials(value) if isinstance(value, str) else value


def without_credentials(text: str) -> str:
    """A text whose addresses have ``***`` in place of user name and password."""
    return _CREDENTIALS.sub("***", text) if "://" in text else text


def read_json(path: Path) -> Any:
    """The JSON value in ``path``, or None where there is no such file.

    Raises:
        RunError: the file is not JSON, or not as :meth:`RunFolder.write_result` has written it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}); remove it, or use another output_dir") from error
    digests = value.get("digests") if isinstance(value, dict) else None
    if (
        isinstance(digests, dict)
        and path.name in digests
        and digests[path.name] != digest_without_own(value, path.name)
    ):
        raise RunError(
            f"{path} is damaged: its digest is not that of what it holds; remove it, or use another output_dir"
        )
    return value


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def as_text(cell: object) -> object:
    """A cell that a spreadsheet does not compute: with an apostrophe in front, where it would (OWASP, CSV injection).

    Numbers stay as they are, also as strings.
    """
    if not (isinstance(cell, str) and cell.startswith(_FORMULA)):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def csv_content(rows: Iterable[Iterable[object]]) -> bytes:
    """The content of a CSV file in UTF-8; lines end with a line feed.

    Args:
        rows: the titles first.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([as_text(cell) for cell in row] for row in rows)
    return text.getvalue().encode()
