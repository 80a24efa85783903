"""What launcher and workers exchange during a run: heartbeats, and the preemption flag.

From outside, a worker that hangs looks like the workers that wait for it. So each worker writes heartbeats (a counter,
stage and step) into a memory-mapped file, without any system call. The launcher reads the file from time to time
(:mod:`exp.launcher.supervisor`), and can ask for a worker's stack by a signal.

Preemption (the run has to save its state and end) is a signal to the launcher, and a file for its workers. Workers and
their child processes start with the signal blocked, because Slurm sends it to every process of a job step, and its
default action is to kill. They look for the file between two steps, so that start-up, collective operations and loader
processes are never interrupted.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import mmap
import os
import signal
import struct
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

from exp.runs.lock import is_alive

__all__ = [
    "BEATS", "ENDING", "ENDING_SIGNALS", "JOINED", "NOTICE", "PREEMPTED", "PREEMPT_SIGNAL", "STACK_SIGNAL", "Beat",
    "Stage", "beat", "begin", "handle_signals", "held_back", "make_file", "read", "signal_name",
    "stack_file", "unfinished",
]  # fmt: skip

STACK_SIGNAL = signal.SIGRTMIN + 7
"""On this signal a worker writes the stacks of its threads. A real-time signal, because libraries do not use these."""

BEATS = "beats"
"""File in the job's private folder with the heartbeats of its workers."""

_FORMAT = struct.Struct("<7q")  # the fields of Beat


class Stage(enum.IntEnum):
    """What a worker is doing; within one step, a larger number comes later."""

    FREE = 0
    """Work without a time limit, such as set-up."""
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
    """The last heartbeat of a worker; all fields are 0 before the first.

    Attributes:
        times: how often the worker has entered this stage. The first time is slower: it may compile, or fill caches.
    """

    pid: int
    rank: int
    local_rank: int
    beats: int
    stage: int
    step: int
    times: int


_map: mmap.mmap | None = None
_offset = _count = _step = 0
_who = 0, 0, 0
_times = [0] * len(Stage)


def make_file(scratch: str, nproc: int) -> None:
    """Create the file for the heartbeats of the ``nproc`` workers that share this private folder."""
    Path(scratch, BEATS).write_bytes(bytes(_FORMAT.size * nproc))


def begin(scratch: str, local_rank: int, rank: int) -> None:
    """Start heartbeats of this process, and answer :data:`STACK_SIGNAL`; does nothing without a heartbeat file.

    What this process forks keeps the file mapped; :func:`exp.launcher.processes.kill_job` finds it by that.
    """
    global _map, _offset, _who
    path = Path(scratch, BEATS)
    if not path.is_file():
        return
    # The stack file stays open: the handler writes to its descriptor.
    faulthandler.register(STACK_SIGNAL, stack_file(scratch, local_rank).open("wb", buffering=0), all_threads=True)
    with path.open("r+b") as file:
        _map = mmap.mmap(file.fileno(), 0)
    _offset, _who = _FORMAT.size * local_rank % len(_map), (os.getpid(), rank, local_rank)
    beat(Stage.FREE, 0)


def beat(stage: int, step: int | None = None) -> None:
    """Write a heartbeat: this worker has come to ``stage`` of ``step`` (None: the same step as before)."""
    global _count, _step
    if _map is None:
        return
    _count += 1
    _times[stage] += 1
    if step is not None:
        _step = step
    _FORMAT.pack_into(_map, _offset, *_who, _count, stage, _step, _times[stage])


def read(scratch: str) -> list[Beat]:
    """The last heartbeat of each worker; empty if there is no file."""
    try:
        content = Path(scratch, BEATS).read_bytes()
    except OSError:
        return []
    return [Beat(*numbers) for numbers in _FORMAT.iter_unpack(content)]


def stack_file(scratch: str, local_rank: int) -> Path:
    """The file to which a worker writes its stacks."""
    return Path(scratch, f"stack-{local_rank}")


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


NOTICE = "preempt"
"""File in the job's private folder; once it exists, the run has to save its state and end."""


@contextlib.contextmanager
def held_back(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals, so that processes started in this context inherit them blocked.

    A signal that arrives meanwhile is delivered to this process afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


ENDING = "ending"
"""File in the job's private folder; once it exists, the launcher ends the workers, so their ends say nothing."""

PREEMPTED = "preempted.json"
"""File in the job's private folder, written by a worker that was preempted: ``step``, its number of optimizer steps."""

JOINED = "joined.json"
"""File in the job's private folder, written by a worker of ``launcher=external``: its run folder, or why it was
refused."""


def unfinished(scratch: str, alive: bool = True) -> list[Beat]:
    """The last heartbeats of workers that have begun and have not reported stage ``DONE``.

    Args:
        scratch: the private folder of the job on this node.
        alive: True for workers whose process runs, False for workers whose process is gone.
    """
    return [b for b in read(scratch) if b.pid and b.stage != Stage.DONE and is_alive(b.pid) is alive]
