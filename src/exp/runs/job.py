"""What the processes of one job on a node share: a private folder ("scratch"), and signals.

The launcher makes the folder, names it in :data:`SCRATCH_VARIABLE`, and removes it with the job.

Preemption (the run has to save its state and end) is a signal to the launcher, and a file for its workers
(:data:`PREEMPT_FLAG`). Workers and their child processes start with the signal blocked, because Slurm sends it to every
process of a job step, and its default action is to kill. They look for the file between two steps, so that start-up,
collective operations and loader processes are never interrupted.

A loader process sends a tensor as an open file over a Unix socket. The path of a socket may have at most 107 bytes on
Linux (unix(7)). If the temporary folder has a longer path, no socket can be made: the thread of the loader process that
sends the first batch dies, and the training waits for the batch forever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
from multiprocessing import util
from typing import Callable, Iterable, Iterator

from exp.errors import ConfigError, RunError

SCRATCH_VARIABLE = "EXP_SCRATCH"
"""Environment variable with the path of the job's private folder on this node."""

NOTE_VARIABLE = "EXP_NOTE"
"""Environment variable with the path of a JSON file, to which a command writes how it ended, for the process that has
started it: ``runs``, its run folders, and ``error``, the first line of the last error that it has printed, or null."""

HEARTBEATS_FILE = "beats"
"""File in the job's private folder with the heartbeats of its workers."""

PREEMPT_FLAG = "preempt"
"""File in the job's private folder; once it exists, the run has to save its state and end."""

NODES_FILE = "nodes"
"""File in the private folder of a job whose nodes come and go: how many nodes it has now; 0: it waits for nodes."""

REFORM_FLAG = "reform"
"""File in that folder; once it exists, the ranks have to save their state and end, so that another node can join. The
guard of a worker that has ended so, or because it has lost another one, adds a file with this name, ``-`` and its local
rank."""

LEAVING_FLAG = "leaving"
"""File in that folder with this name, ``-`` and the process id of a worker that ends so: its exit code says nothing."""

ENDING_FLAG = "ending"
"""File in the job's private folder; once it exists, the launcher ends the workers, so their ends say nothing."""

PREEMPTED_FILE = "preempted.json"
"""File in the job's private folder, written by a worker that was preempted: ``step``, its number of optimizer steps."""

RUN_FOLDER_FILE = "joined.json"
"""File in the job's private folder, written by a worker of ``launcher=external``: its run folder, or why it was
refused."""

NODE_CONFIG = "config.yaml"
"""File in the job's private folder with the configuration of this node, if each of several nodes has its own."""

_LONGEST = 107
_SOCKET = "/listener-12345678"
_PRIVATE = "/pymp-12345678"  # multiprocessing's own folder; that of exp has a shorter name


def set_socket_folder(scratch: str) -> bool:
    """Make multiprocessing put its sockets into the private folder of the job, which is removed with the job.

    Otherwise every process that is killed, or ends without clean-up, leaves a folder in the temporary folder.

    Returns:
        Whether the path of the folder is short enough for sockets.
    """
    multiprocessing.current_process()._config["tempdir"] = scratch  # type: ignore[attr-defined]
    return _fits(scratch)


def ensure_socket_folder() -> None:
    """Provide a folder for the sockets of loader processes; call it before they start.

    Raises:
        ConfigError: the path of the temporary folder is too long.
        RunError: the machine provides no semaphores.
    """
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise RunError(
            f"loader processes need semaphores in /dev/shm: {error.strerror}; mount it writable, or set "
            "data.num_workers=0"
        ) from error
    chosen = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if chosen is None:  # launcher.in_process=true: there is no private folder
        chosen = tempfile.mkdtemp(prefix="exp-")
        set_socket_folder(chosen)
        util.Finalize(None, shutil.rmtree, (chosen, True), exitpriority=-100)  # after the sockets in it were closed
    if not _fits(chosen):
        raise ConfigError(
            f"TMPDIR={tempfile.gettempdir()} is too long for the sockets of loader processes; set it to a folder of "
            f"at most {_LONGEST - len(_PRIVATE + _SOCKET)} bytes, or data.num_workers=0"
        )


def _fits(private: str) -> bool:
    return len(os.fsencode(private + _SOCKET)) <= _LONGEST


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
