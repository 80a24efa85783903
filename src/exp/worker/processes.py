"""Starts processes, and kills those of one job only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Callable, Mapping

from exp.errors import EXIT_FAILED
from exp.runs.job import ENDING_SIGNALS, HEARTBEATS_FILE, SCRATCH_VARIABLE, block_signals
from exp.runs.lock import is_alive, proc_stat

__all__ = [
    "AGENT_VARIABLE", "JOB_VARIABLE", "PRELOAD_VARIABLE", "REQUEUES_VARIABLE", "SPEC", "START", "ForkedProcess",
    "die_with_parent", "exit_code_of", "fork", "kill_job", "name_process", "start_module", "start_resource_tracker",
    "watch_parent",
]  # fmt: skip

JOB_VARIABLE = "EXP_JOB"
"""Environment variable that marks all processes of one job that has no private folder; they inherit it."""

AGENT_VARIABLE = "EXP_AGENT_PID"
"""Environment variable with the process id that must be the workers' parent."""

PRELOAD_VARIABLE = "EXP_PRELOAD"
"""Environment variable with the modules of the run's model and data, for the fork server to import."""

REQUEUES_VARIABLE = "EXP_REQUEUES"
"""Environment variable with the number of times that the scheduler has restarted the job."""

SPEC = "launch.json"
"""File in the private folder of a job: what the agent has to start."""

START = (
    "import sys; sys.path[:1] = [each for each in sys.path[:1] if each]; del sys.argv[0]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""``python -c START <module> <arguments>`` is ``python -m``, but finds no module in the current folder, where a folder
``exp``, perhaps a stranger's, would take the place of this package."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def start_module(
    module: str, *arguments: str, environment: Mapping[str, str], stderr: IO[bytes], stdout: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a module (:data:`START`) in a session of its own, with an empty stdin.

    Args:
        module: dotted name.
        arguments: of the module.
        environment: all environment variables of the process.
        stderr: file for its stderr.
        stdout: file for its stdout; None: the stdout of this process.
    """
    return subprocess.Popen(
        [sys.executable, "-c", START, module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )


class ForkedProcess:
    """A forked child process, with the methods of :class:`subprocess.Popen` that a supervisor uses.

    Attributes:
        returncode: exit code; negative for a signal; None: the process has not ended, as far as is known.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Look whether the process has ended; return its exit code, or None."""
        if self.returncode is None:
            pid, wait_status = os.waitpid(self.pid, os.WNOHANG)
            if pid == self.pid:
                self.returncode = exit_code_of(wait_status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process.

        Raises:
            TimeoutExpired: it has not ended within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode


def exit_code_of(wait_status: int) -> int:
    """The exit code in a status of ``os.waitpid``; negative for a signal (``os.waitstatus_to_exitcode`` of 3.9)."""
    return -os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else os.WEXITSTATUS(wait_status)


def fork(main: Callable[[], int], stderr: IO[bytes]) -> ForkedProcess:
    """Fork a process that calls ``main`` and exits with what it returns; without the seconds of a new interpreter.

    Like :func:`start_module`, in a session of its own, with an empty stdin and without this process's signal handlers.
    This process must not have imported torch, whose threads do not survive a fork.

    Args:
        main: it inherits everything; nothing of this process's clean-up runs after it.
        stderr: file for its stderr.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with block_signals(ENDING_SIGNALS):  # a signal for this process must not run a handler in the child
        pid = os.fork()
        if pid:
            return ForkedProcess(pid)
        os.setsid()
        for number in ENDING_SIGNALS:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    code = EXIT_FAILED
    try:
        for descriptor, file in ((0, os.open(os.devnull, os.O_RDONLY)), (2, stderr.fileno())):
            os.dup2(file, descriptor)
            os.close(file)
        code = main()
    except BaseException:  # noqa: BLE001 - it must not reach the frames of the parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def watch_parent(parent: int, scratch: str) -> threading.Thread:
    """Start a thread that ends the whole job when the parent dies without having ended it, for example of SIGKILL.

    A thread, not a signal: the private folder of the job is to be removed, too.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_job(scratch, os.getsid(0))
        deadline = time.monotonic() + 2
        while os.path.exists(scratch) and time.monotonic() < deadline:  # noqa: PTH110
            shutil.rmtree(scratch, ignore_errors=True)  # the main thread may still write there
        os._exit(EXIT_FAILED)

    thread = threading.Thread(target=watch, name="watch-parent", daemon=True)
    thread.start()
    return thread


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
    """Set the name that ``ps -o comm`` and ``top`` show, at most 15 bytes; forked workers would all look the same."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker, and keep this process's blocked signals blocked.

    Python starts the tracker with the first named semaphore, and then unblocks SIGINT and SIGTERM even if they were
    blocked before, so the next signal would kill this process. If the tracker runs already, Python changes nothing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_job(job: str, session: int | None = None, patience_s: float = 3.0) -> list[int]:
    """Kill all remaining processes of the job except this one.

    They belong to ``session``, or have inherited ``job`` as the value of :data:`JOB_VARIABLE` or
    :data:`exp.runs.job.SCRATCH_VARIABLE`, or the mapped file of heartbeats (:func:`exp.runs.heartbeat.start`).
    Python's resource trackers get ``patience_s`` to end by themselves: a tracker ends when all its users have ended,
    and removes the semaphores that they left. A tracker that this process started is not touched.

    Returns:
        Ids of processes that are still there after ``patience_s`` seconds (stuck in the kernel).
    """
    deadline = time.monotonic() + patience_s
    while True:
        late, remaining = time.monotonic() > deadline, _processes_of(job, session)
        if not remaining:
            return []
        for pid, is_tracker in remaining.items():
            if late or not is_tracker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        if late:
            return list(_processes_of(job, session))


def _processes_of(job: str, session: int | None) -> dict[int, bool]:
    """Whether each running process of a job is a resource tracker, by process id."""
    marks, processes = {f"{name}={job}".encode() for name in (JOB_VARIABLE, SCRATCH_VARIABLE)}, {}
    mapped = os.fsencode(os.path.realpath(job) + f"/{HEARTBEATS_FILE}")
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            pid = int(entry.name)
            is_of_job = proc_stat(pid)[3:4] == [str(session)] or marks & {
                *(entry / "environ").read_bytes().split(b"\0")
            }
            if (is_of_job or mapped in (entry / "maps").read_bytes()) and pid != os.getpid() and is_alive(pid):
                is_tracker = b"multiprocessing.resource_tracker" in (entry / "cmdline").read_bytes()
                if not (is_tracker and proc_stat(pid)[1:2] == [str(os.getpid())]):
                    processes[pid] = is_tracker
    return processes
