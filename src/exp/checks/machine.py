"""Which machine this is; and what of it may be attached to a report."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp.runs.environment import variables
from exp.runs.files import to_json, without_credentials

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["Secrets", "different", "machine", "tidy"]

_IDENTITY = ("name", "uuid", "serial", "bus_id")
_OF_THE_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")
"""Variables that are others each time."""
_KEPT = re.compile(r".*\.(?:json|jsonl|log|csv)")
_SECRET = re.compile(
    r"token|secret|pass(?:w|phrase|code|_|$)|credential|auth(?!or)|(?:api|access|private)_?key", re.IGNORECASE
)
_PAIR = re.compile(r"""['"]?([\w.]+)['"]?\s*[:=]\s*("[^"]*"|'[^']*'|[^\s,}\]]+)""")
_LEAST_CHARACTERS = 6
_LARGEST_BYTES = 2**21


def machine(backend: Backend, cards: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What tells a machine from another one, or from itself with another driver: packages, variables and cards.

    Args:
        backend: of the machine.
        cards: what the vendor's monitor says.
    """
    facts = {**backend.packages(), **variables(backend)}
    facts.update({name: os.environ[name] for name in backend.visible_variables if name in os.environ})
    facts.update({f"card {card['index']}": " ".join(str(card[key]) for key in _IDENTITY if card.get(key) is not None)
                  for card in cards})  # fmt: skip
    return {name: str(value) for name, value in facts.items() if not name.startswith(_OF_THE_JOB)}


def different(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In what two machines differ first, in words; None: in nothing."""
    names = (name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
    return next((f"{name}={before.get(name)}, this one has {now.get(name)}" for name in names), None)


class Secrets:
    """What must not be shown: values of variables and of keys that are called secret, and where the user's home is.

    Args:
        overrides: the user's.
        environment: of the workers, beside this process's.
    """

    def __init__(self, overrides: Sequence[str], environment: Mapping[str, str]) -> None:
        pairs = [*os.environ.items(), *environment.items()]
        pairs += [pair for override in overrides for pair in (override.partition("=")[::2], *_PAIR.findall(override))]
        known = {value.strip("'\"") for name, value in pairs if _SECRET.search(name)}
        found = {form for value in known for form in (value, to_json(value)[1:-1])}
        self._hidden = sorted((each for each in found if len(each) >= _LEAST_CHARACTERS), key=len, reverse=True)
        self._home = re.compile(rf"(?:(?<![\w./-])|(?<=\\n)){re.escape(str(Path.home()))}(?![\w-]|\.\w)")

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
        return text if Path.home() == Path("/") else self._home.sub("~", text)


def tidy(folder: Path, secrets: Secrets) -> None:
    """Remove what nobody needs for a judgement, checkpoints above all, and hide secrets in the rest.

    Args:
        folder: of a row.
        secrets: of the suite.
    """
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(OSError):  # of a process that is just ending
            if path.is_dir() and not path.is_symlink():
                path.rmdir()  # where it is empty
            elif path.is_symlink() or not _KEPT.fullmatch(path.name):
                path.unlink()
            else:
                text = path.read_bytes()[-_LARGEST_BYTES:].decode(errors="replace")
                path.write_text(secrets.hide_in(text), encoding="utf-8")
