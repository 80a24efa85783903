"""Heartbeats of workers: how far each has come, for the launcher.

From outside, a worker that hangs looks like the workers that wait for it. So each worker writes heartbeats (a counter,
stage and step) into a memory-mapped file, without any system call. The launcher reads the file from time to time
(:mod:`exp.launcher.supervisor`), and can ask for a worker's stack by a signal.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import mmap
import os
import re
import signal
import struct
from pathlib import Path
from typing import NamedTuple

from exp.runs.job import HEARTBEATS_FILE
from exp.runs.lock import is_alive

STACK_SIGNAL = signal.SIGRTMIN + 7
"""On this signal a worker writes the stacks of its threads. A real-time signal, because libraries do not use these."""

_FORMAT = struct.Struct("<7q")  # the fields of Heartbeat


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


class Heartbeat(NamedTuple):
    """The last heartbeat of a worker; all fields are 0 before the first.

    Attributes:
        times: how often the worker has entered this stage. The first time is slower: it may compile, or fill caches.
    """

    pid: int
    rank: int
    local_rank: int
    counter: int
    stage: int
    step: int
    times: int


class _Writer:
    """Writes the heartbeats of this process to its place in the mapped file."""

    def __init__(self, path: Path, local_rank: int, rank: int) -> None:
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        self.offset = _FORMAT.size * local_rank % len(self.map)
        self.identity = os.getpid(), rank, local_rank
        self.counter = self.step = 0
        self.times = [0] * len(Stage)

    def write(self, stage: int, step: int | None) -> None:
        self.counter += 1
        self.times[stage] += 1
        if step is not None:
            self.step = step
        numbers = (*self.identity, self.counter, stage, self.step, self.times[stage])
        _FORMAT.pack_into(self.map, self.offset, *numbers)


_writer: _Writer | None = None
"""Of this process: the training loop, the data and the metrics all report their stages."""


def make_file(scratch: str, nproc: int) -> None:
    """Create the file for the heartbeats of the ``nproc`` workers that share this private folder."""
    Path(scratch, HEARTBEATS_FILE).write_bytes(bytes(_FORMAT.size * nproc))


def start(scratch: str, local_rank: int, rank: int) -> None:
    """Start heartbeats of this process, and answer :data:`STACK_SIGNAL`; does nothing without a heartbeat file.

    What this process forks keeps the file mapped; :func:`exp.worker.processes.kill_job` finds it by that.
    """
    global _writer
    path = Path(scratch, HEARTBEATS_FILE)
    if not path.is_file():
        return
    # The stack file stays open: the handler writes to its descriptor.
    faulthandler.register(STACK_SIGNAL, stack_file(scratch, local_rank).open("wb", buffering=0), all_threads=True)
    _writer = _Writer(path, local_rank, rank)
    report_stage(Stage.FREE, 0)


def report_stage(stage: int, step: int | None = None) -> None:
    """Write a heartbeat: this worker has come to ``stage`` of ``step`` (None: the same step as before)."""
    if _writer is not None:
        _writer.write(stage, step)


def read(scratch: str) -> list[Heartbeat]:
    """The last heartbeat of each worker; empty if there is no file."""
    try:
        content = Path(scratch, HEARTBEATS_FILE).read_bytes()
    except OSError:
        return []
    return [Heartbeat(*numbers) for numbers in _FORMAT.iter_unpack(content)]


def stack_file(scratch: str, local_rank: int) -> Path:
    """The file to which a worker writes its stacks."""
    return Path(scratch, f"stack-{local_rank}")


def running_ranks(scratch: str, alive: bool = True) -> list[Heartbeat]:
    """The last heartbeats of workers that have begun and have not reported stage ``DONE``.

    Args:
        scratch: the private folder of the job on this node.
        alive: True for workers whose process runs, False for workers whose process is gone.
    """
    return [b for b in read(scratch) if b.pid and b.stage != Stage.DONE and is_alive(b.pid) is alive]


def jobs_on_host() -> dict[Path, set[str]]:
    """The private folders of jobs whose ranks run on this host, by run folder.

    The ranks are found by their processes: stderr is the rank's log, and the file of heartbeats is mapped. Only root
    can look into the processes of other users.
    """
    jobs: dict[Path, set[str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            log = Path(os.readlink(str(entry / "fd" / "2")))
            if log.parent.name == "logs" and log.name.startswith("rank"):
                maps = (entry / "maps").read_text(errors="replace")
                folders = re.findall(rf"(/\S.*)/{HEARTBEATS_FILE}$", maps, re.MULTILINE)
                jobs.setdefault(log.parent.parent, set()).update(folders)
    return {folder: folders for folder, folders in jobs.items() if folders}
