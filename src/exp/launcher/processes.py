"""Starting processes, and ending those of one job only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Mapping

from exp.runs.lock import stat_of

__all__ = [
    "AGENT_VARIABLE",
    "JOB_VARIABLE",
    "PRELOAD_VARIABLE",
    "die_with_parent",
    "is_alive",
    "kill_job",
    "name_process",
    "start_module",
    "start_resource_tracker",
]

JOB_VARIABLE = "EXP_JOB"
"""Environment variable that all processes of one job inherit: it tells them from everyone else's."""

AGENT_VARIABLE = "EXP_AGENT_PID"
"""Environment variable that tells workers which process must be their parent."""

PRELOAD_VARIABLE = "EXP_PRELOAD"
"""Environment variable that tells the fork server which modules the run's model and data need."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def start_module(
    module: str, *arguments: str, environment: Mapping[str, str], stderr: IO[bytes], stdout: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """``python -m module arguments...`` in a session of its own, with nothing to read.

    Args:
        module: its dotted name.
        arguments: its own.
        environment: all of the process's.
        stderr: where that goes.
        stdout: where that goes; None: where this process's does.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )


def die_with_parent(death_signal: int, parent: int) -> None:
    """Have the kernel send ``death_signal`` to this process when its parent dies, even of SIGKILL.

    Args:
        death_signal: the signal.
        parent: process id of the parent; if it is gone already, this process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """What ``ps -o comm`` and ``top`` call this process: at most 15 bytes; forked workers would all look the same."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def start_resource_tracker() -> None:
    """Start the process that cleans up after multiprocessing, and leave this process's blocked signals as they are.

    Python starts it with the first semaphore that has a name, and unblocks SIGINT and SIGTERM then, whether they were
    blocked before or not: the next one would kill this process. Where it runs already, Python touches nothing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and waits for its parent to notice, does not."""
    return stat_of(pid)[:1] not in ([], ["Z"])


def kill_job(job: str, patience_s: float = 3.0) -> list[int]:
    """Kill all processes of the job that are left, but for this one.

    Python's resource trackers may end by themselves: each does when all that used it have ended, and removes the
    semaphores that those could not remove. A tracker that this process has started outlives it.

    Returns:
        Processes that are still there after ``patience_s`` (stuck in the kernel).
    """
    deadline = time.monotonic() + patience_s
    while True:
        late, left = time.monotonic() > deadline, _processes_of(job)
        if not left:
            return []
        for pid, is_tracker in left.items():
            if late or not is_tracker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        if late:
            return list(_processes_of(job))


def _processes_of(job: str) -> dict[int, bool]:
    """The living processes of a job; whether each is a resource tracker."""
    mark, found = f"{JOB_VARIABLE}={job}".encode(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            pid = int(entry.name)
            if mark in (entry / "environ").read_bytes().split(b"\0") and pid != os.getpid() and is_alive(pid):
                is_tracker = b"multiprocessing.resource_tracker" in (entry / "cmdline").read_bytes()
                if not (is_tracker and stat_of(pid)[1:2] == [str(os.getpid())]):
                    found[pid] = is_tracker
    return found
