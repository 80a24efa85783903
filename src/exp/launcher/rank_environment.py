"""Variables of other launchers: the place that they give this process, or what they have left over in a shell."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, MutableMapping, Sequence

from exp import console
from exp.errors import ConfigError

__all__ = ["RankEnvironment", "be_quiet", "drop_stale_variables", "find_group", "take_stale_variables"]

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
        even = len(set(on_nodes)) == 1 and local_size > 0 and size % local_size == 0
        below = rank < size and local_rank < local_size and (local_size < size or local_rank == rank)
        if not even or not below or (size > 1 and not 0 < port < 65536):
            raise ConfigError(
                f"{shown} do not go together: every node must have as many processes ({names[3]}, or nproc: "
                f"{local_size}), ranks must be below their sizes, the two the same on one node, and the port in 1 to "
                "65535; correct what sets them"
            )
        return cls(rank, size, local_rank, local_size, environ.get("MASTER_ADDR", "127.0.0.1"), port)

    @property
    def nodes(self) -> int:
        """How many nodes take part."""
        return self.world_size // self.local_world_size

    def environment(self) -> dict[str, str]:
        """The same in torch's variables."""
        return dict(zip((*_TORCH, *_MASTER), map(str, vars(self).values())))


def find_group(environ: Mapping[str, str], nnodes: int = 1) -> tuple[str, bool] | None:
    """The group of processes that a launcher has started this one in; None: nothing says that there is one.

    The launchers of MPI give their variables to what they start, and to nothing else. Those of torch and srun are also
    left over in a shell (``srun --pty``): they count where a scheduler, or a process of another rank with the same
    command line, is there. A step of srun's where neither is seen is worth a warning.

    Args:
        environ: the environment.
        nnodes: nodes that the user asks for: as many processes are one agent on each, which is what is wanted.

    Returns:
        The variables with their values, and whether the others are there.
    """
    for names in _FAMILIES:
        rank, size = (environ.get(name, "") for name in names[:2])
        several = rank.isdigit() and size.isdigit() and int(rank) < int(size) and int(size) not in (1, nnodes)
        # srun may set some of PMI's, not the local rank.
        if not several or any(name not in environ for name in (names[2], *(_MASTER if names is _TORCH else ()))):
            continue
        scheduled = names is _TORCH and any(name in environ for name in _SCHEDULED)
        lives = scheduled or names in (_OPEN_MPI, _MPICH) or _another_runs(environ, names)
        if lives or names is _SRUN:
            return _shown(environ, names), lives
    return None


def drop_stale_variables(nnodes: int = 1) -> None:
    """Remove variables that an earlier launch left in this process's environment, with a warning.

    Args:
        nnodes: nodes that the user asks for: as many processes may have been started, one on each.

    Raises:
        ConfigError: they are no leftovers: this process is one of several.
    """
    shown, lives = find_group(os.environ, nnodes) or ("", False)
    if lives:
        raise ConfigError(
            f"this process was started as one of several ({shown}), and each would be a run of its own in one "
            "folder; launcher=external takes this place; launcher=torchrun nproc=N, started once on each node without "
            "them, starts the processes itself"
        )
    if shown:
        console.warn(
            f"{shown} tell of several processes, but no other one with this command is seen here: this is a run "
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


def _another_runs(environ: Mapping[str, str], names: Sequence[str]) -> bool:
    """Whether a process on this machine has the same command line, and another rank of the same group.

    Args:
        environ: the environment.
        names: the variables of rank, world size and local rank.
    """
    group = {f"{name}={environ[name]}".encode() for name in (names[1], *_MASTER, *_STEP) if name in environ}
    rank, mine = f"{names[0]}=".encode(), f"{names[0]}={environ[names[0]]}".encode()
    command = Path("/proc/self/cmdline").read_bytes()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            own = set((entry / "environ").read_bytes().split(b"\0"))
            others = any(each.startswith(rank) and each != mine for each in own)
            if others and group <= own and (entry / "cmdline").read_bytes() == command:
                time.sleep(_STAYS_S)  # the others, too, have to see this process
                return True
    return False


def _shown(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in (*names, *_MASTER) if name in environ)
