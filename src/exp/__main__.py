"""``python -m exp``, and the command ``exp``."""

from __future__ import annotations

import signal
import sys

from exp.errors import SignalReceived
from exp.runs.job import ENDING_SIGNALS, PREEMPT_SIGNAL


def main() -> int:
    """Run the command line in ``sys.argv``, and return the exit code (docs/concepts/run.md lists the codes).

    While no launcher handles signals, the signals that end a run raise :class:`exp.errors.SignalReceived`. Their
    default actions would end this process without a message, and after SIGUSR2 with an exit code that does not ask a
    scheduler to run it again. Signals that this process ignores from its start stay ignored, except the preemption
    signal. Only the first signal counts, since a later one would interrupt the clean-up; Ctrl-C may do that.
    """
    received: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        if not received or number == signal.SIGINT:
            received.append(number)
            raise SignalReceived(number)

    for number in ENDING_SIGNALS:
        if number == PREEMPT_SIGNAL or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        from exp.cli import main as run  # takes most of a second

        return run()
    except SignalReceived as ended:
        return ended.report()
    finally:
        received.append(0)  # the exit code is decided


if __name__ == "__main__":
    sys.exit(main())
