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
from typing import IO, Callable, Iterator, Mapping

from exp.preemption import ENDING_SIGNALS, PREEMPT_SIGNAL

__all__ = [
    "AGENT_VARIABLE",
    "JOB_VARIABLE",
    "die_with_parent",
    "handle_signals",
    "is_alive",
    "job_processes",
    "kill_job",
    "name_process",
    "signal_name",
    "start_module",
    "start_resource_tracker",
    "stat_of",
]

JOB_VARIABLE = "EXP_JOB"
"""Environment variable that all processes of one job inherit: it tells them from everyone else's."""

AGENT_VARIABLE = "EXP_AGENT_PID"
"""Environment variable that tells workers which process must be their parent."""

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
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """What ``ps -o comm`` and ``top`` call this process: at most 15 bytes; forked workers would all look the same."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Give the signals that end a run to ``handler`` for a while.

    Those that this process was started to ignore stay ignored: ``nohup`` ignores SIGHUP, and a shell's ``&`` SIGINT.
    One that asks to save and comes after it, when only the end is left to be told, is ignored: its default is to kill.
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


def stat_of(pid: int) -> list[str]:
    """Fields of proc_pid_stat(5) from the third on: the state (``R``, ``S``, ``D``, ``T``, ``Z``), the parent, ...

    Returns:
        Empty if there is no such process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and waits for its parent to notice, does not."""
    return stat_of(pid)[:1] not in ([], ["Z"])


def job_processes(job: str) -> list[int]:
    """Process ids of the job's processes that are alive, this one left out."""
    mark = f"{JOB_VARIABLE}={job}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
        except OSError:
            continue  # it has ended, or is somebody else's
        pid = int(entry.name)
        if pid != os.getpid() and is_alive(pid):
            found.append(pid)
    return found


def kill_job(job: str, patience_s: float = 3.0) -> list[int]:
    """Kill all processes of the job that are left.

    Python's resource tracker is left to end by itself: it does when all that used it have, and removes the semaphores
    that they could not remove any more. One that this process has started ends after this process.

    Returns:
        Those that are still there after ``patience_s`` (stuck in the kernel); they are reported, not waited for.
    """
    deadline = time.monotonic() + patience_s
    left = job_processes(job)
    while left:
        late = time.monotonic() > deadline
        trackers = [] if late else [pid for pid in left if _is_tracker(pid)]
        if len(trackers) == len(left) and all(stat_of(pid)[1:2] == [str(os.getpid())] for pid in trackers):
            return []
        for pid in left:
            if pid not in trackers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = job_processes(job)
        if late:
            break
    return left


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
