"""The meeting point of several nodes: readable complaints instead of a time-out."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any, Sequence

from exp.errors import ConfigError, UnavailableError

__all__ = ["address_towards", "check_endpoint", "check_host", "check_loopback", "is_here", "listen_at", "taken_by"]

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
    addresses = check_host(f"launcher.rdzv_endpoint={endpoint}: the host", host.strip("[]"), int(port))
    if not any(is_here(family, str(address[0])) for family, _, _, _, address in addresses):
        return
    taken = taken_by(int(port))
    if taken is not None:
        raise ConfigError(
            f"launcher.rdzv_endpoint={endpoint}: port {port} is taken by {taken}; "
            "choose another port, the same on every node"
        )


def check_host(where: str, host: str, port: int = 0) -> Sequence[Any]:
    """The addresses of a host, as ``socket.getaddrinfo`` gives them.

    Raises:
        ConfigError: it is not known; ``where`` says in front of its name who has named it.
    """
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{where} {host} is not known here ({error}); correct it") from error


def check_loopback() -> None:
    """Whether processes of this machine reach each other.

    Raises:
        UnavailableError: the loopback interface is down.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))
        except OSError as error:
            raise UnavailableError(
                f"the loopback interface is down ({error.strerror}), over which the ranks of one node meet; "
                "ip link set lo up, or export GLOO_SOCKET_IFNAME=<another interface>"
            ) from error


def listen_at(host: str, port: int) -> socket.socket | None:
    """A socket that listens at one address of this machine, instead of all.

    Returns:
        None where the address is another machine's, somebody listens there, or where the name stands for the loopback
        interface on this machine alone, as that of the host often does.
    """
    host = host.strip("[]")
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if _is_usable(host, str(address[0])):
            with contextlib.suppress(OSError):
                listener.bind(address)
                listener.listen()
                return listener
        listener.close()
    return None


def address_towards(endpoint: str) -> str | None:
    """This machine's address on the interface that leads to an endpoint; None: it says nothing to other machines."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    for family, _, _, _, address in socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(address)
            own = str(probe.getsockname()[0])
            return own if _is_usable(host, own) else None
    return None


def _is_usable(host: str, address: str) -> bool:
    """Whether an address means the same to all who know ``host``: that of the loopback interface only if that is it."""
    return not ipaddress.ip_address(address).is_loopback or host in ("localhost", address)


def is_here(family: int, address: str) -> bool:
    """Whether an address is this machine's: only such a one can be bound."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def taken_by(port: int) -> str | None:
    """The program that listens on ``port``, as far as ``/proc`` lets this user see it; None: none, or a node's agent.

    The agent of another node may run on this machine, and have come first.
    """
    holder = _holder_of(port)
    return None if holder is None or "exp.launcher.agent" in _command(holder) else f"{_name(holder)} (pid {holder})"


def _holder_of(port: int) -> int | None:
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
