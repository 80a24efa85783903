"""The environment variables by which launchers tell a process its rank."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Mapping, Sequence

from exp import console
from exp.errors import ConfigError

__all__ = ["check_stale_environment", "clear_stale_environment", "rank_environment"]

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
_GRACE_S = 5.0


def rank_environment(environ: Mapping[str, str], nproc: int = 1) -> dict[str, str]:
    """Translate the variables of another launcher (torchrun, MPI, srun) into torch's.

    Args:
        environ: the environment.
        nproc: processes per node, used if no variable has it.

    Returns:
        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: a variable is missing, or the variables contradict one another.
    """
    families = [names for names in _FAMILIES if any(name in environ for name in names[:2])]
    if not families:
        raise ConfigError(
            "launcher=external looks for the variables of another launcher, and finds none; use it under torchrun, "
            f"mpirun or srun, or set {', '.join([*_TORCH, *_MASTER])}"
        )
    names = next((names for names in families if all(name in environ for name in names[:3])), families[0])
    needed = [*names[:3], *(_MASTER if environ.get(names[1], "1") != "1" else ())]
    missing = [name for name in needed if name not in environ]
    variables = f"launcher=external: {_format_environment(environ, names)}"
    if missing:
        one = "; one process per node, or pod: LOCAL_RANK=0" if "LOCAL_RANK" in missing else ""
        raise ConfigError(f"{variables}, but {', '.join(missing)} is not set; set it{one}")
    on_nodes = re.sub(r"\(x\d+\)", "", environ.get(names[3], str(nproc))).split(",")  # Slurm's "2(x4),1"
    texts = [*(environ[name] for name in names[:3]), on_nodes[0], environ.get("MASTER_PORT", "0")]
    consistent = len(set(on_nodes)) == 1 and all(text.isdecimal() for text in texts)
    if consistent:
        rank, size, local_rank, local_size, port = map(int, texts)
        below = rank < size and local_rank < local_size and (local_size < size or local_rank == rank)
        consistent = below and size % local_size == 0 and (size == 1 or 0 < port < 65536)
    if not consistent:
        raise ConfigError(
            f"{variables} contradict each other: every node must have the same number of processes ({names[3]}, or "
            f"nproc: {on_nodes[0]}), ranks must be numbers below the world size, on one node rank and local rank must "
            "be equal, and the port must be in 1 to 65535; correct what sets them"
        )
    return dict(zip((*_TORCH, *_MASTER), [*texts[:4], environ.get("MASTER_ADDR", "127.0.0.1"), texts[4]]))


def check_stale_environment(nnodes: int = 1) -> None:
    """Remove variables that an earlier launch left in this process's environment, with a warning.

    MPI launchers set their variables only in the processes that they start. The variables of torch and srun may also
    be left over in a shell (``srun --pty``). They count only if a scheduler has set them, or if a process of another
    rank with the same command line runs on this machine. Variables of srun without such a process cause a warning.

    Args:
        nnodes: nodes that the user asks for. If there are as many processes, they may be one agent per node, and are
            allowed.

    Raises:
        ConfigError: the variables are in use: another launcher has started this process as one of several.
    """
    for names in _FAMILIES:
        rank, size = (os.environ.get(name, "") for name in names[:2])
        is_one_of_several = rank.isdigit() and size.isdigit() and int(rank) < int(size) and int(size) not in (1, nnodes)
        if not is_one_of_several or names[2] not in os.environ:  # srun may set some of PMI's, not the local rank
            continue
        scheduled = names is _TORCH and any(name in os.environ for name in _SCHEDULED)
        variables = _format_environment(os.environ, names)
        if scheduled or names in (_OPEN_MPI, _MPICH) or _sibling_rank_exists(names):
            raise ConfigError(
                f"this process was started as one of several ({variables}), and each would be a run of its own in the "
                "same folder; use launcher=external, which makes them one run, or start launcher=torchrun nproc=N once "
                "on each node, without another launcher"
            )
        if names is _SRUN:
            console.warn(
                f"{variables}: these variables are of several processes, but no other process with this command runs "
                "here, so this is a run of one process; launcher=external makes several processes one run"
            )
    stale = clear_stale_environment()
    if stale:
        console.warn(f"ignoring {', '.join(stale)} from the environment: exp starts its own workers")


def clear_stale_environment() -> list[str]:
    """Remove torch's launch variables from this process's environment; return the removed names."""
    names = (*_TORCH, *_MASTER, "GROUP_RANK")
    stale = sorted(name for name in os.environ if name in names or name.startswith("TORCHELASTIC_"))
    for name in stale:
        del os.environ[name]
    return stale


def _sibling_rank_exists(names: Sequence[str]) -> bool:
    """Whether a process on this machine has the same command line, but another rank.

    Args:
        names: the variables of rank, world size and local rank.
    """
    rank, own_entry = f"{names[0]}=".encode(), f"{names[0]}={os.environ[names[0]]}".encode()
    command = Path("/proc/self/cmdline").read_bytes()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            environ = set((entry / "environ").read_bytes().split(b"\0"))
            others = any(variable.startswith(rank) and variable != own_entry for variable in environ)
            if others and (entry / "cmdline").read_bytes() == command:
                time.sleep(_GRACE_S)  # stay alive until the other processes have seen this one
                return True
    return False


def _format_environment(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in (*names, *_MASTER) if name in environ)
