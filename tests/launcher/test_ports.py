"""The endpoint where nodes meet: what is wrong with it is said before anything starts."""

from __future__ import annotations

import os
import socket

import pytest

from exp.errors import ConfigError
from exp.launcher.ports import check_endpoint, taken_by
from exp.launcher.torchrun import TorchrunLauncher


@pytest.fixture
def taken():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_that_another_program_holds_is_refused_with_its_name(taken):
    launcher = TorchrunLauncher(nnodes=2, rdzv_endpoint=f"127.0.0.1:{taken}")
    with pytest.raises(ConfigError, match=rf"port {taken} is taken by python\S* \(pid {os.getpid()}\)"):
        launcher.check(nproc=1)


def test_a_free_port_passes(taken):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    check_endpoint(f"localhost:{port}")
    assert taken_by(port) is None


def test_a_port_of_another_machine_is_not_judged_here(taken):
    check_endpoint(f"192.0.2.1:{taken}")  # an address that is nobody's (RFC 5737)


@pytest.mark.parametrize("endpoint", ["node0", ":1", "node0:", "node0:port", "node0:0", "node0:65536"])
def test_a_malformed_endpoint_is_refused(endpoint):
    with pytest.raises(ConfigError, match="is not <host>:<port>"):
        check_endpoint(endpoint)


def test_an_unknown_host_is_refused():
    with pytest.raises(ConfigError, match=r"the host no\.such\.host\.invalid is not known here"):
        check_endpoint("no.such.host.invalid:29500")
