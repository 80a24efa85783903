"""Variables of other launchers: the place that they give this process, or what they have left over in a shell."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, MutableMapping, NamedTuple, Sequence

from exp import console
from exp.errors import ConfigError

__all__ = ["Group", "RankEnvironment", "be_quiet", "drop_stale_variables", "find_group", "take_stale_variables"]

# What tells rank, world size, local rank and local world size; the first family that is complete counts, else the
# first of which anything is set (srun sets some of PMI's).
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun, PyTorchJob, Volcano, by hand
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # and Intel MPI
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_FAMILIES = (_TORCH, _OPEN_MPI, _MPICH, _SRUN)
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_SCHEDULED = ("TORCHELASTIC_RUN_ID", "KUBERNETES_SERVICE_HOST")
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_JOBID")  # what the processes of one group have in common
_STAYS_S = 5.0


@dataclass(frozen=True)
class RankEnvironment:
    """One process's place in a group that somebody else has started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str = "127.0.0.1"
    master_port: int = 0

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
        if not given:
            raise ConfigError(
                "launcher=external takes the place that another launcher gives, and finds none; use it under torchrun, "
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
        if not all(re.fullmatch(r"\d+", text) for text in texts):
            raise ConfigError(f"{shown}: one is no whole number; correct what sets it")
        rank, size, local_rank, local_size, port = map(int, texts)
        if len(set(on_nodes)) > 1 or local_size == 0 or size % local_size:
            raise ConfigError(f"{shown}: every node must have as many processes; have the scheduler start as many")
        if rank >= size or local_rank >= local_size or (local_size == size and local_rank != rank):
            raise ConfigError(
                f"{shown}: ranks must be below their sizes, of which the local one is {local_size} "
                f"({names[3]}, or nproc), and the same on one node; correct what sets them"
            )
        if size > 1 and not 0 < port < 65536:
            raise ConfigError(f"{shown}: MASTER_PORT is no port; correct it")
        return cls(rank, size, local_rank, local_size, environ.get("MASTER_ADDR", "127.0.0.1"), port)

    @property
    def nodes(self) -> int:
        """How many nodes take part."""
        return self.world_size // self.local_world_size

    def environment(self) -> dict[str, str]:
        """The same in torch's variables."""
        return dict(zip((*_TORCH, *_MASTER), map(str, vars(self).values())))


class Group(NamedTuple):
    """Variables that say that this process is one of several."""

    shown: str
    """The variables with their values."""
    lives: bool
    """Whether the others are there."""


def find_group(environ: Mapping[str, str], nnodes: int = 1) -> Group | None:
    """The group of processes that a launcher has started this one in; None: nothing says that there is one.

    The launchers of MPI give their variables to what they start, and to nothing else. Those of torch are also left over
    in a shell: they count if they are complete, and a scheduler or a process of another rank is there. Those of srun
    are also in a shell that it has started (``srun --pty``): there has to be another task with the same command line.

    Args:
        environ: the environment.
        nnodes: nodes that the user asks for: as many processes are one agent on each, which is what is wanted.
    """
    for names in _FAMILIES:
        rank, size = (environ.get(name, "") for name in names[:2])
        several = rank.isdigit() and size.isdigit() and int(rank) < int(size) and int(size) not in (1, nnodes)
        if not several:
            continue
        shown = _shown(environ, names)
        if names is _TORCH:
            whole = all(name in environ for name in (names[2], *_MASTER))
            scheduled = any(name in environ for name in _SCHEDULED)
            if whole and (scheduled or _another_runs(environ, names[0], (names[1], *_MASTER))):
                return Group(shown, True)
        elif names is _SRUN:
            lives = _another_runs(environ, names[0], (*_STEP, names[1]), same_command=True)
            if lives:
                time.sleep(_STAYS_S)  # the others, too, have to see this process
            return Group(shown, lives)
        elif names[2] in environ:  # srun may set some of PMI's, not the local rank
            return Group(shown, True)
    return None


def drop_stale_variables(nnodes: int = 1) -> None:
    """Remove variables that an earlier launch left in this process's environment, with a warning.

    Args:
        nnodes: nodes that the user asks for: as many processes may have been started, one on each.

    Raises:
        ConfigError: they are no leftovers: this process is one of several.
    """
    group = find_group(os.environ, nnodes)
    if group is not None and group.lives:
        raise ConfigError(
            f"this process was started as one of several ({group.shown}), and each would be a run of its own in one "
            "folder; launcher=external takes this place; launcher=torchrun nproc=N, started once on each node without "
            "them, starts the processes itself"
        )
    if group is not None:
        console.warn(
            f"{group.shown} tell of several processes, but no other one with this command is seen here: this is a run "
            "of its own; launcher=external makes them one"
        )
    stale = take_stale_variables(os.environ)
    if stale:
        console.warn(f"ignoring {', '.join(stale)} of the shell: exp starts its own workers")


def take_stale_variables(environ: MutableMapping[str, str]) -> list[str]:
    """Remove what an earlier launch left in the environment; returns the names."""
    names = (*_TORCH, *_MASTER, "GROUP_RANK")
    stale = sorted(name for name in environ if name in names or name.startswith("TORCHELASTIC_"))
    for name in stale:
        del environ[name]
    return stale


def be_quiet(arguments: list[str]) -> None:
    """Let one process of each node print: the others would print the same; their logs have their own output.

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


def _another_runs(environ: Mapping[str, str], rank: str, group: Sequence[str], same_command: bool = False) -> bool:
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
            others = [each for each in own if each.startswith(f"{rank}=".encode()) and each != mine]
            if others and same <= own and (not same_command or (entry / "cmdline").read_bytes() == command):
                return True
        except OSError:
            continue  # it has ended, or is somebody else's
    return False


def _shown(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in (*names, *_MASTER) if name in environ)
