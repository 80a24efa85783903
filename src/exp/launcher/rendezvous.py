"""How the agents of several nodes meet: torch's c10d rendezvous, with a connection of its own for heartbeats.

Imports torch.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

__all__ = ["RENDEZVOUS"]

RENDEZVOUS = "exp-c10d"
"""What torch's launcher knows it by."""


class _Backend(C10dRendezvousBackend):
    name = RENDEZVOUS


def _create(params: RendezvousParameters) -> RendezvousHandler:
    """Torch's c10d handler, whose agent does not share the connection of the heartbeats.

    A thread sends these every five seconds. The agent itself waits in the same store, for nodes that start or end
    later than its own. On one connection, that of torch 1.10 mixes up the answers ("Connection reset by peer",
    ``std::bad_alloc``: pytorch issue 62029), and later ones hold the heartbeats back until the node counts as dead.
    """
    _, store = create_backend(params)
    backend = _Backend(store, params.run_id)
    if isinstance(store, TCPStore):
        host, port = parse_rendezvous_endpoint(params.endpoint, default_port=-1)
        timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
        store = TCPStore(host, port, is_master=False, timeout=timeout)
    return create_handler(store, backend, params)


rendezvous_handler_registry.register(RENDEZVOUS, _create)
