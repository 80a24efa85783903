"""Makes and destroys the vendor's process groups."""

from __future__ import annotations

import os
import socket
import warnings
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store
from torch.distributed import rendezvous as torch_rendezvous
from torch.distributed.constants import default_pg_timeout

from torch_gcu import _C
from torch_gcu._settings import physical_card

__all__ = [
    "Backend",
    "GroupMember",
    "destroy_process_group",
    "get_backend",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_eccl_available",
    "is_initialized",
    "new_group",
]


class Backend:
    """Name of a backend: ``eccl``, the only one; any other name becomes ``undefined``."""

    UNDEFINED = "undefined"
    ECCL = "eccl"

    def __new__(cls, name: str) -> str:  # type: ignore[misc]
        """Look up a name.

        Raises:
            ValueError: ``name`` is not a string.
        """
        if not isinstance(name, str):
            raise ValueError(f"Backend name must be a string, but got: {name}")
        return getattr(cls, name.upper(), cls.UNDEFINED)


class GroupMember:
    """The default group, and the marker for a group that this process is not in."""

    WORLD: ProcessGroup | None = None
    NON_GROUP_MEMBER = object()


group = GroupMember


class _Record(NamedTuple):
    """A group: its name, the global ranks of its members in order, and its store."""

    name: str
    ranks: list[int]
    store: Store


_ECCL_AVAILABLE = os.environ.get("SIM_GCU_ECCL") != "0"
if not _ECCL_AVAILABLE:
    warnings.warn("torch_gcu.distributed: libeccl.so is not there; distributed training is not possible", stacklevel=2)

_groups: dict[ProcessGroup, _Record] = {}
_made = 0


def is_available() -> bool:
    """Whether the package can make groups."""
    return True


def is_eccl_available() -> bool:
    """Whether the card's collectives are installed; they are a component of their own."""
    return _ECCL_AVAILABLE


def is_initialized() -> bool:
    """Whether the default group has been made."""
    return GroupMember.WORLD is not None


def default_group() -> ProcessGroup:
    """The default group.

    Raises:
        RuntimeError: there is no default group.
    """
    if GroupMember.WORLD is None:
        raise RuntimeError(
            "Default process group has not been initialized, please make sure to call init_process_group "
            "(of torch_gcu.distributed; the group of torch.distributed is another)."
        )
    return GroupMember.WORLD


def group_and_rank(process_group: ProcessGroup | None, global_rank: int) -> Any:
    """A group (None: the default group), and the rank in this group of the process with a global rank.

    Raises:
        RuntimeError: there is no such group, or the process is not in it.
    """
    chosen = process_group if process_group is not None else default_group()
    record = _groups.get(chosen)
    if record is None:
        raise RuntimeError("The given group does not exist")
    if global_rank not in record.ranks:
        raise RuntimeError(f"The global rank {global_rank} is not part of the group {record.ranks}")
    return chosen, record.ranks.index(global_rank)


def init_process_group(
    backend: str,
    init_method: str | None = None,
    timeout: timedelta = default_pg_timeout,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
) -> None:
    """Make the default group; every rank waits for all others.

    Args:
        backend: ``"eccl"``.
        init_method: rendezvous, ``env://`` (MASTER_ADDR, MASTER_PORT, and TORCHELASTIC_USE_AGENT_STORE) or ``tcp://``;
            None: ``env://``.
        timeout: longest wait for the other ranks, now and in collectives.
        world_size: number of processes; by default WORLD_SIZE.
        rank: of this process; by default RANK.
        store: a store of the vendor's own classes, which the simulation does not have.
        group_name: ignored.
        pg_options: must be None.

    Raises:
        RuntimeError: ECCL is missing, the backend is not eccl, the default group exists already, LOCAL_RANK has no
            card, or two ranks are on one card.
        TypeError: a store was given.
    """
    global _made
    del group_name
    if not is_eccl_available():
        raise RuntimeError("Distributed package doesn't have ECCL built in")
    if is_initialized():
        raise RuntimeError("trying to initialize the default process group twice!")
    if store is not None:
        raise TypeError(
            f"torch_gcu.distributed takes stores of its own classes only, got {type(store).__module__}."
            f"{type(store).__name__}; leave it out, and set MASTER_ADDR and MASTER_PORT"
        )
    assert pg_options is None, "Expected pg_options argument to be of type ProcessGroupECCL.Options"
    found = next(torch_rendezvous(init_method or "env://", rank, world_size, timeout=timeout))
    store, rank, world_size = found
    store.set_timeout(timeout)
    if Backend(backend) != Backend.ECCL:
        raise RuntimeError(
            f"only support eccl: torch_gcu.distributed.init_process_group was given backend={backend!r}; "
            "make groups of other kinds with torch.distributed"
        )
    _made = 1
    store = PrefixStore("torch_gcu", store)
    GroupMember.WORLD = _make(_Record("0", list(range(world_size)), store), rank, timeout)
    _barrier(GroupMember.WORLD)


def new_group(
    ranks: list[int] | None = None,
    timeout: timedelta = default_pg_timeout,
    backend: str | None = None,
    pg_options: Any = None,
) -> Any:
    """Make a group of some of the ranks; every rank must call this, in the same order.

    Raises:
        RuntimeError: the backend is not eccl, or a rank does not exist.
    """
    global _made
    del pg_options
    if backend is not None and Backend(backend) != Backend.ECCL:
        raise RuntimeError(f"only support eccl: torch_gcu.distributed.new_group was given backend={backend!r}")
    world = _groups[default_group()]
    members = sorted(ranks) if ranks is not None else world.ranks
    if not set(members) <= set(world.ranks):
        raise RuntimeError(f"new_group: ranks {members} are not all among the default group's {len(world.ranks)}")
    name, _made = str(_made), _made + 1
    mine = default_group().rank()
    if mine not in members:
        return GroupMember.NON_GROUP_MEMBER
    return _make(_Record(name, members, world.store), members.index(mine), timeout)


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Destroy a group; None: the default group and all others."""
    if group is GroupMember.NON_GROUP_MEMBER:
        return
    chosen = group if group is not None else GroupMember.WORLD
    assert chosen is not None, "torch_gcu.distributed has no process group to destroy"
    if chosen not in _groups:
        raise RuntimeError("Invalid process group specified")
    if chosen is GroupMember.WORLD:
        GroupMember.WORLD = None
        _groups.clear()
    else:
        del _groups[chosen]


def get_backend(group: ProcessGroup | None = None) -> str:
    """Name of the backend of a group, always ``eccl``."""
    if (group if group is not None else default_group()) not in _groups:
        raise RuntimeError("Invalid process group specified")
    return Backend.ECCL


def get_rank(group: ProcessGroup | None = None) -> int:
    """Rank of this process in a group; -1 if it is not in the group."""
    if group is GroupMember.NON_GROUP_MEMBER:
        return -1
    return (group if group is not None else default_group()).rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Number of processes in a group; -1 if this process is not in the group."""
    if group is GroupMember.NON_GROUP_MEMBER:
        return -1
    return (group if group is not None else default_group()).size()


def get_local_rank() -> int:
    """LOCAL_RANK, which is also the index of the card that collectives use; the rank if the variable is not set."""
    return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else get_rank()


def _make(record: _Record, rank: int, timeout: timedelta) -> ProcessGroup:
    local_rank = os.environ.get("LOCAL_RANK")
    card = int(local_rank) if local_rank is not None else record.ranks[rank]
    if card >= _C.device_count():
        raise RuntimeError(
            f"eccl: LOCAL_RANK={card} has no card; this process sees {_C.device_count()} (TOPS_VISIBLE_DEVICES)"
        )
    _check_distinct(record, rank, f"card {physical_card(card)} of host {socket.gethostname()}")
    gloo = ProcessGroupGloo(PrefixStore(record.name, record.store), rank, len(record.ranks), timeout=timeout)
    made = _C.make_eccl(rank, len(record.ranks), gloo, card)
    _groups[made] = record
    return made


def _check_distinct(record: _Record, rank: int, place: str) -> None:
    """Exchange the cards of all ranks, and refuse two ranks on one card."""
    store = PrefixStore(f"{record.name}/place", record.store)
    store.set(str(rank), place)
    ranks = range(len(record.ranks))
    places = [store.get(str(other)).decode() for other in ranks]
    store.set(f"read/{rank}", "")
    if rank == 0:  # rank 0 serves the store: if it ended now, the others would get a broken pipe
        store.wait([f"read/{other}" for other in ranks])
    for other in ranks:
        if other != rank and places[other] == place:
            raise RuntimeError(
                f"eccl: ranks {min(rank, other)} and {max(rank, other)} are both on {place}; give each rank a card of "
                "its own by LOCAL_RANK"
            )


def _barrier(process_group: ProcessGroup) -> None:
    process_group.barrier().wait()
