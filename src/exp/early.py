"""Signals while no worker is at work: before a run is started, and when only its end is to be told.

A launcher takes the signals while it waits for workers. Their defaults would end this process without a word, and
SIGUSR2's with a code that tells nobody to run it again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Iterator

from exp import console
from exp.errors import EXIT_PREEMPTED
from exp.runs.status import ENDING_SIGNALS, PREEMPT_SIGNAL

__all__ = ["begin", "has_begun", "listening", "tell"]

_begun: list[bool] = []


class _Ended(KeyboardInterrupt):
    """A signal has come: wherever Ctrl-C is heard, so is this.

    Not KeyboardInterrupt itself: once one has passed through an ``exec`` of text (that of a dataclass is enough),
    Python ends by SIGINT whatever exit code it is given.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Have the signals that end a run raise a kind of ``KeyboardInterrupt``, for the life of a command line.

    Those that this process was started to ignore stay ignored, but for that of preemption. The first that comes
    counts: while it is answered another one would break off the clean-up, which Ctrl-C alone may.
    """
    came: list[int] = []

    def hear(number: int, _frame: object) -> None:
        if not came or number == signal.SIGINT:
            came.append(number)
            raise _Ended(number)

    _begun.clear()
    for number in ENDING_SIGNALS:
        if number == PREEMPT_SIGNAL or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hear)
    try:
        yield
    finally:
        came.append(0)  # the exit code is decided


def begin() -> None:
    """From here on it cannot be said any more that nothing has been begun."""
    _begun.append(True)


def has_begun() -> bool:
    """Whether it has been, by a run or a sweep."""
    return bool(_begun) or "exp.sweep" in sys.modules


def tell(interrupt: KeyboardInterrupt, by: str | None = None) -> int:
    """Say in one line that a signal has ended the command; returns the exit code (docs/concepts/run.md).

    Args:
        interrupt: how it was heard.
        by: name of the signal, where somebody else has heard it.
    """
    if not isinstance(interrupt, _Ended) or interrupt.number == signal.SIGINT:
        console.error(f"interrupted by {by}" if by else "interrupted")
        return 128 + signal.SIGINT
    lost = "" if has_begun() else " before anything was begun; give the same command again"
    console.error(f"ended by {signal.Signals(interrupt.number).name}{lost}")
    return EXIT_PREEMPTED if interrupt.number == PREEMPT_SIGNAL else 128 + interrupt.number
