"""What a launcher and its workers tell each other while a run lasts: how far it is, and that it has to end.

A worker that hangs reports nothing, and those that wait for it look the same from outside. So each writes how often it
has beaten, where it is and at which step, into a file that both have mapped: no system call, nothing that lasts. The
launcher looks from time to time (:mod:`exp.launcher.supervisor`), and can ask for the worker's stack by a signal.

The notice that a run has to save its state and end is a signal to the launcher, and a file for its workers. These never
see the signal: they, and everything under them, are started with it blocked, because Slurm sends it to every process of
a job step, and its default is to kill. They look for the file between two steps instead, which no start-up, collective
operation or loader process can miss.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple

from exp.runs.files import read_json, write_json

__all__ = [
    "ENDING_SIGNALS", "PREEMPT_SIGNAL", "STACK_SIGNAL", "Beat", "PreemptionFlag", "Stage", "beat", "begin",
    "handle_signals", "held_back", "make_file", "preempted_at", "read", "record_preempted", "signal_name", "stack_file",
]  # fmt: skip

STACK_SIGNAL = signal.SIGRTMIN + 7
"""On this a worker writes the stacks of its threads. A real-time signal: libraries leave these alone."""

_BEATS = "beats"
_FORMAT = struct.Struct("<6q")  # pid, rank, beats so far, stage, step, times in this stage


class Stage(enum.IntEnum):
    """Where a worker is; within one step, a larger number comes later."""

    FREE = 0
    """Where nothing tells how long a thing may take."""
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    HOOKS = 4
    VALIDATION = 5
    METRICS = 6
    AFTER_VALIDATION = 7
    CHECKPOINT = 8
    TEST = 9
    TEST_METRICS = 10
    DONE = 11


class Beat(NamedTuple):
    """What a worker said last; all 0 where it has not begun."""

    pid: int
    rank: int
    beats: int
    stage: int
    step: int
    times: int
    """How often it has entered this stage: the first time may compile, or fill caches."""


_map: mmap.mmap | None = None
_offset = _pid = _rank = _count = _step = 0
_times = [0] * len(Stage)


def make_file(scratch: str, nproc: int) -> None:
    """Make room for the beats of ``nproc`` workers in the job's private folder."""
    Path(scratch, _BEATS).write_bytes(bytes(_FORMAT.size * nproc))


def begin(scratch: str, local_rank: int, rank: int) -> None:
    """From here on this process tells where it is, and answers :data:`STACK_SIGNAL`; without a file, neither."""
    global _map, _offset, _pid, _rank
    path = Path(scratch, _BEATS)
    if not path.is_file():
        return
    # Held open for ever: the handler writes to its descriptor.
    faulthandler.register(STACK_SIGNAL, stack_file(scratch, local_rank).open("wb", buffering=0), all_threads=True)
    with path.open("r+b") as file:
        _map = mmap.mmap(file.fileno(), 0)
    _offset, _pid, _rank = _FORMAT.size * local_rank, os.getpid(), rank
    beat(Stage.FREE, 0)


def beat(stage: int, step: int | None = None) -> None:
    """Say that this worker has come to ``stage`` of ``step`` (None: the same step as before)."""
    global _count, _step
    if _map is None:
        return
    _count += 1
    _times[stage] += 1
    if step is not None:
        _step = step
    _FORMAT.pack_into(_map, _offset, _pid, _rank, _count, stage, _step, _times[stage])


def read(scratch: str) -> list[Beat]:
    """The last beat of each worker, by local rank; empty where there is no file."""
    try:
        content = Path(scratch, _BEATS).read_bytes()
    except OSError:
        return []
    return [Beat(*numbers) for numbers in _FORMAT.iter_unpack(content)]


def stack_file(scratch: str, local_rank: int) -> Path:
    """Where a worker writes its stacks."""
    return Path(scratch, f"stack-{local_rank}")


PREEMPT_SIGNAL = signal.SIGUSR2
"""Vendors' collectives use SIGUSR1."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, PREEMPT_SIGNAL)
"""What ends a run, after one line."""


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Give the signals that end a run to ``handler`` for a while.

    Signals that this process was started to ignore stay ignored: ``nohup`` ignores SIGHUP, and a shell's ``&`` SIGINT.
    Afterwards the preemption signal is ignored: only the end is left to report, and its default is to kill.
    """
    before = {}
    for number in ENDING_SIGNALS:
        if number == PREEMPT_SIGNAL or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_IGN if number == PREEMPT_SIGNAL else previous)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
