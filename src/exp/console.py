"""The terminal: a rich console, and one-line warnings and errors on stderr.

A reader that has gone away (``| head``, a pager that was left) ends what is shown, never the run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["error", "make_console", "shown", "warn"]


def make_console() -> Console:
    """A console on stdout, at full width where stdout is no terminal."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """Called by rich, which would exit here."""
            self.quiet = True
            _write_nowhere(sys.stdout)

    console = Terminal(highlight=False)
    return console if console.is_terminal else Terminal(highlight=False, width=120)


def shown(path: Path) -> str:
    """A path as the user reads it: relative to the working directory where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def warn(message: str) -> None:
    """One line that the user can act on."""
    _tell(f"warning: {message}")


def error(message: str) -> None:
    """What went wrong: the first line says it, details follow."""
    _tell(f"error: {message}")


def _tell(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)  # noqa: T201
    except BrokenPipeError:
        _write_nowhere(sys.stderr)


def _write_nowhere(stream: TextIO) -> None:
    """What is still buffered, and all that comes, goes nowhere: else Python would complain about it at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)
