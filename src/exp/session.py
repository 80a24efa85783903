"""One worker's part of a run: log, environment, device, process group and seeds; then the task; then the clean-up.

Torch is imported only after the backend has set the environment, because device libraries read it while they load.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import socket
import sys
import time
import traceback
import uuid
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

from exp import trackers
from exp.config.compose import load
from exp.config.resolve import allow
from exp.config.schema import ExpConfig
from exp.console import make_console
from exp.errors import (
    EXIT_FAILED,
    ConfigError,
    Preempted,
    as_exp_error,
    error_message,
    format_user_error,
    user_location,
)
from exp.hardware.backend import PRECISIONS, usable_cores
from exp.hardware.cards import check_distinct
from exp.hardware.environment import describe_environment
from exp.hardware.registry import create_backend
from exp.runs.failures import Failures, RankFailure
from exp.runs.files import write_json
from exp.runs.scratch import SCRATCH_VARIABLE
from exp.task import call, create_task

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import nn
    from torch.distributed import Store

    from exp.config.differences import Change
    from exp.data.base import Extras
    from exp.data.places import Fingerprint
    from exp.distributed import Distributed
    from exp.engine.building import Weights
    from exp.hardware.backend import Backend
    from exp.runs.folder import RunFolder
    from exp.trackers import Reporter

__all__ = ["RankInfo", "Session", "describe_error", "is_of_peer", "make_store", "reporting", "run"]

logger = logging.getLogger(__name__)

_TRACKERS_AFTER_FAILURE_S = 2.0  # less than the launcher waits for ranks after one has failed
_STDERR = 2  # file descriptor
_EXCHANGE = ("/torch/autograd/", "/torch/nn/parallel/", "/mmengine/model/wrappers/", "/exp/distributed.py")
"""Source files that wait for other ranks in native code."""
_CONNECTION = (
    "closed by peer", "reset by peer", "broken pipe", "socket closed", "connection refused", "connectfullmesh",
    "remote process", "timed out", "timeout", "/gloo/",
)  # fmt: skip


@dataclass
class RankInfo:
    """Rank, world size and the like of one worker; the defaults are those of a single worker.

    Attributes:
        restart_count: how often the worker or its job has been restarted; if not 0, the run resumes.
        store: path of a file store; None: torch's ``env://``, that is MASTER_ADDR and MASTER_PORT.
        preempted: whether the run has to save its state and end.
        met: the store that the ranks use already; empty: there is none yet.
        at_end: called last in a worker process, which then exits without the interpreter's clean-up.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
    store: str | None = None
    preempted: Callable[[], bool] = field(default=lambda: False, compare=False)
    met: list[Store] = field(default_factory=list, compare=False)
    at_end: list[Callable[[], object]] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, environ: Mapping[str, str], **others: Any) -> RankInfo:
        """Take rank, world size and their local counterparts from torch's variables; ``others``: further attributes."""
        place: Any = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        return cls(*place, **others)

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
        return max(1, usable_cores() // self.local_world_size)


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
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        tcp_store = serving_store(*master, timeout, info.world_size)
    return tcp_store or next(dist.rendezvous("env://", info.rank, info.world_size, timeout=timeout))[0]


class Session:
    """The context of a task on one rank.

    Attributes:
        config: the frozen configuration (:class:`exp.config.schema.ExpConfig`).
        folder: the run folder.
        info: rank, world size and the like of this worker.
        backend: the hardware family.
        device: this rank's device.
        distributed: collectives.
        store: of the ranks; None if there is only one.
        console: the terminal on rank 0, None elsewhere.
        devices: description of the device of each rank, by rank.
        portable_operators: ATen names of the operators for which this device uses portable kernels.
        started: ``time.time()`` when this worker began.
        weights: of ``init_from``, once they have been read.
        data_state: state of the data for checkpoints (:meth:`exp.data.base.Data.state_dict`); None: no state.
        data_files: fingerprint of the data files, for checkpoints (:mod:`exp.data.places`); on rank 0 of a
            training.
        extras: functions with which the data extend the run (:class:`exp.data.base.Extras`).
        resumed_from: the checkpoint from which a training resumed; None: it started from the beginning.
        changed: settings in which a resumed training differs from the earlier run.
        pending: whether the folder still has the records of an earlier run, which :meth:`begin` replaces.
        warnings: what :meth:`warn` has printed, for ``result.json``.
        begun: whether the run has started (:meth:`begin`).
        reporters: connections to the trackers, on rank 0, once the run has begun.
        run_id: of the run whose folder this is, on rank 0; ``env.json``, ``result.json`` and checkpoints have it.
        unique_name: name that differs from those of other runs of the same process.
    """

    def __init__(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        self.config = config
        self.folder = folder
        self.info = info
        self.backend = backend
        self.started = time.time()
        self.run_id = uuid.uuid4().hex
        self.unique_name = f"{config.name}-{self.run_id[:8]}"
        self.console: Console | None = None
        self.device: torch.device
        self.distributed: Distributed
        self.store: Store | None = None
        self.devices: list[dict[str, Any]] = []
        self.portable_operators: frozenset[str] = frozenset()
        self.weights: Weights | None = None
        self.data_state: dict[str, Any] | None = None
        self.data_files: Fingerprint | None = None
        self.extras: Extras
        self.resumed_from: Path | None = None
        self.changed: Sequence[Change] = ()
        self.pending = folder.pending
        self.reporters: list[Reporter] = []
        self.warnings: list[str] = []
        self.begun = False
        self._when_started: list[Callable[[], object]] = []
        self._when_built: list[Callable[[nn.Module], object]] = []

    def open(self) -> None:
        """Select the device, join the process group, set the seeds, and log the device of each rank.

        Raises:
            ConfigError: the device does not support the precision, or ``compile=true`` does not work on it.
            RunError: two ranks share a card.
        """
        from exp.distributed import Distributed, check_compilation, seed_everything, settle_kernels

        info, config, backend = self.info, self.config, self.backend
        self.device = backend.set_device(info.local_rank)
        if not backend.supports(config.precision):
            raise ConfigError(
                f"precision={config.precision} is not supported by {backend.name} ({self.device}); "
                f"use one of {', '.join(p for p in PRECISIONS if backend.supports(p))}"
            )
        backend.set_precision(config.precision)
        self.portable_operators = settle_kernels(backend, self.device, config.precision)
        if config.compile:
            check_compilation(backend, self.device)
        if info.world_size > 1:
            timeout = timedelta(seconds=config.launcher.timeout_s)
            self.store = make_store(info, timeout)
            self.distributed = Distributed.create(backend, self.store, info.rank, info.world_size, timeout)
        else:
            self.distributed = Distributed()
        seed_everything(config.seed, backend)
        if info.rank == 0:
            self.console = make_console()
        self._announce()

    def _announce(self) -> None:
        """Log rank, device and host; rank 0 prints them for all ranks. Refuse ranks that share a card."""
        info = self.info
        about = {**self.backend.describe(self.device), "host": socket.gethostname(), "local_rank": info.local_rank}
        self.devices = self.distributed.gather({**about, "device": str(self.device)})
        lines = [
            f"rank {rank}/{info.world_size}  local_rank {device['local_rank']}  {device['device']}  "
            f"{self.distributed.process_group}  {device['host']}"
            for rank, device in enumerate(self.devices)
        ]
        logger.info(lines[info.rank])
        cautions = [*self.backend.cautions()]
        if self.distributed.fallback is not None:
            text = (
                "FALLBACK on every rank: {used} instead of {wanted}, because {reason}; this is slow, and counted as "
                "staged_bytes_per_step in metrics.jsonl"
            )
            cautions.insert(0, text.format(**self.distributed.fallback))
        for caution in cautions:
            logger.warning("%s", caution)  # on every rank, since nodes may have different variables
        if self.console is not None:
            for line in lines:
                self.console.print(line, highlight=False, soft_wrap=True)
            for caution in cautions:
                self.console.print(f"warning: {caution}", highlight=False, style="yellow", soft_wrap=True)
        if self.backend.exclusive_devices:
            check_distinct(self.devices)

    def say(self, text: str) -> None:
        """Print a line on rank 0's terminal, and write it to the log of every rank that calls this method."""
        logger.info(text)
        if self.console is not None:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def warn(self, *texts: str) -> None:
        """Print warnings like :meth:`say`, and record them in ``result.json``."""
        for text in texts:
            self.say(f"warning: {text}")
            self.warnings.append(text)

    def when_started(self, action: Callable[[], object]) -> None:
        """Register an action for :meth:`begin` on rank 0, for changes to files that an earlier attempt has left."""
        self._when_started.append(action)

    def when_built(self, action: Callable[[nn.Module], object]) -> None:
        """Register an action that every rank runs when the model is built, before any sample is loaded.

        Args:
            action: takes the model: not wrapped, on the CPU, with the weights of ``init_from``.
        """
        self._when_built.append(action)

    def built(self, model: nn.Module) -> None:
        """Run the actions registered with :meth:`when_built`."""
        while self._when_built:
            self._when_built.pop(0)(model)

    def begin(self) -> None:
        """Start the run: replace the records of an earlier run in the folder, run registered actions, open trackers.

        Called by every rank at the same point: after the first training step, or before the first evaluation. Until
        then the records of an earlier run are unchanged. Calls after the first do nothing.
        """
        if self.begun:
            return
        self.begun = True
        if self.pending:
            self.distributed.barrier()
        if self.info.rank == 0:
            self.folder.begin(self.config.overwrite)
            for action in self._when_started:
                action()
            self.reporters = trackers.start(self.config.logger, self.folder, self.say)
        self.forget()
        if self.pending:
            self.distributed.barrier()
        self.pending = False

    def close_reporters(self, status: str, result: Mapping[str, Any], patience_s: float) -> None:
        """Report the end of the run to the trackers, and print the run's address at each tracker."""
        for reporter in self.reporters:
            if reporter.close(status, result, patience_s) and status == "completed" and reporter.state["address"]:
                self.say(f"{reporter.name}: {reporter.state['address']}")
        self.reporters = []

    def forget(self) -> None:
        """Drop the actions registered with :meth:`when_started`; they keep the runner and the wrapped model alive."""
        self._when_started.clear()

    def close(self) -> None:
        """Wait for all ranks to have done their work. The process group is destroyed last, once the result is written.

        Objects that hold a DDP reducer are released first: a reducer that outlives the group can hang at exit, since
        its destructor joins the group's threads while it holds the interpreter lock.
        """
        gc.collect()
        if self.info.world_size > 1:
            self.distributed.barrier()
            self.info.at_end.insert(0, self.backend.collectives.destroy)


def run(folder: RunFolder, info: RankInfo) -> None:
    """Run this rank's part of the run in ``folder``.

    Args:
        folder: the run folder, with the frozen configuration.
        info: of this rank.

    Raises:
        ExpError: the run failed; the launcher turns the error into the run's result and exit code.
    """
    config = load(folder.in_use(folder.config))
    allow(config.plugins)  # the command that wrote the file has checked all names in it
    backend = create_backend(config.backend)
    info.at_end.append(backend.close)
    task = create_task(config)
    environment = backend.worker_env(info.local_rank, info.local_world_size, single_node=info.single_node)
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    os.environ.update(backend.run_env(config.precision, task.counts_fallbacks))
    if task.diagnoses:  # such a task opens the session step by step, and continues if a step fails
        call(task.work, config, folder, info, backend)
        return
    session = Session(config, folder, info, backend)
    try:
        gc.disable()  # imports of torch and MMEngine make a million objects; collecting them costs a fifth more time
        session.open()
        from exp.engine.building import import_plugins  # MMEngine's, and so torch

        import_plugins(config.plugins)
        if info.rank == 0:
            records = folder.start if session.pending else folder.path
            # A training that is continued in its folder is the same run; with overwrite=true it is another.
            earlier = None if session.pending and config.overwrite else folder.run_id()
            session.run_id = earlier or session.run_id
            environment = {**describe_environment(backend, session.devices), "run_id": session.run_id}
            write_json(records / folder.env.name, environment)
        # torch's losses broadcast (64, 1) against (64,) to 64 x 64 differences; such a loss is always wrong.
        warnings.filterwarnings("error", message="Using a target size")
        if task.work:
            importlib.import_module(task.work.rpartition(".")[0])
        gc.freeze()
        gc.enable()
        result = task.run(session)
        session.begin()  # does nothing if the task has called it
    except BaseException as error:
        session.forget()
        status = "preempted" if isinstance(error, Preempted) else "failed"
        session.close_reporters(status, {"error": {"message": str(error)}}, _TRACKERS_AFTER_FAILURE_S)
        raise
    session.close()
    if info.rank == 0:
        folder.check_there()
        folder.write_result(result)
        session.close_reporters("completed", result, config.logger.patience_s)


@contextlib.contextmanager
def reporting(folder: RunFolder, info: RankInfo, redirect: bool) -> Iterator[None]:
    """Context in which a rank runs: log records go to the rank's log, an error to the log and the error file.

    Args:
        folder: the run folder.
        info: of this rank.
        redirect: send stderr and stdout to the log of the rank, except what Python prints to stdout on rank 0, which
            goes to the terminal.

    Raises:
        Exception: the error of the run, unchanged; ``SystemExit`` counts as a failure, too.
    """
    log, process = folder.log_file(info.rank), os.getpid()
    handler: logging.Handler = logging.NullHandler()
    try:
        folder.error_file(info.rank).unlink(missing_ok=True)
        if redirect:
            _redirect(log, keep_stdout=info.rank == 0)
        logging.raiseExceptions = False  # on a full disk the run itself raises a clear error
        handler = logging.FileHandler(log, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        logging.captureWarnings(True)
        yield
    except Preempted as preempted:
        logging.getLogger(__name__).info("%s", preempted)
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a library that calls sys.exit must not end a run silently
        if os.getpid() != process:  # user code has forked it; nothing has happened to the rank
            raise
        logging.getLogger(__name__).error("rank %d failed\n%s", info.rank, traceback.format_exc())
        handler.close()  # the error may be that too many files are open
        Failures(folder, os.environ.get(SCRATCH_VARIABLE)).write(describe_error(error, folder, info))
        raise
    finally:
        if info.world_size > 1:
            # The frames of the error hold the wrapped model, which must be released before the interpreter exits.
            traceback.clear_frames(sys.exc_info()[2])
        logging.getLogger().removeHandler(handler)
        logging.captureWarnings(False)
        with contextlib.suppress(OSError):
            handler.close()


def describe_error(error: BaseException, folder: RunFolder, info: RankInfo) -> RankFailure:
    """The failure of this rank, as its error file records it."""
    ours, of_peer = as_exp_error(error, folder.path), is_of_peer(error, info.world_size)
    message = None if ours is not None or of_peer else format_user_error(error)
    if isinstance(error, SystemExit):
        message = f"sys.exit({error.code!r}) before the work was done{user_location(error)}"
    return RankFailure(
        info.rank,
        info.local_rank,
        type(ours or error).__name__,
        message or error_message(ours or error) or "no message",
        EXIT_FAILED if ours is None else ours.exit_code,
        pid=os.getpid(),
        of_peer=of_peer,
        own=ours is not None,
    )


def _redirect(log: Path, keep_stdout: bool) -> None:
    """Point the file descriptors at the log, so that native code writes there too.

    With ``keep_stdout`` Python's ``sys.stdout`` keeps the terminal. Native libraries print to the log: gloo prints a
    line per peer, vendors' libraries their versions.
    """
    descriptor = os.open(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, _STDERR)
    if keep_stdout:
        kept = sys.stdout
        sys.stdout = open(os.dup(1), "w", buffering=1, encoding=kept.encoding, errors=kept.errors)  # noqa: PTH123, SIM115
    os.dup2(descriptor, 1)
    os.close(descriptor)


def is_of_peer(error: BaseException, world_size: int) -> bool:
    """Whether an error means that another rank is gone or does not answer, so that this rank is not the cause.

    True if torch's collectives or stores raised it. If native code of the backward pass did, there is no such frame:
    then torch's message about a connection decides. An error of user code about its own connections is its own.
    """
    if world_size == 1 or not isinstance(error, (RuntimeError, OSError)):
        return False
    file = ([frame.filename for frame in traceback.extract_tb(error.__traceback__)] or [""])[-1]
    if "/torch/distributed/" in file:
        return True
    native = isinstance(error, RuntimeError) and any(part in file for part in _EXCHANGE)
    return native and any(word in str(error).lower() for word in _CONNECTION)
