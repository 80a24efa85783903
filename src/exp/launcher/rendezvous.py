"""Rendezvous of the agents of several nodes: torch's c10d rendezvous with restricted unpickling.

Torch keeps the rendezvous state in a TCP store as a pickle, which every agent loads. Any process that can
reach the store can write to it; a state that names classes other than torch's own is therefore refused. Imports torch.

Nodes may come and go (``launcher.nnodes=2:4``). A round is one set of nodes: their workers start together, resume from
the newest checkpoint, and end together, when the agents form the next round:

- A node comes, and waits in the store. Each agent sees it, and sets a flag; the workers of all nodes agree on a step
  (:mod:`exp.engine.preemption`), save, and end.
- A node leaves with notice: its workers have the preemption flag, and so all save and end; its launcher ends its agent.
- A node dies: the others learn it from its missing heartbeats (15 s), and stop their workers, if these have not ended
  already because a connection broke.

A guard whose worker has ended for such a reason waits for the agent, which would take its end for a failure.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from exp import console
from exp.hardware.compat import serving_store
from exp.runs.job import ENDING_FLAG, NODES_FILE, PREEMPTED_FILE, REFORM_FLAG, SCRATCH_VARIABLE

__all__ = ["RENDEZVOUS"]

RENDEZVOUS = "exp-c10d"
"""Name in torch's registry of rendezvous handlers."""

_LAST_CALL = timedelta(seconds=5)
"""Once there are enough nodes, those that come within this time are of the same round."""

_BEGINS_WITHIN = timedelta(seconds=20)  # all nodes of a round see within a second that it is complete

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
        with _naming_the_store():
            return _checked(super().get_state())

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Like torch's, but checks the state that another agent has set instead."""
        with _naming_the_store():
            return _checked(super().set_state(state, token))


@contextlib.contextmanager
def _naming_the_store() -> Iterator[None]:
    try:
        yield
    except RendezvousConnectionError as error:
        why = "the machine of launcher.rdzv_endpoint has ended its part, and with it the store of the job"
        raise RendezvousConnectionError(why) from error


class _ElasticHandler(DynamicRendezvousHandler):
    """Torch's handler for nodes that come and go: workers save their state before a node joins or leaves."""

    def prepare(self, params: RendezvousParameters) -> None:
        """Take what torch's constructor does not: the endpoint, and the number of workers of this node."""
        self.endpoint, self.nproc, self.nodes = params.endpoint, params.get_as_int("nproc"), 0
        self.scratch, self.launcher = Path(os.environ[SCRATCH_VARIABLE]), os.getppid()

    def next_rendezvous(self) -> Any:
        """Form the next round, and print its nodes.

        Raises:
            RendezvousError: this node leaves, there are too few nodes, or the job has ended.
        """
        for file in self.scratch.glob(f"{REFORM_FLAG}*"):
            file.unlink()
        if (self.scratch / PREEMPTED_FILE).exists():
            self._stop_heartbeats()  # and tell the others, which would wait until these are late
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self.settings.timeout.close))
            self.nodes = 0
            raise RendezvousClosedError("this node has left")
        self._set_nodes(0)
        least, most = self.settings.min_nodes, self.settings.max_nodes
        console.make_console().print(f"waiting for {least} to {most} nodes at {self.endpoint}", highlight=False)
        try:
            joined = None
            while joined is None:
                joined = self._join_round()
        except RendezvousTimeoutError:
            limit_s = self.settings.timeout.join.total_seconds()
            why = f"fewer than {least} nodes were at {self.endpoint} within launcher.timeout_s={limit_s:.0f}"
            raise RendezvousTimeoutError(why) from None
        except RendezvousClosedError:
            raise RendezvousClosedError("the job of the other nodes has ended") from None
        rank, nodes = self._get_world()
        self._set_nodes(nodes)
        console.make_console().print(f"{nodes} nodes train together; this is node {rank}", highlight=False)
        return joined

    def _join_round(self) -> Any:
        """Join a round; None if one of its nodes has gone before it began, for which torch's agent would wait."""
        try:
            joined, store = super().next_rendezvous(), self._get_store()
            rank, nodes = self._get_world()
            store.set(f"here/{rank}", "")
            store.wait([f"here/{other}" for other in range(nodes)], _BEGINS_WITHIN)
            return joined
        except RuntimeError:  # of the store
            return None

    def _set_nodes(self, nodes: int) -> None:
        self.nodes = nodes
        (self.scratch / NODES_FILE).write_text(str(nodes))

    def num_nodes_waiting(self) -> int:
        """Whether to form the next round now: a node is gone, or all workers of this node have ended for that."""
        waiting, state = super().num_nodes_waiting(), self._state_holder.state
        if waiting:
            (self.scratch / REFORM_FLAG).touch()
        ended = len([*self.scratch.glob(f"{REFORM_FLAG}-*")])
        is_gone = not state.closed and len(state.participants) < self.nodes  # closed: others may have completed the run
        return int(is_gone or ended == self.nproc or (ended > 0 and state.closed))

    def shutdown(self) -> bool:
        """Close the rendezvous, which ends the job on all nodes; not if it is only this node that ends."""
        if self.nodes and os.getppid() == self.launcher and not (self.scratch / ENDING_FLAG).exists():
            return super().shutdown()
        self._stop_heartbeats()
        return True


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
    backend, store = _Backend(served, params.run_id), TCPStore(host, port, is_master=False, timeout=timeout)
    if params.min_nodes == params.max_nodes:
        return create_handler(store, backend, params)
    limits = RendezvousTimeout(timedelta(seconds=params.get_as_int("join_timeout") or 0), _LAST_CALL)
    nodes = params.min_nodes, params.max_nodes
    handler: Any = _ElasticHandler.from_backend(params.run_id, store, backend, *nodes, params.local_addr, limits)
    handler.prepare(params)
    return handler  # type: ignore[no-any-return]


rendezvous_handler_registry.register(RENDEZVOUS, _create)
