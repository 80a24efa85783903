"""Opens the session of a rank: device, process group, seeds; and runs the task in it.

Torch is imported only after the backend has set the environment, because device libraries read it while they load.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

from exp.config.compose import load
from exp.config.resolve import trust_packages
from exp.console import make_console
from exp.errors import ConfigError, Preempted
from exp.hardware.backend import PRECISIONS
from exp.hardware.cards import check_distinct
from exp.hardware.environment import describe_environment
from exp.hardware.registry import create_backend
from exp.runs.failures import Patience
from exp.runs.files import write_json
from exp.session import RankInfo, Session
from exp.task import create_task

if TYPE_CHECKING:
    from torch.distributed import Store

    from exp.runs.folder import RunFolder

__all__ = ["make_store", "open_session", "run_rank"]

logger = logging.getLogger(__name__)


def run_rank(folder: RunFolder, info: RankInfo) -> None:
    """Run this rank's part of the run in ``folder``.

    Args:
        folder: the run folder, with the frozen configuration.
        info: of this rank.

    Raises:
        ExpError: the run failed; the launcher turns the error into the run's result and exit code.
    """
    config = load(folder.current_file(folder.config))
    trust_packages(config.plugins)  # the command that wrote the file has checked all names in it
    backend = create_backend(config.backend)
    info.exit_handlers.append(backend.close)
    task = create_task(config)
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
            environment = {**describe_environment(backend, session.devices), "run_id": session.run_id}
            write_json(records / folder.env.name, environment)
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
    from exp.distributed import Distributed, check_compilation, configure_kernels, seed_everything

    info, config, backend = session.info, session.config, session.backend
    session.device = backend.set_device(info.local_rank)
    if not backend.supports(config.precision):
        raise ConfigError(
            f"precision={config.precision} is not supported by {backend.name} ({session.device})",
            f"use one of {', '.join(p for p in PRECISIONS if backend.supports(p))}",
        )
    backend.set_precision(config.precision)
    session.portable_operators = configure_kernels(backend, session.device, config.precision)
    if config.compile:
        check_compilation(backend, session.device)
    if info.world_size > 1:
        timeout = timedelta(seconds=config.launcher.timeout_s)
        session.store = make_store(info, timeout)
        session.distributed = Distributed.create(backend, session.store, info.rank, info.world_size, timeout)
    else:
        session.distributed = Distributed()
    seed_everything(config.seed, backend)
    if info.rank == 0:
        session.console = make_console()
    _announce_ranks(session)


def _announce_ranks(session: Session) -> None:
    """Log rank, device and host; rank 0 prints them for all ranks. Refuse ranks that share a card."""
    info = session.info
    about = {**session.backend.device_info(session.device), "host": socket.gethostname(), "local_rank": info.local_rank}
    session.devices = session.distributed.gather({**about, "device": str(session.device)})
    lines = [
        f"rank {rank}/{info.world_size}  local_rank {device['local_rank']}  {device['device']}  "
        f"{session.distributed.process_group}  {device['host']}"
        for rank, device in enumerate(session.devices)
    ]
    logger.info(lines[info.rank])
    cautions = [*session.backend.warnings()]
    if session.distributed.fallback is not None:
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
