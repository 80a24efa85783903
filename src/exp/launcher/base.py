"""What launchers share: a rank's place, what became of a launch, and the interface."""

from __future__ import annotations

import abc
import inspect
import os
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Sequence

from exp.config.schema import ExpConfig, LauncherConfig
from exp.config.targets import load_target
from exp.errors import EXIT_OK, ConfigError
from exp.preemption import Notice
from exp.task import task_class

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from torch.distributed import Store

    from exp.frozen import FrozenRun
    from exp.runfolder import RunFolder

__all__ = [
    "REQUEUES_VARIABLE",
    "SCRATCH_VARIABLE",
    "Launcher",
    "Outcome",
    "RankFailure",
    "RankInfo",
    "Watcher",
    "error_record",
    "launcher_class",
    "make_store",
    "this_host",
]

SCRATCH_VARIABLE = "EXP_SCRATCH"
"""Environment variable that tells the workers of one node where the private folder of their job lies."""

REQUEUES_VARIABLE = "EXP_REQUEUES"
"""Environment variable that tells workers how often a scheduler has started their job anew."""


@dataclass(frozen=True)
class RankInfo:
    """One worker's place in the job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    restart_count: int = 0
    single_node: bool = True
    store: str | None = None
    """Path of a file store; None: torch's ``env://``, that is MASTER_ADDR and MASTER_PORT."""
    requeues: int = 0
    """How often a scheduler has started this job anew: it has to go on where it was."""
    notice: Notice = field(default_factory=Notice, compare=False)
    """Tells that the run has to save its state and end."""
    met: list[Store] = field(default_factory=list, compare=False)
    """The store over which the ranks have met already; empty: they have not."""

    @classmethod
    def single(cls) -> RankInfo:
        """The place of a worker that is alone."""
        return cls()

    @classmethod
    def from_agent(cls, environ: Mapping[str, str]) -> RankInfo:
        """The place that torch's elastic agent has written into the environment."""
        restart = int(environ["TORCHELASTIC_RESTART_COUNT"])
        single_node = environ["GROUP_WORLD_SIZE"] == "1"
        # A new file for each attempt: an old one holds the keys of ranks that are dead.
        store = os.path.join(environ[SCRATCH_VARIABLE], f"store-{restart}")  # noqa: PTH118
        return cls(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
            node_rank=int(environ["GROUP_RANK"]),
            restart_count=restart,
            single_node=single_node,
            store=store if single_node else None,
            requeues=int(environ.get(REQUEUES_VARIABLE, 0)),
            notice=Notice(environ[SCRATCH_VARIABLE]),
        )


def make_store(info: RankInfo, timeout: timedelta) -> Store:
    """The store over which the ranks of ``info`` meet.

    Args:
        info: the place of this rank.
        timeout: the longest that a rank waits for another one's key.
    """
    import torch.distributed as dist

    if info.met:
        info.met[0].set_timeout(timeout)
        return info.met[0]
    if info.store is not None:
        # Files instead of TCP: torch's TCP store listens on every interface of the machine.
        store = dist.FileStore(info.store, info.world_size)
        store.set_timeout(timeout)
        return store
    tcp_store: Store = next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))[0]
    return tcp_store


@dataclass
class RankFailure:
    """How one rank ended."""

    rank: int
    local_rank: int
    host: str
    type: str
    message: str
    exit_code: int
    """As a process has it: negative for a signal."""
    time: float
    """Seconds since the epoch."""
    log: str
    """Path of the rank's log."""
    restart: int = 0
    """The attempt that it belongs to."""
    pid: int | None = None
    of_peer: bool = False
    """It lost another rank, or waited for one in vain: that one is the cause."""


def error_record(
    rank: int,
    local_rank: int,
    pid: int,
    kind: str,
    message: str,
    exit_code: int,
    restart: int = 0,
    of_peer: bool = False,
) -> dict[str, Any]:
    """What an error file holds: a :class:`RankFailure` of this host and this moment, less the log.

    Args:
        rank: of the process that failed, as are ``local_rank`` and ``pid``.
        local_rank: on its node.
        pid: its process id.
        kind: the class of the error.
        message: what is wrong, in its first line.
        exit_code: as a process has it: negative for a signal.
        restart: the attempt that it belongs to.
        of_peer: it lost another rank, which is the cause.
    """
    return {
        "rank": rank, "local_rank": local_rank, "host": this_host(), "type": kind, "message": message,
        "exit_code": exit_code, "time": time.time(), "pid": pid, "restart": restart, "of_peer": of_peer,
    }  # fmt: skip


@dataclass
class Outcome:
    """What became of a launch."""

    exit_code: int = EXIT_OK
    """For the command line."""
    restarts: int = 0
    failures: list[RankFailure] = field(default_factory=list)
    """The first to fail comes first."""
    interrupted_by: str | None = None
    """Name of the signal that ended it."""
    preempted: dict[str, Any] | None = None
    """It ended on notice: ``step`` after which its state is saved, null where there is nothing to save; and, from
    torchrun, ``signals``: what gave notice on this node."""
    reported: bool = False
    """What there is to say of it has been printed, and written, where it ran."""
    recorded: bool = False
    """``result.json`` is as it has to be: it was written, or left alone, where the run was."""
    left: bool = False
    """It has not ended, but nobody here waits for it any longer."""
    begun: bool = True
    """False: the sweep that it is part of was interrupted before."""
    detail: str | None = None
    """What the agent itself complained of."""
    unkillable: list[int] = field(default_factory=list)
    """Processes that did not die."""


class Watcher(abc.ABC):
    """Is told what becomes of runs that are not in this process."""

    @abc.abstractmethod
    def say(self, text: str) -> None:
        """Something that the user is to read."""

    @abc.abstractmethod
    def state(self, number: int, text: str) -> None:
        """How a run is doing; called often."""

    @abc.abstractmethod
    def ended(self, number: int, outcome: Outcome) -> None:
        """A run has ended."""


class Launcher(abc.ABC):
    """Starts the workers of a run and waits for them.

    Attributes:
        keys: typed keys of the configuration: a dataclass that inherits
            :class:`exp.config.schema.LauncherConfig`; they are the constructor's arguments.
        submits: whether it hands runs to a scheduler, as jobs that may outlive this process, and takes the batch of a
            sweep at once (:meth:`launch_all`).
        joins: whether this process is one of a group that something outside has started: the variables that tell its
            place in it count.

    Args:
        nnodes: nodes that take part.
        rdzv_endpoint: ``host:port`` where agents of several nodes meet.
        rdzv_id: tells jobs at one endpoint apart.
        max_restarts: how often all workers are started again.
        fork: whether workers may be forked from one process that has imported everything.
        timeout_s: seconds to wait for other nodes and for collectives.
        step_timeout_s: seconds that all ranks may stand still within training or evaluation; None: from the slowest so
            far, at least a minute; 0: any time.
        worker: module that a worker process runs.
    """

    keys: ClassVar[type] = LauncherConfig
    submits: ClassVar[bool] = False
    joins: ClassVar[bool] = False

    def __init__(
        self,
        nnodes: int = 1,
        rdzv_endpoint: str | None = None,
        rdzv_id: str = "exp",
        max_restarts: int = 0,
        fork: bool = True,
        timeout_s: int = 1800,
        step_timeout_s: float | None = None,
        worker: str = "exp.worker",
    ) -> None:
        self.nnodes = nnodes
        self.rdzv_endpoint = rdzv_endpoint
        self.rdzv_id = rdzv_id
        self.max_restarts = max_restarts
        self.fork = fork
        self.timeout_s = timeout_s
        self.step_timeout_s = step_timeout_s
        self.worker = worker
        if step_timeout_s is not None and step_timeout_s < 0:
            raise ConfigError(f"launcher.step_timeout_s={step_timeout_s} must be positive, 0 (never) or null")
        if nnodes > 1 and not rdzv_endpoint:
            raise ConfigError(
                f"launcher.nnodes={nnodes} needs a meeting point; set launcher.rdzv_endpoint=<host of one node>:<port>"
            )

    @classmethod
    def is_elsewhere(cls, config: Any) -> bool:
        """Whether runs take place on other machines, whose hardware this one cannot tell.

        Args:
            config: ``config.launcher``, with the fields of ``keys``.
        """
        del config
        return False

    @classmethod
    def take_place(cls, config: ExpConfig, overrides: Sequence[str]) -> None:
        """Where it ``joins``: set ``nproc`` and ``launcher.nnodes`` to what is there, first of all.

        Args:
            config: the whole configuration, as composed; may be changed.
            overrides: the user's.

        Raises:
            ConfigError: there is no place to take, or the user has asked for another number of processes.
        """

    @property
    def leads(self) -> bool:
        """Whether this process writes the run folder and tells the outcome; one that does not has ``take_part``."""
        return True

    def take_part(self, run: FrozenRun) -> int:
        """Run this process's share of a run that another process leads; returns the exit code."""
        raise NotImplementedError

    def check(self, nproc: int) -> None:
        """Refuse what this launcher cannot do, before anything is written.

        Raises:
            ConfigError: it cannot start ``nproc`` workers as configured.
        """

    def preflight(self, runs: Sequence[FrozenRun], logs: Path) -> str | None:
        """Have the scheduler look at a request, before anything is written.

        Args:
            runs: to be submitted together.
            logs: where the scheduler would write to.

        Returns:
            What would be handed to it, where the configuration asks for no more than that; None: go on.

        Raises:
            ConfigError: it would refuse the request.
        """

    def job_token(self) -> str | None:
        """What all processes of a job that start it together, in one run folder, know it by; None: there is one."""
        return None

    def launch_run(self, run: FrozenRun) -> Outcome:
        """:meth:`launch` what has been written."""
        return self.launch(run.folder, run.config.nproc, saves=task_class(run.config).saves_state)

    def launch_all(self, runs: Sequence[FrozenRun], watcher: Watcher, logs: Path) -> list[Outcome]:
        """Where it ``submits``: runs that have been written, as one batch, to their ends.

        Args:
            runs: all ask for the same of the scheduler.
            watcher: is told what becomes of each.
            logs: where the scheduler writes to.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def launch(self, folder: RunFolder, nproc: int, saves: bool = True) -> Outcome:
        """Run ``config.yaml`` of ``folder`` in ``nproc`` workers on this node, to the end.

        Args:
            folder: the run folder.
            nproc: workers.
            saves: whether the task can save its state when it has to end.
        """


def launcher_class(config: ExpConfig) -> type[Launcher]:
    """The class that ``config.launcher`` names; for ``auto``, which is not decided yet, the base class.

    Raises:
        ConfigError: there is none, or it is no launcher.
        UnavailableError: its module does not import.
    """
    target = str(config.launcher["_target_"])
    if target == "auto":
        return Launcher
    cls = load_target("launcher._target_", target)
    if not (inspect.isclass(cls) and issubclass(cls, Launcher)):
        raise ConfigError(f"launcher._target_={target} is no subclass of exp.launcher.Launcher")
    return cls


def this_host() -> str:
    """This machine's name."""
    return socket.gethostname()
