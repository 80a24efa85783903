"""A rank's place in the job, and the store over which the ranks meet."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable, Mapping

from exp.hardware.cores import cores_of_task, usable_cores
from exp.runs.status import PreemptionFlag

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

__all__ = ["JOINED", "REQUEUES_VARIABLE", "SCRATCH_VARIABLE", "RankInfo", "make_store", "this_host"]

SCRATCH_VARIABLE = "EXP_SCRATCH"
"""Environment variable that tells the workers of one node where the private folder of their job lies."""

JOINED = "joined.json"
"""In that folder, of a worker that somebody else placed: the run folder that it has come to, or why it was refused."""

REQUEUES_VARIABLE = "EXP_REQUEUES"
"""Environment variable that tells workers how often a scheduler has started their job anew."""


@dataclass(frozen=True)
class RankInfo:
    """One worker's place in the job; by default that of a worker that is alone."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart_count: int = 0
    store: str | None = None
    """Path of a file store; None: torch's ``env://``, that is MASTER_ADDR and MASTER_PORT."""
    requeues: int = 0
    """How often a scheduler has started this job anew: it has to go on where it was."""
    own_cores: int | None = None
    """Cores that srun has given to this rank alone; None: the ranks of a node share what they may use."""
    preemption_flag: PreemptionFlag = field(default_factory=PreemptionFlag, compare=False)
    """Tells that the run has to save its state and end."""
    met: list[Store] = field(default_factory=list, compare=False)
    """The store over which the ranks have met already; empty: they have not."""
    at_end: list[Callable[[], object]] = field(default_factory=list, compare=False)
    """What a worker in a process of its own does last, before that ends without the interpreter's clean-up."""

    @property
    def node_rank(self) -> int:
        """The number of this rank's node."""
        return self.rank // self.local_world_size

    @property
    def single_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.world_size == self.local_world_size

    @property
    def cores(self) -> int:
        """Cores for this rank alone, at least one."""
        share = usable_cores() // self.local_world_size
        return max(1, share if self.own_cores is None else min(self.own_cores, usable_cores()))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], external: bool = False) -> RankInfo:
        """The place that the environment gives, in torch's variables.

        Args:
            environ: has the private folder of the job, too.
            external: somebody else's launcher started the job; otherwise our agent.
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        rank, local_rank, world_size, local_world_size = (int(environ[name]) for name in names)
        restart, scratch = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)), environ[SCRATCH_VARIABLE]
        # A new file for each attempt: an old one holds the keys of ranks that are dead.
        store = None if external or world_size != local_world_size else f"{scratch}/store-{restart}"
        return cls(
            rank, local_rank, world_size, local_world_size, restart, store,
            requeues=int(environ.get(REQUEUES_VARIABLE, 0)),
            own_cores=cores_of_task() if external else None,
            preemption_flag=PreemptionFlag(scratch),
        )  # fmt: skip


def make_store(info: RankInfo, timeout: timedelta) -> Store:
    """The store over which the ranks of ``info`` meet.

    Args:
        info: the place of this rank.
        timeout: the longest that a rank waits for another one's key.
    """
    import torch.distributed as dist

    from exp.hardware.compat import serving_store
    from exp.launcher.ports import listen_at

    if info.met:
        info.met[0].set_timeout(timeout)
        return info.met[0]
    if info.store is not None:
        # Files instead of TCP: torch's TCP store listens on every interface of the machine.
        store = dist.FileStore(info.store, info.world_size)
        store.set_timeout(timeout)
        return store
    tcp_store: Store | None = None
    # Some launchers serve the store themselves, and say so.
    if info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        listener = listen_at(host, port)
        tcp_store = None if listener is None else serving_store(host, port, listener, timeout, info.world_size)
    return tcp_store or next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))[0]


def this_host() -> str:
    """This machine's name."""
    return socket.gethostname()
