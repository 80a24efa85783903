"""How far a worker has come, told to its launcher at no cost: a few numbers in a file that both have mapped.

A worker that hangs says nothing, and those that wait for it look the same from outside. Each beat writes how often it
has beaten, where it is and at which step: no system call, nothing that lasts. The launcher looks from time to time
(:mod:`exp.launcher.supervisor`), and can ask for the worker's stack by a signal.
"""

from __future__ import annotations

import enum
import faulthandler
import mmap
import os
import signal
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = ["STACK_SIGNAL", "Beat", "Stage", "beat", "begin", "make_file", "read", "stack_file"]

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
