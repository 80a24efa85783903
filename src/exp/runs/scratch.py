"""The private folder of a job on one node ("scratch"): what launcher and workers exchange.

The launcher makes the folder, names it in :data:`SCRATCH_VARIABLE`, and removes it with the job.

A loader process sends a tensor as an open file over a Unix socket. The path of a socket may have at most 107 bytes on
Linux (unix(7)). If the temporary folder has a longer path, no socket can be made: the thread of the loader process that
sends the first batch dies, and the training waits for the batch forever.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from multiprocessing import util

from exp.errors import ConfigError, RunError

__all__ = [
    "ENDING_FLAG", "HEARTBEATS_FILE", "PREEMPTED_FILE", "PREEMPT_FLAG", "RUN_FOLDER_FILE", "SCRATCH_VARIABLE",
    "ensure_socket_folder", "set_socket_folder",
]  # fmt: skip

SCRATCH_VARIABLE = "EXP_SCRATCH"
"""Environment variable with the path of the job's private folder on this node."""

HEARTBEATS_FILE = "beats"
"""File in the job's private folder with the heartbeats of its workers."""

PREEMPT_FLAG = "preempt"
"""File in the job's private folder; once it exists, the run has to save its state and end."""

ENDING_FLAG = "ending"
"""File in the job's private folder; once it exists, the launcher ends the workers, so their ends say nothing."""

PREEMPTED_FILE = "preempted.json"
"""File in the job's private folder, written by a worker that was preempted: ``step``, its number of optimizer steps."""

RUN_FOLDER_FILE = "joined.json"
"""File in the job's private folder, written by a worker of ``launcher=external``: its run folder, or why it was
refused."""

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
