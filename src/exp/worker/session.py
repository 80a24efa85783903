"""The session of a rank: its log and error file, device, process group and seeds; the task runs in it.

Torch is imported only after the backend has set the environment, because device libraries read it while they load.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

from exp.config.compose import load
from exp.config.diff import node_changes
from exp.config.resolve import to_plain, trust_packages
from exp.config.shares import rank_share
from exp.console import make_console
from exp.errors import (
    ConfigError,
    Preempted,
    UnavailableError,
    as_exp_error,
    error_message,
    user_error_lines,
    user_location,
)
from exp.hardware.backend import PRECISIONS
from exp.hardware.cards import check_distinct
from exp.hardware.environment import describe_environment
from exp.hardware.registry import create_backend
from exp.runs.failures import Failures, Patience, RankFailure, is_caused_by_peer, is_time_out, node_name
from exp.runs.files import to_json, write_json
from exp.runs.job import ENDING_FLAG, SCRATCH_VARIABLE
from exp.session import RankInfo, Session
from exp.task import create_task, task_class

if TYPE_CHECKING:
    from torch.distributed import Store

    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.runs.folder import RunFolder

__all__ = ["check_nodes", "describe_error", "make_store", "open_session", "reporting", "run_rank"]

logger = logging.getLogger(__name__)

_STDERR = 2  # file descriptor


def run_rank(folder: RunFolder, info: RankInfo) -> None:
    """Run this rank's part of the run in ``folder``.

    Args:
        folder: the run folder, with the frozen configuration.
        info: of this rank.

    Raises:
        ExpError: the run failed; the launcher turns the error into the run's result and exit code.
    """
    config = load(folder.config_of_node())
    absent = range(info.world_size, config.nproc * config.launcher.nnodes)
    if info.is_elastic and info.rank == 0 and absent:  # a rank removes its own error file, if it starts again
        folder.clear_error_files(absent)
    trust_packages(config.plugins)  # the command that wrote the file has checked all names in it
    backend = create_backend(config.backend)
    info.exit_handlers.append(backend.close)
    task = create_task(task_class(config), config.task)
    environment = backend.worker_env(info.local_rank, info.local_world_size, single_node=info.single_node)
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    os.environ.update(backend.run_env(config.precision, task.counts_fallbacks))
    if task.is_diagnostic:  # such a task opens the session step by step, and continues if a step fails
        task.diagnose(config, folder, info, backend)
        return
    session = Session(config, folder, info, backend, task)
    try:
        gc.disable()  # imports of torch and MMEngine make a million objects; collecting them costs a fifth more time
        open_session(session)
        from exp.config.resolve import import_plugins

        import_plugins(config.plugins)
        if info.rank == 0:
            records = folder.pending_dir if session.has_pending else folder.path
            # A training that is continued in its folder is the same run; with overwrite=true it is another.
            earlier = None if session.has_pending and config.overwrite else folder.run_id()
            session.run_id = earlier or session.run_id
            about = {**describe_environment(backend, session.devices), "record": to_plain(config.record)}
            write_json(records / folder.env.name, {**about, "run_id": session.run_id})
        # torch's losses broadcast (64, 1) against (64,) to 64 x 64 differences; such a loss is always wrong.
        warnings.filterwarnings("error", message="Using a target size")
        gc.freeze()
        gc.enable()
        result = task.run(session)
        session.start_run()  # does nothing if the task has called it
    except BaseException as error:
        session.clear_callbacks()
        status = "preempted" if isinstance(error, Preempted) else "failed"
        session.close_reporters(status, {"error": {"message": str(error)}}, Patience.TRACKERS_S)
        raise
    session.close()
    if info.rank == 0:
        folder.check_exists()
        folder.write_result(result)
        session.close_reporters("completed", result, config.logger.patience_s)


def open_session(session: Session) -> None:
    """Select the device, join the process group, set the seeds, and log the device of each rank.

    Raises:
        ConfigError: the device does not support the precision, or ``compile=true`` does not work on it.
        RunError: two ranks share a card.
    """
    from exp.distributed import Distributed, Kernels, check_compilation, seed_everything

    info, config, backend = session.info, session.config, session.backend
    session.device = backend.set_device(info.local_rank)
    timeout = timedelta(seconds=config.launcher.timeout_s)
    if config.launcher.mixed:
        session.store = make_store(info, timeout)
        check_nodes(config, backend, info, session.store)
    if not backend.supports(config.precision):
        raise ConfigError(
            f"precision={config.precision} is not supported by {backend.name} ({session.device})",
            f"use one of {', '.join(p for p in PRECISIONS if backend.supports(p))}",
        )
    backend.set_precision(config.precision)
    session.kernels = Kernels(backend, session.device, config.precision)
    if config.compile:
        check_compilation(backend, session.device)
    if info.world_size > 1:
        session.store = session.store or make_store(info, timeout)
        mixed = config.launcher.mixed
        session.distributed = Distributed.create(backend, session.store, info.rank, info.world_size, timeout, mixed)
    else:
        session.distributed = Distributed()
    seed_everything(config.seed, backend)
    if info.rank == 0:
        session.console = make_console()
    _announce_ranks(session)
    if session.shares and config.global_batch_size is not None:
        config.batch_size = max(session.parts)  # of all nodes; the parent knows only its own shares


def _announce_ranks(session: Session) -> None:
    """Log rank, device and host; rank 0 prints them for all ranks. Refuse ranks that share a card."""
    info = session.info
    about = {**session.backend.device_info(session.device), "host": socket.gethostname(), "local_rank": info.local_rank}
    share = rank_share(session.config.launcher, info.local_rank)
    about.update({} if share is None else {"share": share})
    if session.config.launcher.mixed:
        shared = session.backend.capabilities.shared_device
        about.update(backend=session.backend.name, simulated=session.backend.simulate, shared_device=shared)
    session.devices = session.distributed.gather({**about, "device": str(session.device)})
    session.shares = [device["share"] for device in session.devices if "share" in device]
    lines = [
        f"rank {rank}/{info.world_size}  local_rank {device['local_rank']}  {device['device']}  "
        f"{session.distributed.process_group}  {device['host']}"
        for rank, device in enumerate(session.devices)
    ]
    logger.info(lines[info.rank])
    cautions = [*session.backend.warnings()]
    if session.distributed.fallback is not None and not session.config.launcher.mixed:
        text = (
            "FALLBACK on every rank: {used} instead of {wanted}, because {reason}; this is slow, and counted as "
            "staged_bytes_per_step in metrics.jsonl"
        )
        cautions.insert(0, text.format(**session.distributed.fallback))
    for caution in cautions:
        logger.warning("%s", caution)  # on every rank, since nodes may have different variables
    if session.console is not None:
        for line in lines:
            session.console.print(line, highlight=False, soft_wrap=True)
        for caution in cautions:
            session.console.print(f"warning: {caution}", highlight=False, style="yellow", soft_wrap=True)
    if not session.backend.capabilities.shared_device:
        check_distinct(session.devices)


def check_nodes(config: ExpConfig, backend: Backend, info: RankInfo, store: Store) -> None:
    """Check that the nodes of a mixed job differ in nothing but what each may choose; a collective over the store.

    Args:
        config: of this node.
        backend: of this node, with the device selected.
        info: of this rank.
        store: of all ranks.

    Raises:
        ConfigError: a key differs, there is a rank without samples, or a card does not support the precision; the same
            on every rank.
        UnavailableError: the minor versions of torch differ; likewise.
    """
    from exp.hardware.compat import TORCH_VERSION

    own = {
        "name": f"rank {info.rank} ({node_name()})",
        "torch": "{}.{}".format(*TORCH_VERSION),
        "supported": backend.supports(config.precision),
        "config": to_plain(config),
    }
    store.set(f"exp/node/{info.rank}", to_json(own))
    first, *others = (json.loads(store.get(f"exp/node/{rank}")) for rank in range(info.world_size))
    for other in (first, *others):
        changes = node_changes(first["config"], other["config"])
        if changes:
            texts = [change.beside("there") for change in changes[:4]]
            raise ConfigError(
                f"{other['name']} has another configuration than {first['name']}: {', '.join(texts)}",
                "give all nodes the same, except for backend, nproc, shares and data.num_workers",
                key=changes[0].key,
            )
        if other["torch"] != first["torch"]:
            raise UnavailableError(
                f"{other['name']} has torch {other['torch']}, and {first['name']} has {first['torch']}",
                "install the same minor version of torch on all nodes",
            )
        if not other["supported"]:
            raise ConfigError(f"{other['name']} does not support precision={config.precision}", "use one that all have")
    size = config.global_batch_size
    if size is not None and size // config.accumulate < info.world_size:
        raise ConfigError(
            f"global_batch_size={size} with accumulate={config.accumulate} has no sample for some of {info.world_size} "
            "ranks",
            "use a larger one",
            key="global_batch_size",
        )


def make_store(info: RankInfo, timeout: timedelta) -> Store:
    """The store of the process group.

    Args:
        info: of this rank.
        timeout: longest wait for a key of another rank.
    """
    import torch.distributed as dist

    from exp.hardware.compat import serving_store

    if info.stores:
        info.stores[0].set_timeout(timeout)
        return info.stores[0]
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


@contextlib.contextmanager
def reporting(folder: RunFolder, info: RankInfo, redirect: bool) -> Iterator[None]:
    """Context in which a rank runs: log records go to the rank's log, an error to the log and the error file.

    Args:
        folder: the run folder.
        info: of this rank.
        redirect: send stderr and stdout to the log of the rank, except what Python prints to stdout on rank 0, which
            goes to the terminal.

    Raises:
        BaseException: the error of the run, unchanged; ``SystemExit`` counts as a failure, too.
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
        logger.info("%s", preempted)
        raise
    except BaseException as error:  # a library that calls sys.exit must not end a run silently
        if os.getpid() != process:  # user code has forked it; nothing has happened to the rank
            raise
        if not isinstance(error, (Exception, SystemExit)) and (not redirect or _is_ending()):  # a signal ends the run
            raise
        logger.error("rank %d failed\n%s", info.rank, traceback.format_exc())
        handler.close()  # the error may be that too many files are open
        failure = describe_error(error, folder, info)
        if not (failure.caused_by_peer and info.is_elastic):  # then the ranks that are left go on
            Failures(folder, os.environ.get(SCRATCH_VARIABLE)).write(failure)
        raise
    finally:
        if info.world_size > 1:
            # The frames of the error hold the wrapped model, which must be released before the interpreter exits.
            traceback.clear_frames(sys.exc_info()[2])
        logging.getLogger().removeHandler(handler)
        logging.captureWarnings(False)
        with contextlib.suppress(OSError):
            handler.close()


def _is_ending() -> bool:
    """Whether the launcher of this job ends it, and has interrupted its workers."""
    return Path(os.environ[SCRATCH_VARIABLE], ENDING_FLAG).exists()


def describe_error(error: BaseException, folder: RunFolder, info: RankInfo) -> RankFailure:
    """The failure of this rank, as its error file records it."""
    exp_error, caused_by_peer = as_exp_error(error, folder.path), is_caused_by_peer(error, info.world_size)
    ranks: Any = {"rank": info.rank, "local_rank": info.local_rank, "pid": os.getpid()}
    peer: Any = {"caused_by_peer": caused_by_peer, "timed_out": caused_by_peer and is_time_out(error)}
    if exp_error is not None:
        return RankFailure.of(exp_error, **ranks, **peer)
    lines = None if caused_by_peer else user_error_lines(error)
    if not isinstance(error, Exception):
        ending = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else "raised"
        lines = [f"{ending} before the work was done{user_location(error)}"]
    finding, *details = lines or error_message(error).splitlines() or ["no message"]
    names_type = isinstance(error, SystemExit) or (lines is not None and isinstance(error, Exception))
    return RankFailure(
        type=type(error).__name__, finding=finding, details=details, names_type=names_type, **ranks, **peer
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
        terminal = sys.stdout
        sys.stdout = open(os.dup(1), "w", buffering=1, encoding=terminal.encoding, errors=terminal.errors)  # noqa: PTH123, SIM115
    os.dup2(descriptor, 1)
    os.close(descriptor)
