"""The terminal: a rich console, and one-line warnings and errors on stderr.

A reader that has gone away (``| head``, a pager that was left) ends what is shown, never the run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["error", "flops", "make_console", "shown", "size", "warn", "write_nowhere"]


def make_console() -> Console:
    """A console on stdout, at full width where stdout is no terminal.

    Rich takes a pipe for a terminal where FORCE_COLOR is set, as Jupyter does for its kernels: a notebook would be full
    of what moves a cursor that is not there.
    """
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """Called by rich, which would exit here."""
            self.quiet = True
            write_nowhere(sys.stdout)

    if sys.stdout.isatty():
        return Terminal(highlight=False)
    return Terminal(highlight=False, width=120, force_terminal=False)


def shown(path: Path) -> str:
    """A path as the user reads it: relative to the working directory where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def size(value: Any) -> str:
    """Bytes for people: ``41.9 GiB``."""
    if value is None:
        return "?"
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB" if amount < 100 else f"{amount:.0f} GiB"


def flops(value: float) -> str:
    """Operations for people, to be followed by ``FLOP`` or ``FLOP/s``: ``1.2 T``."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} "


def warn(message: str) -> None:
    """One line that the user can act on."""
    _write(sys.stderr, f"warning: {message}\n")


def error(message: str) -> None:
    """What went wrong: the first line says it, details follow."""
    _write(sys.stderr, f"error: {message}\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        write_nowhere(stream)


def write_nowhere(stream: TextIO) -> None:
    """What is still buffered, and all that comes, goes nowhere: else Python would complain about it at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)
