"""The meeting point of several nodes: readable complaints instead of a time-out."""

from __future__ import annotations

import socket
from pathlib import Path

from exp.errors import ConfigError

__all__ = ["check_endpoint", "holder_of"]


def check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint that is malformed or whose host is not known.

    Raises:
        ConfigError: it is no ``host:port``, or its host is unknown.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"launcher.rdzv_endpoint={endpoint} is not <host>:<port>")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        raise ConfigError(f"launcher.rdzv_endpoint={endpoint}: the host {host} is not known here: {error}") from error


def holder_of(port: int) -> str | None:
    """``<command> (pid n)`` of the process of ours that listens on ``port``, where ``/proc`` tells."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).is_file():
            continue
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and int(cells[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{cells[9]}]")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in inodes for link in (entry / "fd").iterdir()):
                return f"{(entry / 'comm').read_text().strip()} (pid {entry.name})"
        except OSError:
            continue
    return None
