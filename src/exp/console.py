"""The terminal: a rich console, and one-line warnings and errors on stderr.

A reader that has gone away (``| head``, a pager that was left) ends what is shown, never the run.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["error", "flops", "make_console", "shown", "size", "wait_for", "waited", "warn", "write_nowhere"]

_CLEAR = "\r\x1b[2K"  # to the first column, and nothing on the line
_waits_for = ""


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

        def print(self, *objects: Any, **options: Any) -> None:
            """Above the line that says what is waited for."""
            text = _waits_for
            waited()
            super().print(*objects, **options)
            if text:
                wait_for(text)

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


def wait_for(what: str) -> None:
    """Say on a terminal what the next seconds go into, on a line that the next such line, or :func:`waited`, replaces.

    Elsewhere nothing is written. The first column is left to whoever writes next, a worker included.
    """
    global _waits_for
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return
    _waits_for = what
    columns = shutil.get_terminal_size().columns
    _write(sys.stdout, f"{_CLEAR}{f'{what} ...'[: columns - 1]}\r")


def waited() -> None:
    """Take the line of :func:`wait_for` away, if this process has written one."""
    global _waits_for
    if _waits_for:
        _waits_for = ""
        _write(sys.stdout, _CLEAR)


def warn(message: str) -> None:
    """One line that the user can act on."""
    waited()
    _write(sys.stderr, f"warning: {message}\n")


def error(message: str) -> None:
    """What went wrong: the first line says it, details follow."""
    waited()
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
