"""The place that somebody else's launcher gives a process: which rank of how many, and where they meet."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

from exp.errors import ConfigError
from exp.launcher.ports import is_here

__all__ = ["Place", "given_group", "local_rank_of", "suggested_group"]

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
_STAYS_S = 5.0


@dataclass(frozen=True)
class Place:
    """One process's place in a group that somebody else has started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    @classmethod
    def of(cls, environ: Mapping[str, str], nproc: int = 1) -> Place:
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
    place = _torch_place(environ)
    if place is not None and place.world_size not in (1, nnodes):
        told = any(name in environ for name in _ALIVE)
        if told or _is_this_machine(place.master_addr) or _has_sibling(place):
            return _shown(environ, _FAMILIES[0])
    for names in _FAMILIES[1:]:
        if _size(environ, names) not in (1, nnodes) and (_is_of_mpi(environ, names) or _has_twin(environ, names)):
            return _shown(environ, names)
    return None


def suggested_group(environ: Mapping[str, str], nnodes: int = 1) -> str | None:
    """Variables of MPI or srun that tell of several processes, where none but this one is seen; None: there are none.

    Args:
        environ: the environment.
        nnodes: nodes that the user asks for.
    """
    several = (names for names in _FAMILIES[1:] if _size(environ, names) not in (1, nnodes))
    return next((_shown(environ, names) for names in several), None)


def _torch_place(environ: Mapping[str, str]) -> Place | None:
    """As torch's own variables tell it; None: they do not, or do not go together."""
    if not all(name in environ for name in _FAMILIES[0][:3]):
        return None
    try:
        return Place.of(environ)
    except ConfigError:
        # Without LOCAL_WORLD_SIZE the place is not complete for us, but the group is.
        try:
            return Place.of({**environ, "LOCAL_WORLD_SIZE": environ["WORLD_SIZE"], "LOCAL_RANK": environ["RANK"]})
        except (ConfigError, KeyError):
            return None


def _size(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    """Of the group; 1 where the variables tell none."""
    rank, size = (environ.get(name, "") for name in names[:2])
    return int(size) if rank.isdigit() and size.isdigit() and int(rank) < int(size) else 1


def _is_of_mpi(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Whether a launcher of MPI has set them: srun may set some of PMI's, but not the local rank."""
    return names in _FAMILIES[1:3] and names[2] in environ


def _is_this_machine(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(is_here(family, str(address[0])) for family, _, _, _, address in addresses)


def _has_sibling(place: Place) -> bool:
    """Whether a process on this machine has another rank of the same group."""
    same = {f"{name}={value}".encode() for name, value in place.environment().items() if "RANK" not in name}
    same = {each for each in same if not each.startswith(b"LOCAL_")}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            own = set((entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue  # it has ended, or is somebody else's
        ranks = [each for each in own if each.startswith(b"RANK=")]
        if same <= own and ranks and ranks != [f"RANK={place.rank}".encode()]:
            return True
    return False


def _has_twin(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Whether another task of the same step of a job runs the same command line on this machine.

    Where one does this process stays for a while: the others, too, have to see it.
    """
    rank = f"{names[0]}=".encode()
    same = {f"{name}={environ[name]}".encode() for name in (*_STEP, names[1]) if name in environ}
    mine = Path("/proc/self/cmdline").read_bytes()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            own = set((entry / "environ").read_bytes().split(b"\0"))
            ranks = [each for each in own if each.startswith(rank)]
            if not same <= own or ranks in ([], [rank + environ[names[0]].encode()]):
                continue
            if (entry / "cmdline").read_bytes() == mine:
                time.sleep(_STAYS_S)
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


def local_rank_of(environ: Mapping[str, str] = os.environ) -> int:
    """The local rank, as far as it is known before anything is checked; 0 where it is not."""
    for names in _FAMILIES:
        if environ.get(names[2], "").isdigit():
            return int(environ[names[2]])
    return 0
