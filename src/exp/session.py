"""The context of a task on one rank: configuration, run folder, device, process group, and what the data add to a run.

:mod:`exp.worker.session` opens it.
"""

from __future__ import annotations

import gc
import logging
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from exp.config.shares import split_batch
from exp.hardware.backend import usable_cores
from exp.runs.files import write_json
from exp.runs.inputs import describe_inputs
from exp.trackers import base as trackers

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import nn
    from torch.distributed import Store

    from exp.config.diff import Change
    from exp.config.schema import ExpConfig
    from exp.data.extensions import DataExtensions
    from exp.data.fingerprint import Fingerprint
    from exp.distributed import Distributed, Kernels
    from exp.hardware.backend import Backend
    from exp.runs.folder import RunFolder
    from exp.trackers.base import Reporter

logger = logging.getLogger(__name__)


@dataclass
class RankInfo:
    """Rank, world size and the like of one worker; the defaults are those of a single worker.

    Attributes:
        restart_count: how often the worker or its job has been restarted; if not 0, the run resumes.
        store: path of a file store; None: torch's ``env://``, that is MASTER_ADDR and MASTER_PORT.
        is_elastic: whether nodes come and go; then a rank that has saved its state, or lost another one, is started
            again with the nodes that are there.
        preempted: whether the run has to save its state and end.
        stores: the store that the ranks use already; empty: there is none yet.
        exit_handlers: called last in a worker process, which then exits without the interpreter's clean-up.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
    store: str | None = None
    is_elastic: bool = False
    preempted: Callable[[], bool] = field(default=lambda: False, compare=False)
    stores: list[Store] = field(default_factory=list, compare=False)
    exit_handlers: list[Callable[[], object]] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, environ: Mapping[str, str], **others: Any) -> RankInfo:
        """Take rank, world size and their local counterparts from torch's variables; ``others``: further attributes."""
        numbers: Any = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        return cls(*numbers, **others)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @property
    def single_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.world_size == self.local_world_size

    @property
    def cores(self) -> int:
        """Number of cores for this rank alone, at least 1."""
        return max(1, usable_cores() // self.local_world_size)


@dataclass(frozen=True)
class Weights:
    """The weights in a file.

    Attributes:
        path: the file.
        state: tensors by name, on the CPU.
        data: state of the data on which the weights were trained (:meth:`exp.data.base.Data.state_dict`); None: the
            file does not contain it.
        files: SHA-256 of the file, of those that it lists, and of the JSON files beside it, by name; on rank 0.
    """

    path: Path
    state: Mapping[str, torch.Tensor]
    data: dict[str, Any] | None
    files: dict[str, str] = field(default_factory=dict)


class Session:
    """The context of a task on one rank.

    Attributes:
        config: the frozen configuration (:class:`exp.config.schema.ExpConfig`).
        folder: the run folder.
        info: rank, world size and the like of this worker.
        backend: the hardware family.
        task: the task that runs (:class:`exp.task.Task`).
        device: this rank's device.
        distributed: collectives.
        store: of the ranks; None if there is only one.
        console: the terminal on rank 0, None elsewhere.
        devices: description of the device of each rank, by rank.
        shares: the weight of each rank in the division of a batch, by rank; empty: all have equal parts.
        kernels: portable kernels of the operators that this device lacks.
        started: ``time.time()`` when this worker began.
        weights: of ``init_from``, once they have been read.
        data_state: state of the data for checkpoints (:meth:`exp.data.base.Data.state_dict`); None: no state.
        data_files: fingerprint of the data files, for checkpoints and ``inputs.json`` (:mod:`exp.data.fingerprint`);
            on rank 0 of a training or an evaluation.
        extensions: functions with which the data extend the run (:class:`exp.data.extensions.DataExtensions`).
        resumed_from: the checkpoint from which a training resumed; None: it started from the beginning.
        changed: settings in which a resumed training differs from the earlier run.
        has_pending: whether the folder still has the records of an earlier run, which :meth:`start_run` replaces.
        warnings: what :meth:`warn` has printed, for ``result.json``.
        is_started: whether the run has started (:meth:`start_run`).
        reporters: connections to the trackers, on rank 0, once the run has begun.
        run_id: of the run whose folder this is, on rank 0; ``env.json``, ``result.json`` and checkpoints have it.
        unique_name: name that differs from those of other runs of the same process.
    """

    def __init__(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend, task: Any) -> None:
        self.config = config
        self.folder = folder
        self.info = info
        self.backend = backend
        self.task = task
        self.started = time.time()
        self.run_id = uuid.uuid4().hex
        self.unique_name = f"{config.name}-{self.run_id[:8]}"
        self.console: Console | None = None
        self.device: torch.device
        self.distributed: Distributed
        self.store: Store | None = None
        self.devices: list[dict[str, Any]] = []
        self.shares: list[float] = []
        self.kernels: Kernels
        self.weights: Weights | None = None
        self.data_state: dict[str, Any] | None = None
        self.data_files: Fingerprint | None = None
        self.extensions: DataExtensions
        self.resumed_from: Path | None = None
        self.changed: Sequence[Change] = ()
        self.has_pending = folder.has_pending
        self.reporters: list[Reporter] = []
        self.warnings: list[str] = []
        self.is_started = False
        self._on_start: list[Callable[[], object]] = []
        self._on_model: list[Callable[[nn.Module], object]] = []

    @property
    def parts(self) -> list[int]:
        """Samples of each rank in a micro-batch of the training, by rank; empty: each has ``batch_size``."""
        if not self.shares:
            return []
        assert self.config.global_batch_size is not None  # validate() has derived it
        return split_batch(self.config.global_batch_size // self.config.accumulate, self.shares)

    def print(self, text: str) -> None:
        """Print a line on rank 0's terminal, and write it to the log of every rank that calls this method."""
        logger.info(text)
        if self.console is not None:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def warn(self, *texts: str) -> None:
        """Print warnings like :meth:`print`, and record them in ``result.json``."""
        for text in texts:
            self.print(f"warning: {text}")
            self.warnings.append(text)

    def on_start(self, action: Callable[[], object]) -> None:
        """Register an action for :meth:`start_run` on rank 0, for changes to files that an earlier attempt has left."""
        self._on_start.append(action)

    def on_model(self, action: Callable[[nn.Module], object]) -> None:
        """Register an action that every rank runs when the model is built, before any sample is loaded.

        Args:
            action: takes the model: not wrapped, on the CPU, with the weights of ``init_from``.
        """
        self._on_model.append(action)

    def notify_model(self, model: nn.Module) -> None:
        """Run the actions registered with :meth:`on_model`."""
        while self._on_model:
            self._on_model.pop(0)(model)

    def start_run(self) -> None:
        """Start the run: replace the records of an earlier run in the folder, run registered actions, write
        ``inputs.json``, open trackers.

        Called by every rank at the same point: after the first training step, or before the first evaluation. Until
        then the records of an earlier run are unchanged. Calls after the first do nothing.
        """
        if self.is_started:
            return
        self.is_started = True
        if self.has_pending:
            self.distributed.barrier()
        if self.info.rank == 0:
            self.folder.commit_pending(self.config.overwrite)
            for action in self._on_start:
                action()
            write_json(self.folder.inputs, describe_inputs(self.data_files))
            self.reporters = trackers.start(self.config.logger, self.folder, self.print)
        self.clear_callbacks()
        if self.has_pending:
            self.distributed.barrier()
        self.has_pending = False

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Pass values to the trackers, on rank 0; returns at once."""
        for reporter in self.reporters:
            reporter.log(values, step)

    def close_reporters(self, status: str, result: Mapping[str, Any], patience_s: float) -> None:
        """Report the end of the run to the trackers, and print the run's address at each tracker."""
        for reporter in self.reporters:
            if reporter.close(status, result, patience_s) and status == "completed" and reporter.state["address"]:
                self.print(f"{reporter.name}: {reporter.state['address']}")
        self.reporters = []

    def clear_callbacks(self) -> None:
        """Drop the actions registered with :meth:`on_start`; they keep the runner and the wrapped model alive."""
        self._on_start.clear()

    def close(self) -> None:
        """Wait for all ranks to have done their work. The process group is destroyed last, once the result is written.

        Objects that hold a DDP reducer are released first: a reducer that outlives the group can hang at exit, since
        its destructor joins the group's threads while it holds the interpreter lock.
        """
        gc.collect()
        if self.info.world_size > 1:
            self.distributed.barrier()
            self.info.exit_handlers.insert(0, self.backend.collectives.destroy)
