"""Words of other frameworks (``words.yaml``), each with what to write here."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from exp.runs.files import read_yaml

_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_CHOSEN = {"backend", "data", "launcher", "logger", "model", "optim", "schedule", "task", "wrapper"}
"""Groups, whose choices are names of exp's own: a user's value never goes there."""


@lru_cache(maxsize=None)
def foreign_words() -> dict[str, dict[str, str]]:
    """By framework: an argument as its users know it, and arguments of exp with a note after ``#``."""
    words: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("words.yaml"))
    return words


def translate(key: str, value: str | None, exact: bool = False) -> str:
    """What to write for an argument of another framework, as the end of a message; empty if the table does not have it.

    Args:
        key: the key as written, with dashes or underscores.
        value: the value as written; None: there is none.
        exact: only for this value, not for others of the same key: exp has the key, too.
    """
    key, value = key.lower().replace("-", "_"), value or ""
    pairs = (pair for words in foreign_words().values() for pair in words.items())
    entries = [(left[len(key) + 1 :], right) for left, right in pairs if left.startswith(f"{key}=")]
    matching = [entry for entry in entries if fnmatchcase(value.lower(), entry[0].lower())]
    candidates = matching or ([] if exact else entries)
    if not candidates:
        return ""
    known, right = candidates[0]
    arguments, _, note = right.partition("# ")
    if _kind(known) == _kind(value):
        arguments = " ".join(_with_value(argument, known, value) for argument in arguments.split())
    if not arguments:
        return f": {note}"
    return f"; use {arguments.strip()}{f' ({note})' if note else ''}"


def _kind(value: str) -> str:
    if value.lower() in ("", "true", "false"):
        return "flag"
    return "number" if _NUMBER.fullmatch(value) else "text"


def _with_value(argument: str, known: str, value: str) -> str:
    """The argument with the user's value in place of the known one."""
    key, _, value_typed = argument.partition("=")
    if key in _CHOSEN or (value_typed != known and value_typed.rpartition(":")[2] != known):
        return argument
    return f"{key}={value_typed[: len(value_typed) - len(known)]}{shlex.quote(value)}"
