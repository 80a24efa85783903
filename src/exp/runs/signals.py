"""Signals that end a run, and the one that announces preemption.

Preemption (the run has to save its state and end) is a signal to the launcher, and a file for its workers
(:data:`exp.runs.scratch.PREEMPT_FLAG`). Workers and their child processes start with the signal blocked, because Slurm
sends it to every process of a job step, and its default action is to kill. They look for the file between two steps, so
that start-up, collective operations and loader processes are never interrupted.
"""

from __future__ import annotations

import contextlib
import signal
from typing import Callable, Iterable, Iterator

__all__ = ["ENDING_SIGNALS", "PREEMPT_SIGNAL", "block_signals", "handle_signals", "signal_name"]

PREEMPT_SIGNAL = signal.SIGUSR2
"""Signal that announces preemption. Not SIGUSR1, which vendors' collectives use."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, PREEMPT_SIGNAL)
"""Signals that end a run; it reports them in one line."""


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, object], None], more_follows: bool = False) -> Iterator[None]:
    """Context in which ``handler`` receives :data:`ENDING_SIGNALS`.

    Signals that this process ignores from its start stay ignored (``nohup`` ignores SIGHUP, a shell's ``&`` SIGINT),
    except the preemption signal.

    Args:
        handler: takes the number of the signal, and the frame.
        more_follows: whether this process has more to do after the block, such as the next batch of a sweep. Otherwise
            the preemption signal is ignored from then on: only the report of the end is left to do, and the default
            action of the signal would kill the process.
    """
    before = {}
    for number in ENDING_SIGNALS:
        if number == PREEMPT_SIGNAL or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_IGN if number == PREEMPT_SIGNAL and not more_follows else previous)


def signal_name(number: int) -> str:
    """Name of a signal, such as ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def block_signals(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals, so that processes started in this context inherit them blocked.

    A signal that arrives meanwhile is delivered to this process afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
