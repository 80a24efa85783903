"""The terminal: a rich console, and one-line warnings and errors on stderr.

If the reader of the output closes its pipe (``| head``, a pager), the output ends, but the run continues.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = [
    "display_path", "error", "format_bytes", "format_flops", "format_metric", "make_console", "printable",
    "redirect_to_devnull", "stdout_errors", "warn",
]  # fmt: skip

# Control characters except tab and newline, characters that change the direction of text, and lone surrogates.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def make_console() -> Console:
    """A rich console on stdout; if stdout is not a terminal, it is 120 characters wide.

    Jupyter sets FORCE_COLOR for its kernels, and rich then takes a pipe for a terminal. ``force_terminal=False``
    prevents this; otherwise the notebook would show the control codes that move a terminal's cursor.
    """
    from rich.console import Console

    class Terminal(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            """Print; see :func:`stdout_errors`."""
            with stdout_errors():
                super().print(*objects, **options)

        def on_broken_pipe(self) -> None:
            """Print nothing more; rich's own method would end the process."""
            self.quiet = True
            redirect_to_devnull(sys.stdout)

        def render_str(self, text: str, **options: Any) -> Text:
            """Rich's text of a string, without control characters."""
            return super().render_str(printable(text), **options)

    if sys.stdout.isatty():
        return Terminal(highlight=False)
    return Terminal(highlight=False, width=120, force_terminal=False)


@contextlib.contextmanager
def stdout_errors() -> Iterator[None]:
    """Context for code that only prints: its OSErrors get the file name ``stdout``, which may be a file on a full disk.

    Raises:
        OSError: stdout cannot be written.
    """
    try:
        yield
    except OSError as error:
        # An error with a file name, or without a number (Hydra's for a missing choice), does not come from the output.
        if isinstance(error, BrokenPipeError) or error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, "stdout") from error


def printable(text: str) -> str:
    r"""``text`` with escapes such as ``\x1b`` in place of characters that control a terminal.

    The text of a user's files may contain them.
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def display_path(path: Path) -> str:
    """A path for messages: relative to the current folder, if the path is inside it."""
    try:
        current = Path.cwd()
    except FileNotFoundError:  # it was deleted
        return str(path)
    return str(path.relative_to(current) if current in (path, *path.parents) else path)


def format_bytes(value: Any) -> str:
    """A number of bytes as text, such as ``41.9 GiB``; ``?`` for None."""
    if value is None:
        return "?"
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB" if amount < 100 else f"{amount:.0f} GiB"


def format_flops(value: float) -> str:
    """A number of operations as text, such as ``1.2 T``, to which the caller appends ``FLOP`` or ``FLOP/s``."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} "


def warn(message: str) -> None:
    """Write a warning of one line to stderr; it tells the user what to do."""
    _write(sys.stderr, f"warning: {message}\n")


def error(message: str) -> None:
    """Write an error to stderr: the first line says what is wrong, further lines give details."""
    _write(sys.stderr, f"error: {message}\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(printable(text))
        stream.flush()
    except BrokenPipeError:
        redirect_to_devnull(stream)


def redirect_to_devnull(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, with its buffered text; otherwise Python reports a broken pipe at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def format_metric(value: float, like: float | None = None) -> str:
    """A metric as text: four decimals; if its size is below 1e-3 or from 1e5 on, four significant digits.

    Args:
        value: the metric.
        like: value whose size decides on the format, so that two values have the same; None: ``value``.
    """
    magnitude = abs(value if like is None else like)
    return f"{value:.4f}" if 1e-3 <= magnitude < 1e5 or magnitude == 0 else f"{value:.4g}"


def fitting(texts: Sequence[str], width: int) -> list[str]:
    """The first texts that fit into a line of ``width`` characters, with two spaces between them; at least one."""
    ends = accumulate(len(text) + 2 for text in texts)
    return [text for number, (text, end) in enumerate(zip(texts, ends)) if not number or end - 2 <= width]
