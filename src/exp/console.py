"""The terminal: a rich console, and one-line warnings and errors on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["error", "make_console", "shown", "warn"]


def make_console() -> Console:
    """A console on stdout, at full width where stdout is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def shown(path: Path) -> str:
    """A path as the user reads it: relative to the working directory where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def warn(message: str) -> None:
    """One line that the user can act on."""
    print(f"warning: {message}", file=sys.stderr, flush=True)  # noqa: T201


def error(message: str) -> None:
    """What went wrong: the first line says it, details follow."""
    print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201
