"""Checks of hosts and ports before a rendezvous: a clear error instead of a time-out."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any, Sequence

from exp.errors import ConfigError, UnavailableError

_LISTEN = "0A"  # the kernel's code in /proc/net/tcp


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
        if _is_usable(host, str(address[0])):
            with contextlib.suppress(OSError):
                listener.bind(address)
                listener.listen()
                return listener
        listener.close()
    return None


def _is_usable(host: str, address: str) -> bool:
    """False for a loopback address, unless ``host`` is ``localhost`` or that address: other machines need another."""
    return not ipaddress.ip_address(address).is_loopback or host in ("localhost", address)


def check_endpoint(endpoint: str) -> None:
    """Check a rendezvous endpoint.

    Args:
        endpoint: ``host:port``.

    Raises:
        ConfigError: the endpoint is malformed, its host is unknown, or another program has taken its port.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"launcher.rdzv_endpoint={endpoint} is not <host>:<port>, such as node0:29500")
    for family, kind, _, _, address in check_host(f"launcher.rdzv_endpoint={endpoint}: the host", host, int(port)):
        with socket.socket(family, kind) as probe:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            except OSError as error:  # EADDRNOTAVAIL: the address belongs to another machine
                holder = port_owner(int(port)) if error.errno == errno.EADDRINUSE else None
                if holder is not None:
                    raise ConfigError(
                        f"launcher.rdzv_endpoint={endpoint}: port {port} is taken by {holder}",
                        "choose another port, the same on every node",
                    ) from None


def check_host(where: str, host: str, port: int = 0) -> Sequence[Any]:
    """The addresses of a host, as ``socket.getaddrinfo`` returns them.

    Args:
        where: the key or variable that names the host, for the message.
        host: name or address.
        port: of the addresses.

    Raises:
        ConfigError: the host is unknown.
    """
    try:
        return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{where} {host} is not known here ({error})", "correct it") from error


def check_loopback() -> None:
    """Check that processes of this machine can connect to each other.

    Raises:
        UnavailableError: the loopback interface is down.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))
        except OSError as error:
            raise UnavailableError(
                f"the loopback interface is down ({error.strerror}), over which the ranks of one node meet",
                "ip link set lo up, or export GLOO_SOCKET_IFNAME=<another interface>",
            ) from error


def local_address_for(endpoint: str) -> str | None:
    """This machine's address on the interface that leads to an endpoint; None: only a loopback address leads there."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    for family, _, _, _, address in socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(address)
            local_address = str(probe.getsockname()[0])
            return local_address if _is_usable(host, local_address) else None
    return None


def port_owner(port: int) -> str | None:
    """The program that listens on ``port``, as far as ``/proc`` shows it to this user.

    Returns:
        Program and process id; None if there is none, or if it is exp's agent, which may belong to this job.
    """
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.is_file()]
    rows = [line.split() for path in tables for line in path.read_text(encoding="ascii").splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTEN and row[1].endswith(f":{port:04X}")}
    for entry in Path("/proc").glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            links = (os.readlink(str(link)) for link in (entry / "fd").iterdir())  # Path.readlink needs Python 3.9
            if any(link in sockets for link in links):
                command = (entry / "cmdline").read_text(encoding="utf-8", errors="replace")
                program = Path(command.split("\0")[0]).name or "a program"
                return None if "exp.launcher.agent" in command else f"{program} (pid {entry.name})"
    return None
