"""Which machine this is, asked in a way that no driver can hang; and what of it may be attached to a report."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from omegaconf import OmegaConf

from exp.checks.child import ask
from exp.config.resolve import allow
from exp.environment import variables
from exp.errors import RunError
from exp.hardware.backend import Backend
from exp.hardware.registry import create_backend
from exp.runfolder import to_json, without_credentials

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["Monitor", "Secrets", "different", "machine", "tidy"]

_PATIENCE_S = 20.0
_IDENTITY = ("name", "uuid", "serial", "bus_id")
_OF_THE_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")
"""Variables that are others each time."""
_KEPT = re.compile(r".*\.(?:json|jsonl|log|csv)")
_SECRET = re.compile(
    r"token|secret|pass(?:w|phrase|code|_|$)|credential|auth(?!or)|(?:api|access|private)_?key", re.IGNORECASE
)
_NESTED = re.compile(r"""['"]?([\w.]+)['"]?\s*:\s*("[^"]*"|'[^']*'|[^\s,}\]]+)""")
_LEAST_CHARACTERS = 6
_LARGEST_BYTES = 2**21


class Monitor:
    """The vendor's monitor, read by a process of its own; one that has hung once is not asked again.

    Args:
        config: has the backend whose monitor it is.
        backend: the same.
    """

    def __init__(self, config: ExpConfig, backend: Backend) -> None:
        plain: Any = OmegaConf.to_container(config.backend, resolve=True)
        self._order = to_json({"backend": plain, "plugins": list(config.plugins)}).encode()
        self._answers = type(backend).monitor is not Backend.monitor

    def read(self) -> list[dict[str, Any]]:
        """See :meth:`exp.hardware.backend.Backend.monitor`; empty where it does not answer in time."""
        found: list[dict[str, Any]] = []
        if self._answers:
            try:
                found = ask("exp.checks.machine", order=self._order, patience_s=_PATIENCE_S)
            except TimeoutError:
                self._answers = False
            except RunError:
                pass  # it has ended with an error
        return found


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


def different(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """In what two machines differ first, in words; None: in nothing."""
    names = (name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
    return next((f"{name}={before.get(name)}, this one has {now.get(name)}" for name in names), None)


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
    shutil.rmtree(str(folder / "doctor"), ignore_errors=True)
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(FileNotFoundError):  # of a process that is just ending
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.is_symlink() or not _KEPT.fullmatch(path.name):
                path.unlink()
            else:
                text = path.read_bytes()[-_LARGEST_BYTES:].decode(errors="replace")
                path.write_text(secrets.hide_in(text), encoding="utf-8")


def main() -> None:
    """``-m exp.checks.machine``: the backend as JSON comes in, what its monitor says goes out."""
    order = json.load(sys.stdin)
    allow(order["plugins"])
    print(to_json(create_backend(order["backend"]).monitor()))  # noqa: T201


if __name__ == "__main__":
    main()
