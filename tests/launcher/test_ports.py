"""The endpoint where nodes meet: what is wrong with it is said before anything starts."""

from __future__ import annotations

import os
import socket

import pytest

from exp.errors import ConfigError
from exp.launcher.ports import check_endpoint, taken_by


def test_a_port_is_judged_on_its_own_machine_alone():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert taken_by(port) is None  # nobody listens yet
        server.listen()
        assert taken_by(port).endswith(f"(pid {os.getpid()})")
        check_endpoint(f"192.0.2.1:{port}")  # an address that is nobody's (RFC 5737)


@pytest.mark.parametrize(
    "endpoint", ["node0", ":1", "node0:", "node0:port", "node0:0", "node0:65536", "no.such.host.invalid:29500"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(ConfigError, match=f"^launcher.rdzv_endpoint={endpoint}"):
        check_endpoint(endpoint)
