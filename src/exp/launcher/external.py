"""launcher=external: another launcher (torchrun, MPI, srun) has started one process per rank.

Every process composes and checks the configuration, and starts one worker. The process of rank 0 writes the run folder;
the workers of the other ranks get its path over the store at MASTER_ADDR:MASTER_PORT (:mod:`exp.worker.main`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Sequence

from exp import console
from exp.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError
from exp.hardware.ports import check_host, port_owner
from exp.launcher.base import Launcher
from exp.launcher.outcome import Outcome, tail_of
from exp.launcher.rank_environment import rank_environment
from exp.launcher.supervisor import Supervisor
from exp.runs.files import read_json, to_json
from exp.runs.job import PREEMPT_SIGNAL, RUN_FOLDER_FILE, SCRATCH_VARIABLE, signal_name
from exp.session import RankInfo
from exp.worker.processes import AGENT_VARIABLE, start_module

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.base import FrozenRun

__all__ = ["ExternalLauncher"]

_STDERR = 2


class ExternalLauncher(Launcher):
    """Runs one worker of a job that another launcher has started.

    Attributes:
        stderr: of a process that does not print: file descriptor for what only this process knows.
    """

    is_external = True
    stderr: ClassVar[int | None] = None

    @classmethod
    def adopt_rank_environment(cls, config: ExpConfig, overrides: Sequence[str]) -> None:
        """Set ``nproc`` and ``launcher.nnodes`` to the processes that the outer launcher has started.

        The variables of that launcher become torch's (:mod:`exp.launcher.rank_environment`). From here on only local
        rank 0 prints: the others would print the same.

        Raises:
            ConfigError: this process has no rank, or ``overrides`` ask for another number of processes.
        """
        os.environ.update(rank_environment(os.environ, config.nproc))
        rank_info = RankInfo.of(os.environ)
        values = {"nproc": rank_info.local_world_size, "launcher.nnodes": rank_info.nodes}
        for key, value in values.items():
            if any(override.startswith(f"{key}=") and override != f"{key}={value}" for override in overrides):
                raise ConfigError(f"{key} cannot be set with launcher=external, which found {value}; leave it out")
        config.nproc, config.launcher.nnodes = rank_info.local_world_size, rank_info.nodes
        if rank_info.local_rank > 0:
            cls.stderr = os.dup(sys.stderr.fileno())
            for stream in (sys.stdout, sys.stderr):
                console.redirect_to_devnull(stream)

    def check(self, nproc: int) -> None:
        """Refuse restarts, and an unknown host in MASTER_ADDR."""
        self.rank_info = RankInfo.of(os.environ)
        self.owns_run_folder = self.rank_info.rank == 0
        if self.config.max_restarts:
            raise ConfigError("launcher.max_restarts needs launcher=torchrun; use --max-restarts of the outer torchrun")
        if self.rank_info.world_size > 1:
            check_host("MASTER_ADDR", os.environ["MASTER_ADDR"])

    def launch(self, run: FrozenRun) -> Outcome:
        """Run this rank's worker; rank 0's process reports the outcome of all ranks.

        Raises:
            ConfigError: another rank has another command, or does not see the run folder.
        """
        info, folder = self.rank_info, run.folder
        environment = {
            **run.backend.worker_env(info.local_rank, info.local_world_size, single_node=info.single_node),
            **os.environ,
            AGENT_VARIABLE: str(os.getpid()),
        }
        handshake = {
            "folder": str(folder.path) if self.owns_run_folder else None,
            "overrides": run.overrides,
            "local_world_size": info.local_world_size,
            "timeout_s": self.config.timeout_s,
        }
        with tempfile.TemporaryDirectory(prefix="exp-") as scratch:
            log, began = Path(scratch, "early.log"), time.monotonic()
            environment[SCRATCH_VARIABLE] = scratch
            job = Supervisor(self, run, scratch, (PREEMPT_SIGNAL, signal.SIGTERM))
            worker = "exp.worker.main", to_json(handshake)
            code = job.watch(
                lambda stderr: start_module(*worker, environment=environment, stderr=stderr), log, 1, info.world_size
            )
            refused = (read_json(Path(scratch, RUN_FOLDER_FILE)) or {}).get("refused")
            if refused is not None:
                if self.owns_run_folder:
                    raise ConfigError(refused)
                return Outcome(EXIT_CONFIG, printed=True)
            return job.outcome(lambda: self._ended(job, code, log, time.monotonic() - began))

    def _ended(self, job: Supervisor, code: int, log: Path, after_s: float) -> Outcome:
        """Why the worker ended: the work is done, a rank failed, or the ranks did not meet."""
        info, failures = self.rank_info, job.failures
        if failures is None:
            return self._rendezvous_failed(log, after_s, code if code < 128 else 128 - code)
        if code == 0:
            return Outcome()
        return Outcome.of(failures.collect(info.world_size if self.owns_run_folder else 0, info.local_world_size))

    def _rendezvous_failed(self, log: Path, waited_s: float, code: int) -> Outcome:
        """The outcome of a worker that did not meet the other ranks, and ended with this exit code after so long."""
        info, host, port = self.rank_info, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        where, here = f"MASTER_ADDR={host} MASTER_PORT={port}", f"rank {info.rank} on {socket.gethostname()}"
        taken = port_owner(int(port)) if self.owns_run_folder else None
        if taken is not None:
            detail = f"{where}: the port is taken by {taken}; choose another one, the same for every process"
        else:
            if code < 0 or info.world_size == 1:
                how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
                first = f"the worker of {here} {how} before it had met the other ranks"
            else:
                check = f"that rank 0 runs on {host}, and that this host reaches the port there"
                if self.owns_run_folder:
                    check = "that all of them have these variables, and that their hosts reach this port"
                first = (
                    f"the {info.world_size} processes did not meet at {where}: {here} has waited for {waited_s:.0f} s "
                    f"(launcher.timeout_s={self.config.timeout_s}); check that they were started, {check}"
                )
            # Without the log's path, since its folder is removed, and without the frames of torch's C++ code.
            lines = [line for line in tail_of(log)[1:] if not line.startswith(("  | frame #", "  | <omitting"))]
            detail = "\n".join([first, *lines])
        if not self.owns_run_folder:
            with contextlib.suppress(OSError):
                os.write(_STDERR if self.stderr is None else self.stderr, f"error: {detail}\n".encode())
        return Outcome(EXIT_FAILED, detail=detail)
