"""What of a row goes into the folder that is attached to a report: text that the machine is judged by, no secrets."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Mapping, Sequence

from exp.runfolder import to_json, without_credentials

__all__ = ["Secrets", "tidy"]

_KEPT = re.compile(r".*\.(?:json|jsonl|log|csv)")
_SECRET = re.compile(
    r"token|secret|pass(?:w|phrase|code|_|$)|credential|auth(?!or)|(?:api|access|private)_?key", re.IGNORECASE
)
_NESTED = re.compile(r"""['"]?([\w.]+)['"]?\s*:\s*("[^"]*"|'[^']*'|[^\s,}\]]+)""")
_LEAST_CHARACTERS = 6
_LARGEST_BYTES = 2**21


class Secrets:
    """What must not be told: values of variables and of keys that are called secret, and where the user's home is.

    Args:
        overrides: the user's.
        environment: of the workers, beside this process's.
    """

    def __init__(self, overrides: Sequence[str], environment: Mapping[str, str]) -> None:
        pairs = [*os.environ.items(), *environment.items()]
        for override in overrides:
            pairs += [override.partition("=")[::2], *_NESTED.findall(override)]
        known = {value.strip("'\"") for name, value in pairs if _SECRET.search(name)}
        found = {form for value in known for form in (value, to_json(value)[1:-1])}
        self._hidden = sorted((each for each in found if len(each) >= _LEAST_CHARACTERS), key=len, reverse=True)
        self._home = str(Path.home())

    def hide(self, value: Any) -> Any:
        """``value`` without them, at any depth."""
        if isinstance(value, dict):
            return {key: self.hide(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(each) for each in value]
        return self.hide_in(value) if isinstance(value, str) else value

    def hide_in(self, text: str) -> str:
        """A text without them."""
        for each in self._hidden:
            text = text.replace(each, "***")
        text = without_credentials(text)
        if len(self._home) < 2:
            return text
        return re.sub(rf"(?:(?<![\w./-])|(?<=\\n)){re.escape(self._home)}(?![\w-]|\.\w)", "~", text)


def tidy(folder: Path, secrets: Secrets) -> None:
    """Remove what nobody needs for a judgement, checkpoints above all, and hide secrets in the rest.

    Args:
        folder: of a row.
        secrets: of the kit.
    """
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(FileNotFoundError):  # of a process that is just ending
            _tidy_one(path, secrets)
    shutil.rmtree(str(folder / "doctor"), ignore_errors=True)


def _tidy_one(path: Path, secrets: Secrets) -> None:
    if path.is_dir() and not path.is_symlink():
        if not any(path.iterdir()):
            path.rmdir()
    elif path.is_symlink() or not _KEPT.fullmatch(path.name):
        path.unlink()
    else:
        text = path.read_bytes()[-_LARGEST_BYTES:].decode(errors="replace")
        path.write_text(secrets.hide_in(text), encoding="utf-8")
