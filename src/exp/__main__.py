"""``python -m exp``, and the command ``exp``."""

from __future__ import annotations

import signal
import sys

from exp.errors import EXIT_PREEMPTED, Ended
from exp.runs.status import ENDING_SIGNALS, PREEMPT_SIGNAL

__all__ = ["main"]


def main() -> int:
    """Run the command line in ``sys.argv``; returns the exit code (docs/concepts/run.md).

    While no launcher listens, the signals that end a run raise :class:`exp.errors.Ended`: their defaults would end this
    process without a word, and SIGUSR2's with a code that tells nobody to run it again. Signals that
    were ignored when this process started stay ignored, except the preemption signal. Only the first signal counts: a
    later one would break off the clean-up, which only Ctrl-C may do.
    """
    came: list[int] = []

    def hear(number: int, _frame: object) -> None:
        if not came or number == signal.SIGINT:
            came.append(number)
            raise Ended(number, EXIT_PREEMPTED if number == PREEMPT_SIGNAL else 128 + number)

    for number in ENDING_SIGNALS:
        if number == PREEMPT_SIGNAL or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hear)
    try:
        from exp.cli import main as run  # takes most of a second

        return run()
    except Ended as ended:
        return ended.tell()
    finally:
        came.append(0)  # the exit code is decided


if __name__ == "__main__":
    sys.exit(main())
