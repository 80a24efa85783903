"""Rendezvous of the agents of several nodes: torch's c10d rendezvous with restricted unpickling.

Torch keeps the rendezvous state in a TCP store as a pickle, which every agent loads. Any process that can
reach the store can write to it; a state that names classes other than torch's own is therefore refused. Imports torch.
"""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from exp.hardware.compat import serving_store

__all__ = ["RENDEZVOUS"]

RENDEZVOUS = "exp-c10d"
"""Name in torch's registry of rendezvous handlers."""

_STATE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_CLASSES = {
    (_STATE, "_RendezvousState"), (_STATE, "_NodeDesc"),
    ("datetime", "datetime"), ("datetime", "timedelta"), ("datetime", "timezone"), ("builtins", "set"),
}  # fmt: skip


class _StateReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Look up a class of the rendezvous state; refuse all others."""
        if (module, name) not in _CLASSES:
            raise RendezvousStateError(f"another program has written {module}.{name} to the store of this job")
        return super().find_class(module, name)


def _checked(state: Any) -> Any:
    """Return ``state`` (state and token), or None if there is no state yet; raise if it is not a rendezvous state."""
    if state is not None:
        _StateReader(io.BytesIO(state[0])).load()
    return state


class _Backend(C10dRendezvousBackend):
    name = RENDEZVOUS

    def get_state(self) -> Any:
        """Like torch's, but checks the state."""
        return _checked(super().get_state())

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Like torch's, but checks the state that another agent has set instead."""
        return _checked(super().set_state(state, token))


def _create(params: RendezvousParameters) -> RendezvousHandler:
    """Torch's c10d handler, with a connection of its own for the heartbeats.

    A thread sends a heartbeat every five seconds, while the agent waits in the same store for nodes that start or end
    later. Over one shared connection torch 1.10 mixes up the answers ("Connection reset by peer", ``std::bad_alloc``:
    pytorch issue 62029), and later versions delay the heartbeats until the node counts as dead.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=-1)
    timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
    served = serving_store(host, port, timeout)
    if served is None:  # another node's agent serves the store, or this torch accepts no ready socket
        _, served = create_backend(params)
    backend = _Backend(served, params.run_id)
    return create_handler(TCPStore(host, port, is_master=False, timeout=timeout), backend, params)


rendezvous_handler_registry.register(RENDEZVOUS, _create)
