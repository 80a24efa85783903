"""What a worker is about to try, written before it tries it: after a crash the last line names the culprit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from exp.runfolder import to_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Trail", "read_trail"]


class Trail:
    """Lines of JSON, each on its way to the kernel before the next thing happens.

    Args:
        path: the file; begun anew.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def begin(self, name: str, detail: str, **about: Any) -> None:
        """Something is about to be tried.

        Args:
            name: what is left out where it crashes, such as ``aten.gelu.default``.
            detail: of this attempt, such as the shapes.
            **about: what else is to be known of it where it never ends.
        """
        self._write({"name": name, "detail": detail, **about, "ended": False})

    def end(self, name: str, **found: Any) -> None:
        """It has ended, well or not; ``found`` is what came of it."""
        self._write({"name": name, "ended": True, **found})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write((to_json(line) + "\n").encode())


def read_trail(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """What has ended, in order, and what had only begun when the worker ended; None: nothing had."""
    ended, open_ = [], None
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # cut off by a crash of the machine
        if found.pop("ended"):
            ended.append(found)
            open_ = None
        else:
            open_ = found
    return ended, open_
