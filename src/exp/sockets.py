"""Sockets: those of loader processes, which need a folder with a short path, and those that listen on one address.

A loader process sends a tensor as an open file over a Unix socket. The path of a socket may have at most 107 bytes on
Linux (unix(7)). If the temporary folder has a longer path, no socket can be made: the thread of the loader process that
sends the first batch dies, and the training waits for the batch forever.
"""

from __future__ import annotations

import contextlib
import ipaddress
import multiprocessing
import os
import shutil
import socket
import tempfile
from multiprocessing import util
from pathlib import Path

from exp.errors import ConfigError, RunError
from exp.runs.lock import stat_of

__all__ = ["SCRATCH_VARIABLE", "is_usable", "keep_sockets_in", "listen_at", "make_sockets_possible"]

SCRATCH_VARIABLE = "EXP_SCRATCH"
"""Environment variable with the path of the job's private folder on this node."""

_LONGEST = 107
_PF_EXITING = 4  # of the process flags in proc(5)
_SOCKET = "/listener-12345678"
_PRIVATE = "/pymp-12345678"  # multiprocessing's own folder; that of exp has a shorter name


def listen_at(host: str, port: int) -> socket.socket | None:
    """A socket that listens on the address of ``host`` alone, not on all interfaces.

    Returns:
        None if the address belongs to another machine, if the port is taken, or if ``host`` is a name that only this
        machine resolves to the loopback interface, as machines often do with their own name.
    """
    host = host.strip("[]")
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_usable(host, str(address[0])):
            with contextlib.suppress(OSError):
                listener.bind(address)
                listener.listen()
                return listener
        listener.close()
    return None


def is_usable(host: str, address: str) -> bool:
    """False for a loopback address, unless ``host`` is ``localhost`` or that address: other machines need another."""
    return not ipaddress.ip_address(address).is_loopback or host in ("localhost", address)


def keep_sockets_in(scratch: str) -> bool:
    """Make multiprocessing put its sockets into the private folder of the job, which is removed with the job.

    Otherwise every process that is killed, or ends without clean-up, leaves a folder in the temporary folder.

    Returns:
        Whether the path of the folder is short enough for sockets.
    """
    multiprocessing.current_process()._config["tempdir"] = scratch  # type: ignore[attr-defined]
    return _fits(scratch)


def make_sockets_possible() -> None:
    """Provide a folder for the sockets of loader processes; call it before they start.

    The folder is removed when this process ends, also if it is killed.

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
    if chosen is not None and _fits(chosen):
        return
    folder = tempfile.mkdtemp(prefix="exp-")
    if not keep_sockets_in(folder):
        Path(folder).rmdir()
        raise ConfigError(
            f"TMPDIR={tempfile.gettempdir()} is too long for the sockets of loader processes; set it to a folder of "
            f"at most {_LONGEST - len(_PRIVATE + _SOCKET)} bytes, or data.num_workers=0"
        )
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)  # after the sockets in it were closed
    # multiprocessing keeps only a weak reference to the first argument, so it must be a function of this module.
    util.register_after_fork(_remove_if_left, lambda remove_if_left: remove_if_left(folder))


def _remove_if_left(folder: str) -> None:
    """In a loader process: remove the folder if the parent was killed; the loader process outlives it by seconds."""
    parent = os.getppid()

    def end() -> None:
        if os.getppid() != parent or _is_ending(parent):
            shutil.rmtree(folder, ignore_errors=True)

    util.Finalize(None, end, exitpriority=0)


def _is_ending(pid: int) -> bool:
    """Whether a process is exiting: its sockets are closed already, which ends its loader processes."""
    fields = stat_of(pid)
    return bool(fields and int(fields[6]) & _PF_EXITING)


def _fits(private: str) -> bool:
    return len(os.fsencode(private + _SOCKET)) <= _LONGEST
