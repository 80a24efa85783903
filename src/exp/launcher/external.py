"""launcher=external: somebody else has started the processes of a run; each takes the place that it is given.

Every process composes and checks the configuration, and starts one worker. Rank 0's writes the run folder; the workers
of the others learn over the store at MASTER_ADDR:MASTER_PORT which folder it is (:mod:`exp.launcher.joining`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from exp import console, heartbeat
from exp.backends_registry import create_backend
from exp.cores import cores_of_task
from exp.errors import EXIT_FAILED, EXIT_PREEMPTED, ConfigError
from exp.heartbeat import Stage
from exp.launcher.base import Launcher
from exp.launcher.external_worker import PREEMPTION_SIGNALS, WorkerWatch
from exp.launcher.failures import collect_failures, exit_code_of, leave_word, tail_of
from exp.launcher.joining import JOINED
from exp.launcher.outcome import Outcome
from exp.launcher.place import Place, local_rank_of
from exp.launcher.ports import check_host, taken_by
from exp.launcher.processes import JOB_VARIABLE, handle_signals, kill_job, signal_name
from exp.launcher.rank import SCRATCH_VARIABLE, this_host
from exp.launcher.start import start_module
from exp.preemption import PreemptionFlag, held_back, preempted_at
from exp.runfolder import RunFolder, read_json, to_json
from exp.sockets import folder_for_sockets
from exp.task import task_class

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.frozen import FrozenRun

__all__ = ["ExternalLauncher", "be_quiet"]


def be_quiet(arguments: list[str]) -> None:
    """Let one process of each node speak: the others would say the same; their logs have what is theirs.

    Args:
        arguments: of the command line.
    """
    if "launcher=external" in arguments and local_rank_of() > 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        sys.stdout.flush()
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)


class ExternalLauncher(Launcher):
    """Runs one worker of a group that is there."""

    joins = True

    @classmethod
    def take_place(cls, config: ExpConfig, overrides: Sequence[str]) -> None:
        """Set ``nproc`` and ``launcher.nnodes`` to what the launcher outside has started.

        Raises:
            ConfigError: there is no place to take, or the user has asked for another number of processes.
        """
        place = Place.of(os.environ, config.nproc)
        asked = [override for override in overrides if override.startswith(("nproc=", "launcher.nnodes="))]
        for override, value in (("nproc=", place.local_world_size), ("launcher.nnodes=", place.nodes)):
            if any(each.startswith(override) and each != f"{override}{value}" for each in asked):
                raise ConfigError(
                    f"{override}... with launcher=external: the processes are there, {value}; leave it out"
                )
        task = task_class(config)
        if task.in_parent or task.has_reference:
            raise ConfigError(f"task={config.task.name} does not run under launcher=external; use launcher=auto")
        config.nproc, config.launcher.nnodes = place.local_world_size, place.nodes

    def __init__(self, nnodes: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        self.nnodes = nnodes
        self.place: Place  # known when the number of processes is: check

    def check(self, nproc: int) -> None:
        """Refuse what only a launcher of ours can do.

        Raises:
            ConfigError: restarts, or a sweep; or the host to meet at is not known.
        """
        self.place = Place.of(os.environ, nproc)
        if self.max_restarts:
            raise ConfigError("launcher.max_restarts needs launcher=torchrun; outside, torchrun --max-restarts does it")
        if self.place.world_size > 1:
            check_host("MASTER_ADDR", self.place.master_addr)
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            raise ConfigError("launcher=external runs one run, not a sweep; use launcher=auto or launcher=submitit")

    @property
    def leads(self) -> bool:
        """Rank 0's process writes the folder and tells the outcome."""
        return self.place.rank == 0

    def take_part(self, run: FrozenRun) -> int:
        """Run the worker of a rank other than 0; returns the exit code."""
        return self._launch(run.folder, run.config, run.overrides).exit_code

    def launch(self, folder: RunFolder, nproc: int, saves: bool = True) -> Outcome:
        """Run rank 0's worker, and say what became of all."""
        config: Any = OmegaConf.load(folder.in_use(folder.config))
        overrides: Any = OmegaConf.to_container(OmegaConf.load(folder.in_use(folder.overrides)))
        for stale in folder.logs.glob("rank*.error.json"):
            stale.unlink()
        return self._launch(folder, config, overrides, saves)

    def _launch(self, folder: RunFolder, config: ExpConfig, overrides: list[str], saves: bool = True) -> Outcome:
        place, job = self.place, secrets.token_hex(8)
        backend = create_backend(config.backend)
        with tempfile.TemporaryDirectory(prefix="exp-", dir=folder_for_sockets()) as scratch:
            order = {
                "folder": str(folder.path) if self.leads else None,
                "digest": _digest(config),
                "overrides": overrides,
                "timeout_s": self.timeout_s,
                "parent": os.getpid(),
            }
            environment = {
                **backend.worker_env(place.local_rank, place.local_world_size, single_node=place.nodes == 1),
                **_threads_of_task(),
                **os.environ,
                **place.environment(),
                JOB_VARIABLE: job,
                SCRATCH_VARIABLE: scratch,
            }
            heartbeat.make_file(scratch, place.local_world_size)
            worker = WorkerWatch(
                self, PreemptionFlag(scratch) if saves else None, folder if self.leads else None, job, scratch
            )
            early = Path(scratch, "early.log")
            try:
                with handle_signals(worker.on_signal):
                    with held_back(PREEMPTION_SIGNALS), early.open("ab") as log:
                        process = start_module(
                            "exp.launcher.joining", to_json(order), environment=environment, stderr=log
                        )
                    code = worker.wait(process)
                    # From here on all is said and done but for the telling: what was to end it comes too late.
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
            finally:
                worker.close()
                kill_job(job)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            preempted = preempted_at(scratch)
            joined = read_json(Path(scratch, JOINED)) or {}
            refused = joined.get("refused")
            if refused is not None:
                if self.leads:
                    raise ConfigError(refused)
                return Outcome(2, reported=True)
            if preempted is not None:
                return Outcome(EXIT_PREEMPTED, preempted=preempted, restarts=joined.get("restarts", 0))
            if worker.received is not None:
                name = signal_name(worker.received)
                return Outcome(128 + worker.received, interrupted_by=name)
            told = RunFolder(joined["folder"]) if joined else folder
            restarts = joined.get("restarts", 0)
            beat = heartbeat.read(scratch)[place.local_rank]
            if beat.stage == Stage.DONE:  # whatever happened in the clean-up of its device
                return Outcome(restarts=restarts)
            if joined:
                beat = beat._replace(pid=process.pid, rank=place.rank)
                leave_word(told, scratch, beat, place.local_rank, code, restarts, of_peer=bool(worker.told))
            own = Outcome(EXIT_FAILED)
            if not joined:
                own.detail = _not_met(place, self.timeout_s, early)
                if not self.leads:
                    console.error(own.detail)
                return own
            if not self.leads:
                record = read_json(told.error_file(place.rank)) or {}
                own.exit_code = record["exit_code"] if record.get("own") else EXIT_FAILED
                return own
            own.failures = collect_failures(told, world_size=place.world_size, local_world_size=place.local_world_size)
            if own.failures:
                own.exit_code = exit_code_of(own.failures[0])
            else:
                own.detail = "rank 0 left no error\n" + "\n".join(tail_of(early))
            return own


def _not_met(place: Place, timeout_s: float, log: Path) -> str:
    """Why a process has not come to work with the others."""
    where = f"MASTER_ADDR={place.master_addr} MASTER_PORT={place.master_port}"
    taken = taken_by(place.master_port) if place.rank == 0 else None
    if taken is not None:
        return f"{where}: the port is taken by {taken}; choose another one, the same for every process"
    said = (
        f"the {place.world_size} processes have not met at {where} (launcher.timeout_s={timeout_s}), as rank "
        f"{place.rank} on {this_host()} sees it; start all of them, and check that each reaches rank 0 there"
    )
    return "\n".join([said, *tail_of(log)[1:]])  # which goes with its folder


def _threads_of_task() -> dict[str, str]:
    """As many as this rank has cores of its own."""
    cores = cores_of_task()
    return {} if cores is None else {"OMP_NUM_THREADS": str(cores), "MKL_NUM_THREADS": str(cores)}


def _digest(config: ExpConfig) -> str:
    """Of all that must be the same on every rank."""
    content: Any = OmegaConf.to_container(config, resolve=True)
    del content["output_dir"]
    return hashlib.sha256(to_json(content, sort_keys=True).encode()).hexdigest()
