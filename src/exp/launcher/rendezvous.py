"""How the agents of several nodes meet: torch's c10d rendezvous, less what strangers could use.

Torch keeps the state of a meeting in a TCP store as a pickle, which every agent opens. Whoever reaches the store can
write there, so a state that names other classes than torch's own is refused. Imports torch.
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
from exp.launcher.ports import listen_at

__all__ = ["RENDEZVOUS"]

RENDEZVOUS = "exp-c10d"
"""What torch's launcher knows it by."""

_STATE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_CLASSES = {
    (_STATE, "_RendezvousState"), (_STATE, "_NodeDesc"),
    ("datetime", "datetime"), ("datetime", "timedelta"), ("datetime", "timezone"), ("builtins", "set"),
}  # fmt: skip


class _StateReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Look up a class of the state."""
        if (module, name) not in _CLASSES:
            raise RendezvousStateError(f"somebody else has written to the store of this job: {module}.{name}")
        return super().find_class(module, name)


def _checked(found: Any) -> Any:
    """A state with what goes with it, unless it is a pickle of anything else; None: there is none yet."""
    if found is not None:
        _StateReader(io.BytesIO(found[0])).load()
    return found


class _Backend(C10dRendezvousBackend):
    name = RENDEZVOUS

    def get_state(self) -> Any:
        """As torch's, checked."""
        return _checked(super().get_state())

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """As torch's; the state that is there instead is checked."""
        return _checked(super().set_state(state, token))


def _create(params: RendezvousParameters) -> RendezvousHandler:
    """Torch's c10d handler, whose agent does not share the connection of the heartbeats.

    A thread sends these every five seconds. The agent itself waits in the same store, for nodes that start or end
    later than its own. On one connection, that of torch 1.10 mixes up the answers ("Connection reset by peer",
    ``std::bad_alloc``: pytorch issue 62029), and later ones hold the heartbeats back until the node counts as dead.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=-1)
    timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
    listener = listen_at(host, port)
    served = None if listener is None else serving_store(host, port, listener, timeout)
    if served is None:  # another node's agent serves it, or torch cannot be given a socket
        _, served = create_backend(params)
    backend = _Backend(served, params.run_id)
    return create_handler(TCPStore(host, port, is_master=False, timeout=timeout), backend, params)


rendezvous_handler_registry.register(RENDEZVOUS, _create)
