"""Ending processes, and only those of one job."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

__all__ = ["JOB_VARIABLE", "die_with_parent", "job_processes", "kill_job", "signal_name"]

JOB_VARIABLE = "EXP_JOB"
"""Environment variable that all processes of one job inherit: it tells them from everyone else's."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(death_signal: int, parent: int) -> None:
    """Have the kernel send ``death_signal`` to this process when its parent dies, even of SIGKILL.

    Args:
        death_signal: the signal.
        parent: process id of the parent; if it is gone already, this process ends at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def job_processes(job: str) -> list[int]:
    """Process ids of the job's processes that are alive, this one left out."""
    mark = f"{JOB_VARIABLE}={job}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
        except OSError:
            continue  # it has ended, or is somebody else's
        if int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def kill_job(job: str, patience_s: float = 3.0) -> list[int]:
    """Kill all processes of the job that are left.

    Returns:
        Those that are still there after ``patience_s`` (stuck in the kernel); they are reported, not waited for.
    """
    deadline = time.monotonic() + patience_s
    left = job_processes(job)
    while left and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
        left = job_processes(job)
    return left


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
