"""The endpoint where nodes meet: what is wrong with it is said before anything starts."""

from __future__ import annotations

import os
import socket

import pytest

from exp.errors import ConfigError
from exp.launcher.ports import check_endpoint


def test_who_holds_a_port_is_named_but_a_port_of_another_machine_is_not_judged_here():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is taken by python\S* \(pid {os.getpid()}\)"):
            check_endpoint(f"127.0.0.1:{port}")
        check_endpoint(f"192.0.2.1:{port}")  # an address that is nobody's (RFC 5737)


@pytest.mark.parametrize(
    "endpoint", ["node0", ":1", "node0:", "node0:port", "node0:0", "node0:65536", "no.such.host.invalid:29500"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(ConfigError, match=f"^launcher.rdzv_endpoint={endpoint}"):
        check_endpoint(endpoint)
