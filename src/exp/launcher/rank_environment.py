"""Variables of other launchers: the place that they give this process, or what they have left over in a shell."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, MutableMapping, Sequence

from exp import console
from exp.errors import ConfigError
from exp.launcher.ports import is_here

__all__ = [
    "RankEnvironment",
    "be_quiet",
    "drop_stale_variables",
    "given_group",
    "suggested_group",
    "take_stale_variables",
]

# What tells rank, world size, local rank and local world size; the first family that is complete counts, else the
# first of which anything is set (srun sets some of PMI's).
_FAMILIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun, PyTorchJob, Volcano, by hand
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # srun
)
_ALIVE = ("TORCHELASTIC_RUN_ID", "KUBERNETES_SERVICE_HOST")
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_JOBID")  # what the processes of one group have in common
_STALE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_STAYS_S = 5.0


@dataclass(frozen=True)
class RankEnvironment:
    """One process's place in a group that somebody else has started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    @classmethod
    def of(cls, environ: Mapping[str, str], nproc: int = 1) -> RankEnvironment:
        """Read it.

        Args:
            environ: the environment.
            nproc: processes of a node, where no variable tells that.

        Raises:
            ConfigError: a variable is missing, or two do not go together.
        """
        given = [names for names in _FAMILIES if any(name in environ for name in names[:2])]
        whole = [names for names in given if all(name in environ for name in names[:3])]
        names = next(iter([*whole, *given]), None)
        if names is None:
            raise ConfigError(
                "launcher=external takes the place that another launcher gives, and finds none; use it under torchrun, "
                "mpirun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
            )
        missing = [name for name in names[:3] if name not in environ]
        several = environ.get(names[1], "1") != "1"
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if several and name not in environ]
        if missing:
            one = "; one process per node, or pod: LOCAL_RANK=0" if "LOCAL_RANK" in missing else ""
            raise ConfigError(
                f"launcher=external: {', '.join(missing)} is not set, but {_shown(environ, names)}; set it{one}"
            )
        local = re.sub(r"\(x\d+\)", "", environ.get(names[3], str(nproc)))  # Slurm's "2(x4)": two on each of four nodes
        if "," in local and len(set(local.split(","))) > 1:
            raise ConfigError(
                f"launcher=external: every node must have as many processes: {_shown(environ, names)}; have the "
                "scheduler start as many on each"
            )
        local = local.partition(",")[0]
        numbers = [_number(name, text) for name, text in zip(names, [*(environ[name] for name in names[:3]), local])]
        place = cls(
            numbers[0],
            numbers[1],
            numbers[2],
            numbers[3],
            environ.get("MASTER_ADDR", "127.0.0.1"),
            _number("MASTER_PORT", environ.get("MASTER_PORT", "0")),
        )
        wrong = place._wrong(names)
        if wrong:
            raise ConfigError(f"launcher=external: {wrong}: {_shown(environ, names)}; correct what sets them")
        return place

    def _wrong(self, names: tuple[str, ...]) -> str | None:
        rank, size, local_rank, local_size = names
        if not 0 <= self.rank < self.world_size:
            return f"{rank} must be at least 0 and below {size}"
        if not 0 <= self.local_rank < self.local_world_size:
            return f"{local_rank} must be at least 0 and below {local_size} (or nproc), {self.local_world_size}"
        if self.world_size % self.local_world_size:
            return f"every node must have as many processes: {self.world_size} / {self.local_world_size} is not whole"
        if self.local_world_size == self.world_size and self.local_rank != self.rank:
            return f"on one node {local_rank} must be {rank}"
        if self.world_size > 1 and not 0 < self.master_port < 65536:
            return f"MASTER_PORT={self.master_port} is no port"
        return None

    @property
    def nodes(self) -> int:
        """How many nodes take part."""
        return self.world_size // self.local_world_size

    def environment(self) -> dict[str, str]:
        """The same in torch's variables."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def given_group(environ: Mapping[str, str], nnodes: int = 1) -> str | None:
    """What says that this process is one of several that a launcher has started; None: nothing does.

    The launchers of MPI give their variables to what they start, and to nothing else. Those of torch are also set by
    hand, and left over in a shell; then they are seldom complete, and nobody else is there: no scheduler's or
    launcher's own variables, no process of another rank. Where this machine is to be the master that is not asked for:
    its rank 0 may be this process, and each other one would be started by hand. Those of srun are also in a shell
    that it has started (``srun --pty``), of whatever size: there has to be another task with the same command line.

    Args:
        environ: the environment.
        nnodes: nodes that the user asks for: as many processes are one agent on each, which is what is wanted.
    """
    master = _torch_master(environ, nnodes)
    if master is not None:
        scheduled = any(name in environ for name in _ALIVE)
        group = (_FAMILIES[0][1], "MASTER_ADDR", "MASTER_PORT")
        if scheduled or _is_this_machine(master) or _another_rank_runs(environ, "RANK", group):
            return _shown(environ, _FAMILIES[0])
    for names in _FAMILIES[1:]:
        if _size(environ, names) in (1, nnodes):
            continue
        if names in _FAMILIES[1:3] and names[2] in environ:  # of MPI: srun may set some of PMI's, not the local rank
            return _shown(environ, names)
        if _another_rank_runs(environ, names[0], (*_STEP, names[1]), same_command=True):
            time.sleep(_STAYS_S)  # the others, too, have to see this process
            return _shown(environ, names)
    return None


def drop_stale_variables(nnodes: int = 1) -> None:
    """Remove variables that an earlier launch left in this process's environment, with a warning.

    Args:
        nnodes: nodes that the user asks for: as many processes may have been started, one on each.

    Raises:
        ConfigError: they are no leftovers: this process is one of several.
    """
    group = given_group(os.environ, nnodes)
    if group is not None:
        raise ConfigError(
            f"this process was started as one of several ({group}), and each would be a run of its own in one folder; "
            "launcher=external takes this place; launcher=torchrun nproc=N, started once on each node without them, "
            "starts the processes itself"
        )
    several = suggested_group(os.environ, nnodes)
    if several is not None:
        console.warn(
            f"{several} tell of several processes, but no other one with this command is seen here: this is a run of "
            "its own; launcher=external makes them one"
        )
    stale = take_stale_variables(os.environ)
    if stale:
        console.warn(f"ignoring {', '.join(stale)} of the shell: exp starts its own workers")


def take_stale_variables(environ: MutableMapping[str, str]) -> list[str]:
    """Remove what an earlier launch left in the environment; returns the names."""
    stale = sorted(name for name in environ if name in _STALE or name.startswith("TORCHELASTIC_"))
    for name in stale:
        del environ[name]
    return stale


def suggested_group(environ: Mapping[str, str], nnodes: int = 1) -> str | None:
    """Variables of MPI or srun that tell of several processes, where none but this one is seen; None: there are none.

    Args:
        environ: the environment.
        nnodes: nodes that the user asks for.
    """
    several = (names for names in _FAMILIES[1:] if _size(environ, names) not in (1, nnodes))
    return next((_shown(environ, names) for names in several), None)


def be_quiet(arguments: list[str]) -> None:
    """Let one process of each node speak: the others would say the same; their logs have what is theirs.

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


def _torch_master(environ: Mapping[str, str], nnodes: int) -> str | None:
    """Where torch's variables say that several ranks meet; None: they do not, or do not go together."""
    rank, size, local_rank, _ = _FAMILIES[0]
    whole = all(name in environ for name in (rank, size, local_rank, "MASTER_ADDR"))
    port = environ.get("MASTER_PORT", "")
    several = whole and _size(environ, _FAMILIES[0]) not in (1, nnodes)
    return environ["MASTER_ADDR"] if several and port.isdigit() and 0 < int(port) < 65536 else None


def _size(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    """Of the group; 1 where the variables tell none."""
    rank, size = (environ.get(name, "") for name in names[:2])
    return int(size) if rank.isdigit() and size.isdigit() and int(rank) < int(size) else 1


def _is_this_machine(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(is_here(family, str(address[0])) for family, _, _, _, address in addresses)


def _another_rank_runs(environ: Mapping[str, str], rank: str, group: Sequence[str], same_command: bool = False) -> bool:
    """Whether a process on this machine has another rank of the same group.

    Args:
        environ: the environment.
        rank: the variable of the rank.
        group: variables that all processes of the group have in common.
        same_command: count only those with the same command line.
    """
    same = {f"{name}={environ[name]}".encode() for name in group if name in environ}
    mine = f"{rank}={environ[rank]}".encode()
    command = Path("/proc/self/cmdline").read_bytes()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            own = set((entry / "environ").read_bytes().split(b"\0"))
            ranks = [each for each in own if each.startswith(f"{rank}=".encode())]
            alike = not same_command or (entry / "cmdline").read_bytes() == command
            if alike and same <= own and ranks not in ([], [mine]):
                return True
        except OSError:
            continue  # it has ended, or is somebody else's
    return False


def _shown(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    found = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name in environ]
    return " ".join(f"{name}={environ[name]}" for name in found)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"launcher=external: {name}={text} is no whole number; correct what sets it") from None
