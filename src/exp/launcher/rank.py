"""Rank, world size and node of a worker, as its launcher's environment variables give them, and the ranks' store."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, MutableMapping, Sequence

from exp import console
from exp.errors import ConfigError
from exp.hardware.cores import cores_of_task, usable_cores
from exp.launcher.ports import listen_at
from exp.runs.status import PreemptionFlag

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

__all__ = [
    "JOINED",
    "REQUEUES_VARIABLE",
    "SCRATCH_VARIABLE",
    "RankInfo",
    "be_quiet",
    "drop_stale_variables",
    "find_group",
    "make_store",
    "place_of",
    "take_stale_variables",
    "this_host",
]

SCRATCH_VARIABLE = "EXP_SCRATCH"
"""Environment variable with the path of the job's private folder on this node."""

JOINED = "joined.json"
"""File in that folder, written by a worker of ``launcher=external``: its run folder, or why it was refused."""

REQUEUES_VARIABLE = "EXP_REQUEUES"
"""Environment variable with the number of times that the scheduler has restarted the job."""

# Variables of rank, world size, local rank and local world size. The first complete family is used; if none is
# complete, the first that is set in part (srun sets some of PMI's).
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun, PyTorchJob, Volcano, by hand
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # and Intel MPI
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_FAMILIES = (_TORCH, _OPEN_MPI, _MPICH, _SRUN)
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_SCHEDULED = ("TORCHELASTIC_RUN_ID", "KUBERNETES_SERVICE_HOST")
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_JOBID")  # equal in all processes of one group
_STAYS_S = 5.0


@dataclass(frozen=True)
class RankInfo:
    """Rank, world size and the like of one worker; the defaults are those of a single worker."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
    store: str | None = None
    """Path of a file store; None: torch's ``env://``, that is MASTER_ADDR and MASTER_PORT."""
    requeues: int = 0
    """How often the scheduler has restarted this job; if not 0, the run resumes."""
    own_cores: int | None = None
    """Cores that srun has given to this rank alone; None: the ranks of a node share the usable cores."""
    preemption_flag: PreemptionFlag = field(default_factory=PreemptionFlag, compare=False)
    """Set when the run has to save its state and end."""
    met: list[Store] = field(default_factory=list, compare=False)
    """The store that the ranks use already; empty: there is none yet."""
    at_end: list[Callable[[], object]] = field(default_factory=list, compare=False)
    """Called last in a worker process, which then exits without the interpreter's clean-up."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @property
    def single_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.nodes == 1

    @property
    def cores(self) -> int:
        """Number of cores for this rank alone, at least 1."""
        share = usable_cores() // self.local_world_size
        return max(1, share if self.own_cores is None else min(self.own_cores, usable_cores()))

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankInfo:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""
        values: Any = [int(environ[name]) for name in _TORCH]
        return cls(*values)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], external: bool = False) -> RankInfo:
        """The rank info of a worker, from torch's variables and the private folder of its job.

        Args:
            environ: the environment.
            external: another launcher started the processes; otherwise exp's agent did.
        """
        place, scratch = cls.of(environ), environ[SCRATCH_VARIABLE]
        restart = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        return dataclasses.replace(
            place,
            restart_count=restart,
            # A new file for each attempt: the old one holds the keys of dead ranks.
            store=None if external or not place.single_node else f"{scratch}/store-{restart}",
            requeues=int(environ.get(REQUEUES_VARIABLE, 0)),
            own_cores=cores_of_task() if external else None,
            preemption_flag=PreemptionFlag(scratch),
        )


def place_of(environ: Mapping[str, str], nproc: int = 1) -> dict[str, str]:
    """Translate the variables of another launcher (torchrun, MPI, srun) into torch's.

    Args:
        environ: the environment.
        nproc: processes per node, used if no variable has it.

    Returns:
        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: a variable is missing, or the variables contradict one another.
    """
    given = [names for names in _FAMILIES if any(name in environ for name in names[:2])]
    whole = [names for names in given if all(name in environ for name in names[:3])]
    if not given:
        raise ConfigError(
            "launcher=external looks for the variables of another launcher, and finds none; use it under torchrun, "
            f"mpirun or srun, or set {', '.join([*_TORCH, *_MASTER])}"
        )
    names = [*whole, *given][0]
    needed = [*names[:3], *(_MASTER if environ.get(names[1], "1") != "1" else ())]
    missing = [name for name in needed if name not in environ]
    shown = f"launcher=external: {_shown(environ, names)}"
    if missing:
        one = "; one process per node, or pod: LOCAL_RANK=0" if "LOCAL_RANK" in missing else ""
        raise ConfigError(f"{shown}, but {', '.join(missing)} is not set; set it{one}")
    on_nodes = re.sub(r"\(x\d+\)", "", environ.get(names[3], str(nproc))).split(",")  # Slurm's "2(x4),1"
    texts = [*(environ[name] for name in names[:3]), on_nodes[0], environ.get("MASTER_PORT", "0")]
    sound = len(set(on_nodes)) == 1 and all(text.isdecimal() for text in texts)
    if sound:
        rank, size, local_rank, local_size, port = map(int, texts)
        even = local_size > 0 and size % local_size == 0
        below = rank < size and local_rank < local_size and (local_size < size or local_rank == rank)
        sound = even and below and (size == 1 or 0 < port < 65536)
    if not sound:
        raise ConfigError(
            f"{shown} contradict each other: every node must have the same number of processes ({names[3]}, or nproc: "
            f"{on_nodes[0]}), ranks must be numbers below the world size, on one node rank and local rank must be "
            "equal, and the port must be in 1 to 65535; correct what sets them"
        )
    return dict(zip((*_TORCH, *_MASTER), [*texts[:4], environ.get("MASTER_ADDR", "127.0.0.1"), texts[4]]))


def find_group(environ: Mapping[str, str], nnodes: int = 1) -> tuple[str, bool] | None:
    """Whether another launcher has started this process as one of several.

    MPI launchers set their variables only in the processes that they start. The variables of torch and srun may also
    be left over in a shell (``srun --pty``). They count only if a scheduler has set them, or if a process of another
    rank with the same command line runs on this machine. Variables of srun without such a process deserve a warning.

    Args:
        environ: the environment.
        nnodes: nodes that the user asks for. So many processes may be one agent per node, and are not reported.

    Returns:
        The variables with their values, and whether the other processes exist; None: nothing indicates a launcher.
    """
    for names in _FAMILIES:
        rank, size = (environ.get(name, "") for name in names[:2])
        several = rank.isdigit() and size.isdigit() and int(rank) < int(size) and int(size) not in (1, nnodes)
        if not several or names[2] not in environ:  # srun may set some of PMI's, not the local rank
            continue
        scheduled = names is _TORCH and any(name in environ for name in _SCHEDULED)
        lives = scheduled or names in (_OPEN_MPI, _MPICH) or _another_runs(environ, names)
        if lives or names is _SRUN:
            return _shown(environ, names), lives
    return None


def drop_stale_variables(nnodes: int = 1) -> None:
    """Remove variables that an earlier launch left in this process's environment, with a warning.

    Args:
        nnodes: nodes that the user asks for; see :func:`find_group`.

    Raises:
        ConfigError: the variables are in use: this process is one of several.
    """
    shown, lives = find_group(os.environ, nnodes) or ("", False)
    if lives:
        raise ConfigError(
            f"this process was started as one of several ({shown}), and each would be a run of its own in the same "
            "folder; use launcher=external, which makes them one run, or start launcher=torchrun nproc=N once on each "
            "node, without another launcher"
        )
    if shown:
        console.warn(
            f"{shown}: these variables are of several processes, but no other process with this command runs here, so "
            "this is a run of one process; launcher=external makes several processes one run"
        )
    stale = take_stale_variables(os.environ)
    if stale:
        console.warn(f"ignoring {', '.join(stale)} from the environment: exp starts its own workers")


def take_stale_variables(environ: MutableMapping[str, str]) -> list[str]:
    """Remove torch's launch variables from the environment; return the removed names."""
    names = (*_TORCH, *_MASTER, "GROUP_RANK")
    stale = sorted(name for name in environ if name in names or name.startswith("TORCHELASTIC_"))
    for name in stale:
        del environ[name]
    return stale


def be_quiet(arguments: list[str]) -> None:
    """With ``launcher=external``, silence all processes but local rank 0, which would print the same.

    Args:
        arguments: of the command line.
    """
    local_ranks = (os.environ[names[2]] for names in _FAMILIES if os.environ.get(names[2], "").isdigit())
    if "launcher=external" in arguments and int(next(local_ranks, "0")) > 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        sys.stdout.flush()
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def _another_runs(environ: Mapping[str, str], names: Sequence[str]) -> bool:
    """Whether a process on this machine has the same command line and group, but another rank.

    Args:
        environ: the environment.
        names: the variables of rank, world size and local rank.
    """
    group = {f"{name}={environ[name]}".encode() for name in (names[1], *_MASTER, *_STEP) if name in environ}
    rank, mine = f"{names[0]}=".encode(), f"{names[0]}={environ[names[0]]}".encode()
    command = Path("/proc/self/cmdline").read_bytes()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            own = set((entry / "environ").read_bytes().split(b"\0"))
            others = any(each.startswith(rank) and each != mine for each in own)
            if others and group <= own and (entry / "cmdline").read_bytes() == command:
                time.sleep(_STAYS_S)  # stay alive until the other processes have seen this one
                return True
    return False


def _shown(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in (*names, *_MASTER) if name in environ)


def make_store(info: RankInfo, timeout: timedelta) -> Store:
    """The store of the process group.

    Args:
        info: of this rank.
        timeout: longest wait for a key of another rank.
    """
    import torch.distributed as dist

    from exp.hardware.compat import serving_store

    if info.met:
        info.met[0].set_timeout(timeout)
        return info.met[0]
    if info.store is not None:
        # Files instead of TCP: torch's TCP store listens on every interface of the machine.
        store = dist.FileStore(info.store, info.world_size)
        store.set_timeout(timeout)
        return store
    tcp_store: Store | None = None
    # Some launchers serve the store themselves, and set this variable.
    if info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        listener = listen_at(host, port)
        tcp_store = None if listener is None else serving_store(host, port, listener, timeout, info.world_size)
    return tcp_store or next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))[0]


def this_host() -> str:
    """This machine's name."""
    return socket.gethostname()
