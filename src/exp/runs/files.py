"""Writes and reads the files of a run: atomically, with digests, and without passwords.

JSON files contain neither infinity nor nan, and CSV files no formulas. A file that exp reads may come from somebody
else: its size is limited, and if it is not valid, a ConfigError names it.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import math
import os
import re
import secrets
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterable, Mapping, NamedTuple

import yaml

from exp.console import format_bytes, printable
from exp.errors import ConfigError

UMASK = 0o027
"""Umask of all processes of a run, instead of the user's: folders get mode 0750, files 0640."""
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@?#\"']+(?=@)")
_CHUNK_BYTES = 2**22  # bytes
NO_COMMENT = b"\0\0"
"""The last bytes of a zip archive without a comment: the length of the comment, 0."""
NO_RUN_ID = "0" * 32
_SEAL = re.compile(rb"sha256 (.{64})(.{32})", re.DOTALL)
SEAL_BYTES = len(NO_COMMENT) + len("sha256 ") + 64 + 32
"""Bytes at the end of a checkpoint that its digest does not cover: the comment of the zip archive, and its length."""
_MAX_JSON_BYTES, _MAX_YAML_BYTES = 2**28, 2**23  # bytes
_MAX_YAML_NODES, _MAX_YAML_DEPTH = 10**6, 100
_LONG_NUMBER = re.compile(r"[-+]?[0-9_]{1000,}")
# libyaml's loader is about ten times as fast, but some builds of PyYAML lack it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write ``content`` under a temporary name in the same folder, flush it to the disk, and rename it to ``path``.

    Args:
        path: the file.
        content: bytes, or a function that writes to the open file it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def file_digest(path: Path, omit: int = 0, suffix: bytes = b"") -> str:
    """SHA-256 of a file, hexadecimal.

    Args:
        path: the file.
        omit: number of bytes at its end to leave out.
        suffix: bytes to digest in their place.
    """
    digest, remaining = hashlib.sha256(), path.stat().st_size - omit
    with path.open("rb") as file:
        while remaining > 0:
            chunk = file.read(min(remaining, _CHUNK_BYTES))
            digest.update(chunk)
            remaining -= len(chunk) or remaining  # nothing read: the file was truncated meanwhile
    digest.update(suffix)
    return digest.hexdigest()


class Seal(NamedTuple):
    """The end of a checkpoint: the comment of the zip archive, which torch and other tools ignore.

    Attributes:
        digest: SHA-256 of the file without it, and of the id.
        run_id: of the run that wrote the file, or :data:`NO_RUN_ID`.
    """

    digest: str
    run_id: str = NO_RUN_ID

    def encoded(self) -> bytes:
        """The bytes that replace :data:`NO_COMMENT` at the end of the archive."""
        comment = f"sha256 {self.digest}{self.run_id}".encode()
        return len(comment).to_bytes(2, "little") + comment


def read_seal(path: Path) -> Seal | None:
    """The seal of a checkpoint; None: another tool has written the file."""
    with path.open("rb") as file:
        file.seek(-min(SEAL_BYTES, path.stat().st_size), os.SEEK_END)
        match = _SEAL.fullmatch(file.read()[len(NO_COMMENT) :])
    return match and Seal(*(group.decode("ascii", "replace") for group in match.groups()))


def digest_without_self(value: Mapping[str, Any], name: str) -> str:
    """SHA-256 of a JSON object without the entry for itself in ``digests``.

    Args:
        value: the object; ``digests`` has digests by file name.
        name: file name of the object itself.
    """
    digests = {file: digest for file, digest in value["digests"].items() if file != name}
    return hashlib.sha256(to_json({**value, "digests": digests}, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, atomically; see :func:`to_json`."""
    write_atomically(path, (to_json(value, indent=2) + "\n").encode())


def to_json(value: Any, **options: Any) -> str:
    """``value`` as JSON. Infinite numbers and nan become null; URLs lose user name and password.

    The outermost object, or each object of a list, records these numbers under ``not_finite``: ``"nan"``, ``"inf"`` or
    ``"-inf"`` by dotted path, such as ``{"metrics.mse": "nan"}``.

    Args:
        value: what ``json.dumps`` accepts.
        **options: of ``json.dumps``.
    """
    return json.dumps(_jsonable(value), allow_nan=False, **options)  # noqa: TID251 - the only call in exp


def _jsonable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    non_finite: dict[str, str] = {}
    plain = _replace_non_finite(value, "", non_finite)
    if non_finite and isinstance(plain, dict):
        plain["not_finite"] = non_finite
    return plain


def _replace_non_finite(value: Any, path: str, non_finite: dict[str, str]) -> Any:
    """``value`` with None for numbers that are not finite; ``non_finite`` gets them by path."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        finite = {k: _replace_non_finite(v, f"{path}.{k}" if path else str(k), non_finite) for k, v in items}
        return finite if isinstance(value, dict) else [*finite.values()]
    if isinstance(value, float) and not math.isfinite(value):
        non_finite[path] = str(float(value))
        return None
    return without_credentials(value) if isinstance(value, str) else value


def without_credentials(text: str) -> str:
    """``text`` with ``***`` in place of user name and password in URLs."""
    return _CREDENTIALS.sub("***", text) if "://" in text else text


def read_text(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Args:
        path: the file.
        max_bytes: largest size.

    Raises:
        ConfigError: the file is larger, or is not UTF-8.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ConfigError(f"{path} is larger than {format_bytes(max_bytes)}, the most that exp reads of such a file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8 (byte {error.start}); save it in this encoding") from error


def read_yaml(path: Path, load: Callable[[str], Any] = functools.partial(yaml.load, Loader=_LOADER)) -> Any:
    """The content of a YAML file.

    Args:
        path: the file.
        load: parses the text.

    Raises:
        ConfigError: see :func:`read_text`; or the file is not valid, or is small but would take much time or memory.
        OSError: it cannot be read.
    """
    text = read_text(path, _MAX_YAML_BYTES)
    try:
        _check_yaml(text)
        return load(text)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        line, problem = "", (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            line, problem = f", line {error.problem_mark.line + 1}", error.problem
        raise ConfigError(f"{path}{line}: {problem}; correct the file (YAML is indented with spaces)") from error


def _check_yaml(text: str) -> None:
    """Refuse YAML that a loader would need much time or memory for; raises YAMLError."""
    count, open_nodes, sizes = 0, [], {}
    for event in yaml.parse(text, Loader=_LOADER):
        problem = None
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
            sizes[event.anchor] = _MAX_YAML_NODES  # until its end, only an alias to itself can refer to it
            problem = f"more than {_MAX_YAML_DEPTH} levels" if len(open_nodes) > _MAX_YAML_DEPTH else None
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent) and _LONG_NUMBER.fullmatch(event.value):
            problem = "a number of more than 1000 digits"
        count += 1
        if problem or count > _MAX_YAML_NODES:
            problem = problem or f"more than {_MAX_YAML_NODES} values, aliases counted"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def read_json(path: Path) -> Any:
    """The JSON value in ``path``, or None if there is no such file.

    Raises:
        ConfigError: the file is not JSON, or its content does not match the digest that it contains.
    """
    try:
        value = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); correct or remove it") from error
    digest = (value.get("digests") or {}).get(path.name) if isinstance(value, dict) else None
    if digest is not None and digest != digest_without_self(value, path.name):
        raise ConfigError(
            f"{path} is damaged: its content does not match its digest; remove it, or use another output_dir"
        )
    return value


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def escape_formula(cell: object) -> object:
    """A cell without control characters; text that a spreadsheet would run as a formula gets an apostrophe first
    (OWASP, CSV injection).

    Numbers stay unchanged, also those in strings.
    """
    if not isinstance(cell, str):
        return cell
    formula, cell = cell.startswith(_FORMULA), printable(cell)
    if not formula:
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def csv_content(rows: Iterable[Iterable[object]]) -> bytes:
    """The content of a CSV file in UTF-8; lines end with a line feed.

    Args:
        rows: the column titles first.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([escape_formula(cell) for cell in row] for row in rows)
    return text.getvalue().encode()
