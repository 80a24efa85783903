"""A private folder with a short name for the sockets of loader processes and of the fork server.

A tensor comes from a loader process as an open file, handed over by a socket; so is a fork server reached. Linux takes
107 bytes for a socket's whole path (unix(7)). Below a longer temporary folder none can be made: the thread of the
loader process that would hand over the first batch dies of that, and the training waits for it for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from multiprocessing import util
from pathlib import Path

from exp.errors import ConfigError, RunError
from exp.runs.lock import stat_of

__all__ = ["keep_sockets_in", "make_sockets_possible"]

_LONGEST = 107
_PF_EXITING = 4  # of the flags in proc(5)
_SOCKET = "/listener-12345678"
_PRIVATE = "/pymp-12345678"  # multiprocessing's own folder; ours has a shorter name


def keep_sockets_in(scratch: str) -> bool:
    """Have multiprocessing put its sockets into the private folder of the job, which is removed with the job.

    Its own folder below the temporary one is left behind by every process that is killed, or ends without clean-up.

    Returns:
        Whether the folder's name is short enough for sockets.
    """
    multiprocessing.current_process()._config["tempdir"] = scratch  # type: ignore[attr-defined]
    return _fits(scratch)


def make_sockets_possible() -> None:
    """Before loader processes start: have a folder for their sockets, until this process ends, however it does.

    Raises:
        ConfigError: the temporary folder has too long a name.
        RunError: the machine gives no semaphores.
    """
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise RunError(
            f"loader processes need semaphores in /dev/shm: {error.strerror}; mount it writable, or set "
            "data.num_workers=0"
        ) from error
    chosen = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if chosen is not None and _fits(chosen):
        return
    folder = tempfile.mkdtemp(prefix="exp-")
    if not keep_sockets_in(folder):
        Path(folder).rmdir()
        raise ConfigError(
            f"TMPDIR={tempfile.gettempdir()} is too long for the sockets of loader processes; set it to a folder of "
            f"at most {_LONGEST - len(_PRIVATE + _SOCKET)} bytes, or data.num_workers=0"
        )
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)  # after what the sockets in it need to end
    # multiprocessing keeps a weak reference to what it hands on: a function of this module lives as long as it.
    util.register_after_fork(_remove_if_left, lambda remove_if_left: remove_if_left(folder))


def _remove_if_left(folder: str) -> None:
    """In a loader process: where its parent is killed, it outlives that by some seconds, and removes the folder."""
    parent = os.getppid()

    def end() -> None:
        if os.getppid() != parent or _is_ending(parent):
            shutil.rmtree(folder, ignore_errors=True)

    util.Finalize(None, end, exitpriority=0)


def _is_ending(pid: int) -> bool:
    """Whether a process has begun to end: its sockets are closed, which ends its loaders, and it is still a parent."""
    fields = stat_of(pid)
    return bool(fields and int(fields[6]) & _PF_EXITING)


def _fits(private: str) -> bool:
    return len(os.fsencode(private + _SOCKET)) <= _LONGEST
