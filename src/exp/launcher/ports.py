"""The meeting point of several nodes: readable complaints instead of a time-out."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from exp.errors import ConfigError

__all__ = ["check_endpoint", "holder_of", "is_here"]

_LISTEN = "0A"  # the kernel's code in /proc/net/tcp


def check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint that is malformed, whose host is not known, or whose port is taken by another program.

    Args:
        endpoint: ``host:port``.

    Raises:
        ConfigError: it cannot be used.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"launcher.rdzv_endpoint={endpoint} is not <host>:<port>, such as node0:29500")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"launcher.rdzv_endpoint={endpoint}: the host {host} is not known here ({error}); correct it"
        ) from error
    if not any(is_here(family, str(address[0])) for family, _, _, _, address in addresses):
        return
    holder = holder_of(int(port))
    # The agent of another node may run on this machine, and have come first.
    if holder is not None and "exp.launcher.agent" not in _command(holder):
        raise ConfigError(
            f"launcher.rdzv_endpoint={endpoint}: port {port} is taken by {_name(holder)} (pid {holder}); "
            "choose another port, the same on every node"
        )


def is_here(family: int, address: str) -> bool:
    """Whether an address is this machine's: only such a one can be bound."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def holder_of(port: int) -> int | None:
    """Process id of the program that listens on ``port``, as far as ``/proc`` lets this user see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).is_file():
            continue
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            cells = line.split()
            if cells[3] == _LISTEN and int(cells[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{cells[9]}]")
    if not inodes:
        return None
    for entry in Path("/proc").glob("[0-9]*"):
        if any(link in inodes for link in _open_files(entry)):
            return int(entry.name)
    return None


def _open_files(process: Path) -> list[str]:
    """What the descriptors of a process lead to; those closed meanwhile, or another user's, are left out."""
    found = []
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(str(link)))  # Path.readlink needs Python 3.9
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _name(pid: int) -> str:
    return Path(_command(pid).split("\0")[0]).name or "a program"
