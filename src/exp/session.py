"""One worker's part of a run: environment, device, process group and seeds; then the task; then the clean-up.

Torch is imported only after the backend has set the environment, because device libraries read it while they load.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
import time
import uuid
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from exp import trackers
from exp.config.compose import load
from exp.config.resolve import check_names
from exp.config.schema import ExpConfig
from exp.console import make_console, wait_for, waited
from exp.errors import ConfigError, Preempted
from exp.hardware.backend import PRECISIONS
from exp.hardware.cards import check_distinct
from exp.hardware.registry import create_backend
from exp.runs.files import write_json
from exp.runs.record import describe_environment
from exp.task import create_task

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from rich.console import Console
    from torch import nn

    from exp.config.differences import Change
    from exp.data.base import Extras
    from exp.data.places import Fingerprint
    from exp.engine.building import Weights
    from exp.engine.distributed import Distributed
    from exp.hardware.backend import Backend
    from exp.launcher.rank import RankInfo
    from exp.runs.folder import RunFolder
    from exp.trackers import Reporter

__all__ = ["Session", "run"]

logger = logging.getLogger(__name__)

_TRACKERS_AFTER_FAILURE_S = 2.0  # less than the launcher waits for ranks after one has failed


class Session:
    """The context of a task on one rank.

    Attributes:
        config: the frozen configuration (:class:`exp.config.schema.ExpConfig`).
        folder: the run folder.
        info: rank, world size and the like of this worker.
        backend: the hardware family.
        device: this rank's device.
        distributed: collectives.
        console: the terminal on rank 0, None elsewhere.
        devices: description of the device of each rank, by rank.
        portable_operators: ATen names of the operators for which this device uses portable kernels.
        process_group: the process group in use, or ``none``.
        fallback: ``used``, ``wanted`` and ``reason`` if another process group than the wanted one is used; else None.
        started: ``time.time()`` when this worker began.
        weights: of ``init_from``, once they have been read.
        data_state: state of the data for checkpoints (:meth:`exp.data.base.Data.state_dict`); None: no state.
        data_files: fingerprint of the data files, for checkpoints (:mod:`exp.data.places`); on rank 0 of a
            training.
        extras: functions with which the data extend the run (:class:`exp.data.base.Extras`).
        resumed_from: the checkpoint from which a training resumed; None: it started from the beginning.
        changed: settings in which a resumed training differs from the earlier run.
        pending: whether the folder still has the records of an earlier run, which :meth:`begin` replaces.
        begun: whether the run has started (:meth:`begin`).
        reporters: connections to the trackers, on rank 0, once the run has begun.
        unique_name: name that differs from those of other runs of the same process.
        restarted_here: whether this process has run a part of the run before (:meth:`start_anew`).
    """

    def __init__(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        self.config = config
        self.folder = folder
        self.info = info
        self.backend = backend
        self.started = time.time()
        self.unique_name = f"{config.name}-{uuid.uuid4().hex[:8]}"
        self.console: Console | None = None
        self.device: torch.device
        self.distributed: Distributed
        self.devices: list[dict[str, Any]] = []
        self.portable_operators: frozenset[str] = frozenset()
        self.process_group = "none"
        self.fallback: dict[str, Any] | None = None
        self.weights: Weights | None = None
        self.data_state: dict[str, Any] | None = None
        self.data_files: Fingerprint | None = None
        self.extras: Extras
        self.resumed_from: Path | None = None
        self.changed: Sequence[Change] = ()
        self.pending = folder.pending
        self.restarted_here = False
        self.reporters: list[Reporter] = []
        self.begun = False
        self._when_started: list[Callable[[], object]] = []
        self._when_built: list[Callable[[nn.Module], object]] = []

    def open(self) -> None:
        """Select the device, join the process group, set the seeds, and log the device of each rank.

        Raises:
            ConfigError: the device does not support the precision, or ``compile=true`` does not work on it.
            RunError: two ranks share a card.
        """
        from exp.engine.device import check_compilation, seed_everything, settle_kernels
        from exp.engine.distributed import Distributed
        from exp.launcher.rank import make_store

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
            store = make_store(info, timeout)
            self.distributed = Distributed.create(backend, store, info.rank, info.world_size, timeout)
            self.fallback = self.distributed.fallback
            self.process_group = self.distributed.process_group
        else:
            self.distributed = Distributed()
        seed_everything(config.seed, backend)
        if info.rank == 0:
            self.console = make_console()
            wait_for("setting up")
        self._announce()

    def _announce(self) -> None:
        """Log rank, device and host; rank 0 prints them for all ranks. Refuse ranks that share a card."""
        info = self.info
        about = {**self.backend.describe(self.device), "host": socket.gethostname(), "local_rank": info.local_rank}
        self.devices = self.distributed.gather({**about, "device": str(self.device)})
        lines = [
            f"rank {rank}/{info.world_size}  local_rank {device['local_rank']}  {device['device']}  "
            f"{self.process_group}  {device['host']}"
            for rank, device in enumerate(self.devices)
        ]
        logger.info(lines[info.rank])
        cautions = [*self.backend.cautions()]
        if self.fallback is not None:
            text = (
                "FALLBACK on every rank: {used} instead of {wanted}, because {reason}; this is slow, and counted as "
                "staged_bytes_per_step in metrics.jsonl"
            )
            cautions.insert(0, text.format(**self.fallback))
        for caution in cautions:
            logger.warning("%s", caution)  # on every rank, since nodes may have different variables
        if self.console is not None:
            for line in lines:
                self.console.print(line, highlight=False, soft_wrap=True)
            for caution in cautions:
                self.console.print(f"warning: {caution}", highlight=False, style="yellow", soft_wrap=True)
        if self.backend.exclusive_devices:
            check_distinct(self.devices)

    def wait_for(self, what: str) -> None:
        """Show on rank 0's terminal what the run is waiting for."""
        if self.console is not None:
            wait_for(what)

    def say(self, text: str) -> None:
        """Print a line on rank 0's terminal, and write it to the log of every rank that calls this method."""
        logger.info(text)
        if self.console is not None:
            self.console.print(text, highlight=False, soft_wrap=True)

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
        waited()
        if self.pending:
            self.distributed.barrier()
        if self.info.rank == 0:
            self.folder.begin(self.config.overwrite)
            for action in self._when_started:
                action()
            if not self.reporters:
                self.reporters = trackers.start(self.config.logger, self.folder, self.say)
        self.forget()
        if self.pending:
            self.distributed.barrier()
        self.pending = False

    def start_anew(self) -> None:
        """Reset the session to that of a new process of the same run: nothing is built, and nothing has begun."""
        from exp.engine.device import seed_everything

        self.unique_name = f"{self.unique_name}-anew"
        self.restarted_here = True
        self.forget()
        self.begun = False
        self.weights = self.data_state = self.data_files = None
        gc.collect()  # frees the data-parallel wrapper before a new one is made
        seed_everything(self.config.seed, self.backend)

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
        """Destroy the process group, after all objects that hold a DDP reducer have been released.

        A reducer that outlives the group can hang the interpreter at exit: its destructor joins the group's threads
        while it holds the interpreter lock.
        """
        gc.collect()
        if self.info.world_size > 1:
            self.distributed.barrier()
            self.backend.collectives.destroy()


def run(folder: RunFolder, info: RankInfo) -> None:
    """Run this rank's part of the run in ``folder``.

    Args:
        folder: the run folder, with the frozen configuration.
        info: of this rank.

    Raises:
        ExpError: the run failed; the launcher turns the error into the run's result and exit code.
    """
    config = load(folder.in_use(folder.config))
    check_names(config)
    backend = create_backend(config.backend)
    info.at_end.append(backend.close)
    task = create_task(config)
    environment = backend.worker_env(info.local_rank, info.local_world_size, single_node=info.single_node)
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    os.environ.update(backend.run_env(config.precision, task.counts_fallbacks))
    if task.diagnoses:  # such a task opens the session step by step, and continues if a step fails
        task.diagnose(config, folder, info, backend)
        return
    session = Session(config, folder, info, backend)
    try:
        gc.disable()  # imports of torch and MMEngine make a million objects; collecting them costs a fifth more time
        session.open()
        from exp.engine.registries import import_plugins  # MMEngine's, and so torch

        import_plugins(config.plugins)
        if info.rank == 0:
            records = folder.start if session.pending else folder.path
            write_json(records / folder.env.name, describe_environment(backend, session.devices))
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
        waited()
        status = "preempted" if isinstance(error, Preempted) else "failed"
        session.close_reporters(status, {"error": {"message": str(error)}}, _TRACKERS_AFTER_FAILURE_S)
        raise
    session.close()
    if info.rank == 0:
        folder.check_there()
        folder.write_result(result)
        session.close_reporters("completed", result, config.logger.patience_s)
