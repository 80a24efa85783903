"""The notice that a run has to save its state and end: a signal to its parent, a file to its workers.

The signal reaches one process of a node, the launcher's. Workers never see it: they, and everything under them, are
started with it blocked, because Slurm sends it to every process of a job step, and its default is to kill. They look
for the file between two steps instead, which no start-up, collective operation or loader process can miss.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any, Iterable, Iterator

from exp.runs.files import read_json, write_json

__all__ = ["ENDING_SIGNALS", "PREEMPT_SIGNAL", "PreemptionFlag", "held_back", "preempted_at", "record_preempted"]

PREEMPT_SIGNAL = signal.SIGUSR2
"""Vendors' collectives use SIGUSR1."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, PREEMPT_SIGNAL)
"""What ends a run, after one line."""

_LOOK_EVERY_S = 0.05
_FILE = "preempt"
_RECORD = "preempted.json"


class PreemptionFlag:
    """Whether this node has been told to end.

    Args:
        scratch: the private folder of the job on this node, where the launcher is another process than the workers;
            None: they are one.
    """

    def __init__(self, scratch: str | None = None) -> None:
        self._file = None if scratch is None else os.path.join(scratch, _FILE)  # noqa: PTH118
        self._set = False
        self._looked = 0.0

    def set(self) -> None:
        """Tell this node's workers. Safe in a signal handler."""
        if self._file is None:
            self._set = True
        else:
            Path(self._file).touch()

    def is_set(self) -> bool:
        """Whether :meth:`set` has been called; looks at the file twenty times a second at most."""
        if self._set or self._file is None:
            return self._set
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            self._set = os.path.exists(self._file)  # noqa: PTH110 - a fifth of Path's time, at every step
        return self._set


@contextlib.contextmanager
def held_back(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Processes started within inherit these blocked; one that comes meanwhile is delivered here afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def record_preempted(scratch: str, step: int | None) -> None:
    """A worker tells its launcher that it ended because of the notice, after ``step`` optimizer steps."""
    write_json(Path(scratch, _RECORD), {"step": step})


def preempted_at(scratch: str) -> Any:
    """What :func:`record_preempted` wrote, or None."""
    return read_json(Path(scratch, _RECORD))
