"""The launcher interface: how workers are started, what came of it, and how that is reported.

The parent process does not import torch.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Sequence

from omegaconf import OmegaConf

from exp import console
from exp.config.resolve import create
from exp.config.resolve import resolve as resolve_name
from exp.config.schema import ExpConfig, LauncherConfig
from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_UNAVAILABLE, REFUSAL_CODES, ConfigError
from exp.runs.failures import AGENT_LOST, RankFailure
from exp.runs.files import read_json
from exp.runs.signals import PREEMPT_SIGNAL, signal_name

if TYPE_CHECKING:
    from exp.frozen import FrozenRun
    from exp.launcher.follow import Watcher
    from exp.runs.folder import RunFolder

__all__ = [
    "Launcher", "Outcome", "describe_failure", "drop_stale_variables", "launcher_class", "outcome_file", "place_of",
    "resolve", "tail_of", "take_stale_variables",
]  # fmt: skip

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
_STAYS_S = 5.0
_LOCAL = "exp.launcher.local.LocalLauncher"
_TORCHRUN = "exp.launcher.torchrun.TorchrunLauncher"


@dataclass
class Outcome:
    """The outcome of a launch.

    Attributes:
        exit_code: of the command.
        failures: the first to fail comes first.
        interrupted_by: name of the signal that ended the run.
        preempted: if the run was preempted: ``step``, the optimizer step of the saved state (null: nothing to save),
            and, under torchrun, ``signals``, the names of the signals that this node received.
        reported: whether the process that ran the run has printed and recorded the outcome.
        recorded: whether ``result.json`` is final: the process that ran the run has written it, or left it on purpose.
        left: whether the run still goes on, without anybody waiting for it here.
        detail: what went wrong, if it was not the failure of a rank.
        unkillable: ids of processes that survived SIGKILL.
    """

    exit_code: int = EXIT_OK
    restarts: int = 0
    failures: list[RankFailure] = field(default_factory=list)
    interrupted_by: str | None = None
    preempted: dict[str, Any] | None = None
    reported: bool = False
    recorded: bool = False
    left: bool = False
    detail: str | None = None
    unkillable: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, failures: list[RankFailure], detail: str | None = None) -> Outcome:
        """The outcome of a failed launch. Its exit code is that of exp's own errors, otherwise 1."""
        own = failures[0].exit_code if failures and failures[0].is_exp_error else EXIT_FAILED
        return cls(own, failures=failures, detail=detail)

    @classmethod
    def of_signal(cls, number: int, saves: bool) -> Outcome:
        """The outcome of a launch that a signal has ended.

        Args:
            number: of the signal. Preemption ends a launch only if there is no state to save, or if it was repeated.
            saves: whether there is a state to save.
        """
        if number == PREEMPT_SIGNAL and not saves:
            return cls(EXIT_PREEMPTED, preempted={"step": None})
        return cls(128 + number, interrupted_by=signal_name(number))

    @classmethod
    def read(cls, path: Path) -> Outcome | None:
        """The outcome that a job has written to a file; None if there is no file."""
        content = read_json(path)
        if content is None:
            return None
        content["failures"] = [RankFailure(**failure) for failure in content["failures"]]
        return cls(**content)


def outcome_file(folder: RunFolder, job: str) -> Path:
    """File for the :class:`Outcome` of a job, which the job writes: on Slurm, its first node.

    Args:
        folder: the run folder.
        job: Slurm's job id; of a job on this machine, the process id.
    """
    return folder.logs / f"outcome-{job}.json"


class Launcher(abc.ABC):
    """Starts the workers of a run and waits for them.

    Attributes:
        keys: typed keys of the configuration: a dataclass that inherits
            :class:`exp.config.schema.LauncherConfig`; they are the constructor's arguments.
        joins: whether another launcher has started this process as one rank of the job; the environment variables of
            that launcher then decide rank and world size.
        leads: whether this process writes the run folder and reports the outcome.
    """

    keys: ClassVar[type] = LauncherConfig
    joins: ClassVar[bool] = False
    leads: bool = True

    def __init__(self, **settings: Any) -> None:
        """Store the keys of ``config.launcher`` in ``self.config``, an object of the class ``keys``."""
        self.config: Any = self.keys(**settings)

    @classmethod
    def is_elsewhere(cls, config: Any) -> bool:
        """Whether runs with this ``config.launcher`` are jobs on other machines, which may have other hardware.

        Such a launcher takes a whole batch of a sweep at once (:meth:`launch_all`).
        """
        del config
        return False

    @classmethod
    def take_place(cls, config: ExpConfig, overrides: Sequence[str]) -> None:
        """Check the variables of other launchers, and remove stale ones (:func:`drop_stale_variables`).

        A class that ``joins`` instead sets ``nproc`` and ``launcher.nnodes`` of ``config`` as the variables say.

        Raises:
            ConfigError: another launcher has started this process, too; or, if the class ``joins``, this process has no
                rank, or the user's overrides ask for another number of processes.
        """
        del overrides
        drop_stale_variables(config.launcher.nnodes)

    def check(self, nproc: int) -> None:
        """Check that this launcher can do what is configured, before anything is written.

        Raises:
            ConfigError: it cannot start ``nproc`` workers as configured.
        """

    def preflight(self, runs: Sequence[FrozenRun], logs: Path) -> str | None:
        """Have the scheduler check the request for these runs, before anything is written.

        Args:
            runs: all runs of the request.
            logs: folder for the output of the jobs.

        Returns:
            The batch script, if the configuration asks only for that (a dry run); otherwise None.

        Raises:
            ConfigError: the scheduler would refuse the request.
        """

    def job_token(self) -> str | None:
        """Name of the job, equal in all processes that start it together in one run folder; None: only one starts it.

        The processes share the lock of the run folder by this name.
        """
        return None

    def launch_all(self, runs: Sequence[FrozenRun], watcher: Watcher, logs: Path) -> list[Outcome]:
        """If runs are elsewhere: submit them as one batch, and wait until all have ended.

        Args:
            runs: their run folders are written; all ask for the same resources.
            watcher: receives progress and outcomes.
            logs: folder for the output of the jobs.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def launch(self, run: FrozenRun) -> Outcome:
        """Start ``run.config.nproc`` workers on this node and wait for their end; the run folder is written already."""


def launcher_class(config: ExpConfig) -> type[Launcher]:
    """The class that ``config.launcher`` names; for ``auto``, which is decided later, the base class.

    Raises:
        ConfigError: there is no such class, or it is not a launcher.
        UnavailableError: its module cannot be imported.
    """
    target = str(config.launcher["_target_"])
    if target == "auto":
        return Launcher
    cls: type[Launcher] = resolve_name("launcher._target_", target, Launcher)
    return cls


def resolve(config: LauncherConfig, nproc: int) -> Launcher:
    """The launcher of ``config``; ``auto`` is local for one process that never restarts, torchrun otherwise.

    Args:
        config: ``config.launcher``.
        nproc: workers per node.

    Raises:
        ConfigError: the launcher cannot do what is configured.
    """
    settings: Any = OmegaConf.to_container(config, resolve=True)
    if settings["_target_"] == "auto":
        alone = nproc == 1 and settings["nnodes"] == 1 and settings["max_restarts"] == 0
        settings["_target_"] = _LOCAL if alone else _TORCHRUN
    if settings["in_process"] and settings["_target_"] != _LOCAL:
        raise ConfigError("launcher.in_process=true is for one process of launcher=local; leave it out, or set nproc=1")
    launcher: Launcher = create(settings, Launcher, "launcher")
    launcher.check(nproc)
    return launcher


def describe_failure(outcome: Outcome, folder: RunFolder) -> str:
    """Text for the user: the first failing rank and its error on the first line, details below."""
    lines: list[str] = []
    if outcome.interrupted_by is not None:
        lines.append(f"interrupted by {outcome.interrupted_by}")
    elif outcome.failures:
        first, others = outcome.failures[0], outcome.failures[1:]
        log = folder.log_file(first.rank)
        head, *details = first.message.splitlines() or [""]
        named = (
            first.is_exp_error
            or first.type == "SystemExit"
            or f"{first.type}: " in head
            or head.startswith("killed by")
        )
        kind = "" if named else f"{first.type}: "
        who = f"rank {first.rank} (local_rank {first.local_rank}, {first.host}) failed: {kind}"
        lines += [("" if first.type == AGENT_LOST else who) + head, *details]
        if others and first.type != AGENT_LOST:
            lines.append(f"  failed after it: {', '.join(f'rank {failure.rank}' for failure in others)}")
        if outcome.exit_code == EXIT_UNAVAILABLE:
            lines += tail_of(log)[1:]  # the log itself is removed with the run folder
        elif log.is_file() and outcome.exit_code not in REFUSAL_CODES:
            lines.append(f"  log: {log}")
    else:
        detail = outcome.detail or "no rank left an error"
        lines.append(detail if outcome.reported else f"the run ended without a result: {detail}")
    if outcome.unkillable:
        lines.append(f"  still running, stuck in the kernel: {', '.join(map(str, outcome.unkillable))}")
    return "\n".join(lines)


def tail_of(log: Path, lines: int = 12) -> list[str]:
    """The path and the last lines of a log, for an error's details.

    Args:
        log: the file; it may be missing.
        lines: maximum number of lines; empty lines are left out.
    """
    if not log.is_file():
        return [f"  there is no log at {log}"]
    written = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return [f"  log: {log}", *(f"  | {line}" for line in written[-lines:])]


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
    if not given:
        raise ConfigError(
            "launcher=external looks for the variables of another launcher, and finds none; use it under torchrun, "
            f"mpirun or srun, or set {', '.join([*_TORCH, *_MASTER])}"
        )
    names = next((names for names in given if all(name in environ for name in names[:3])), given[0])
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
        below = rank < size and local_rank < local_size and (local_size < size or local_rank == rank)
        sound = below and size % local_size == 0 and (size == 1 or 0 < port < 65536)
    if not sound:
        raise ConfigError(
            f"{shown} contradict each other: every node must have the same number of processes ({names[3]}, or nproc: "
            f"{on_nodes[0]}), ranks must be numbers below the world size, on one node rank and local rank must be "
            "equal, and the port must be in 1 to 65535; correct what sets them"
        )
    return dict(zip((*_TORCH, *_MASTER), [*texts[:4], environ.get("MASTER_ADDR", "127.0.0.1"), texts[4]]))


def drop_stale_variables(nnodes: int = 1) -> None:
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
        several = rank.isdigit() and size.isdigit() and int(rank) < int(size) and int(size) not in (1, nnodes)
        if not several or names[2] not in os.environ:  # srun may set some of PMI's, not the local rank
            continue
        shown, scheduled = _shown(os.environ, names), names is _TORCH and any(name in os.environ for name in _SCHEDULED)
        if scheduled or names in (_OPEN_MPI, _MPICH) or _another_runs(names):
            raise ConfigError(
                f"this process was started as one of several ({shown}), and each would be a run of its own in the same "
                "folder; use launcher=external, which makes them one run, or start launcher=torchrun nproc=N once on "
                "each node, without another launcher"
            )
        if names is _SRUN:
            console.warn(
                f"{shown}: these variables are of several processes, but no other process with this command runs here, "
                "so this is a run of one process; launcher=external makes several processes one run"
            )
    stale = take_stale_variables()
    if stale:
        console.warn(f"ignoring {', '.join(stale)} from the environment: exp starts its own workers")


def take_stale_variables() -> list[str]:
    """Remove torch's launch variables from this process's environment; return the removed names."""
    names = (*_TORCH, *_MASTER, "GROUP_RANK")
    stale = sorted(name for name in os.environ if name in names or name.startswith("TORCHELASTIC_"))
    for name in stale:
        del os.environ[name]
    return stale


def _another_runs(names: Sequence[str]) -> bool:
    """Whether a process on this machine has the same command line, but another rank.

    Args:
        names: the variables of rank, world size and local rank.
    """
    rank, mine = f"{names[0]}=".encode(), f"{names[0]}={os.environ[names[0]]}".encode()
    command = Path("/proc/self/cmdline").read_bytes()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            own = set((entry / "environ").read_bytes().split(b"\0"))
            others = any(each.startswith(rank) and each != mine for each in own)
            if others and (entry / "cmdline").read_bytes() == command:
                time.sleep(_STAYS_S)  # stay alive until the other processes have seen this one
                return True
    return False


def _shown(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in (*names, *_MASTER) if name in environ)
