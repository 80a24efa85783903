"""What one Slurm task does: a node's share of a run, through the torchrun launcher; and queueing the run again.

Imports no torch. Everything that a second start needs is in the run folder: where a job is queued again, by us, by its
administrator or after a node's failure, the same task runs on the same folder and goes on from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Mapping

from exp import hub, summary
from exp.config.check import check_hardware
from exp.errors import EXIT_FAILED, EXIT_OK, ConfigError, ExpError, UnavailableError
from exp.frozen import FrozenRun
from exp.hardware.registry import create_backend
from exp.launcher import slurm
from exp.launcher.card_locks import locked_cards
from exp.launcher.outcome import Outcome, RankFailure
from exp.launcher.rank import REQUEUES_VARIABLE, this_host
from exp.launcher.rank_environment import take_stale_variables
from exp.launcher.torchrun import TorchrunLauncher
from exp.preemption import PREEMPT_SIGNAL
from exp.runfolder import UMASK, RunFolder, read_json, write_json
from exp.runlock import RunLock
from exp.task import task_class

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NodeTask", "job_id", "outcome_file", "read_outcome"]

_POLL_S = 0.1
_REQUEUE_PATIENCE_S = 300.0
_PORTS = range(20000, 32768)  # below those that the kernel hands out by itself


class _NodeLauncher(TorchrunLauncher):
    """SIGTERM means that there is a while left: Slurm sends SIGKILL later, after its grace time or KillWait."""

    preemption_signals = (PREEMPT_SIGNAL, signal.SIGTERM)


@dataclass
class NodeTask:
    """Called once on every node of a job.

    Attributes:
        run_dir: the run folder.
        on_slurm: whether Slurm runs it; otherwise it is a process on one machine.
        token: what the job knows the lock of its run folder by; queued again, it is the same job.
        visible: off Slurm, the user's variables that choose cards; None: not set.
    """

    run_dir: str
    on_slurm: bool = True
    visible: Mapping[str, str | None] = field(default_factory=dict)
    token: str | None = None

    def __call__(self) -> int:
        """Run this node's workers to the end; returns the exit code, or exits with it where Slurm looks at that."""
        os.umask(UMASK)
        take_stale_variables(os.environ)
        for name, value in self.visible.items() if not self.on_slurm else ():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        folder, job = RunFolder(self.run_dir), job_id(self.on_slurm)
        if self.on_slurm and os.environ.get("SLURM_NODEID", "0") != "0":
            code = _Node(FrozenRun.load(folder), self.on_slurm).run_workers().exit_code
        else:
            code = self._run_first(folder, job)
        sys.stdout.flush()
        if self.on_slurm and code != EXIT_OK:
            sys.exit(code)  # submitit, which called this, would say COMPLETED
        return code

    def _run_first(self, folder: RunFolder, job: str) -> int:
        """The first node's: it has the lock of the run folder, and tells the end."""
        word, lock = outcome_file(folder, job), RunLock(folder.path, self.token)
        if word.is_file():
            word.unlink()  # of this job, before it was queued again
        try:
            lock.take_over(job, "slurm" if self.on_slurm else "local")
        except ConfigError as error:  # the folder is another run's by now
            write_json(word, asdict(Outcome(error.exit_code, detail=str(error), recorded=True)))
            return error.exit_code
        run = FrozenRun.load(folder)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0)) if self.on_slurm else 0
        outcome = _Node(run, self.on_slurm).run_workers()
        outcome.restarts += restarts
        lost = lock.check()
        if lost is not None:
            outcome = Outcome(EXIT_FAILED, detail=f"{lost}; what it computed is lost", recorded=True)
        code = summary.end(run.config, folder, outcome).exit_code
        write_json(word, asdict(dataclasses.replace(outcome, recorded=True)))
        signals = (outcome.preempted or {}).get("signals", [])
        if self.on_slurm and PREEMPT_SIGNAL.name in signals:
            _queue_again(restarts, run.config.launcher.max_requeues)
        # On SIGTERM alone it is Slurm that queues the job again, which is to find its lock; or it was cancelled.
        if not (self.on_slurm and (outcome.interrupted_by or signals == ["SIGTERM"])):
            lock.release()
        lock.let_go()
        return code


class _Node:
    """This node's place in the job.

    Args:
        run: the run.
        on_slurm: whether Slurm's variables count.
    """

    def __init__(self, run: FrozenRun, on_slurm: bool) -> None:
        self.config, self.folder = run.config, run.folder
        environ = os.environ if on_slurm else {}
        self.rank = int(environ.get("SLURM_NODEID", 0))
        self.count = int(self.config.launcher.nodes)
        self.restarts = int(environ.get("SLURM_RESTART_COUNT", 0))
        self.attempt = f"{environ.get('SLURM_JOB_ID', secrets.token_hex(4))}-{self.restarts}"
        if self.restarts:
            os.environ[REQUEUES_VARIABLE] = str(self.restarts)

    def run_workers(self) -> Outcome:
        """Check the hardware, meet the other nodes, and run this node's workers."""
        config = self.config
        try:
            backend = create_backend(config.backend)
            check_hardware(config, backend)
            hub.bring(config)
            with locked_cards(backend, config.nproc):
                endpoint = self._meet() if self.count > 1 else None
                if self.rank == 0:
                    summary.begin(config, self.folder, backend)
                launcher = _NodeLauncher(
                    nnodes=self.count,
                    rdzv_endpoint=endpoint,
                    rdzv_id=self.attempt,
                    max_restarts=config.launcher.max_restarts,
                    fork=config.launcher.fork,
                    timeout_s=config.launcher.timeout_s,
                    step_timeout_s=config.launcher.step_timeout_s,
                )
                return launcher.launch(self.folder, config.nproc, saves=task_class(config).saves_state)
        except ExpError as error:
            detail = f"{this_host()}: {error}"
            write_json(self._file("refused", self.rank), {"detail": detail})
            return Outcome(error.exit_code, detail=detail)

    def _file(self, kind: str, rank: int) -> Path:
        return self.folder.logs / f"{kind}-{self.attempt}-{rank}.json"

    def _meet(self) -> str:
        """Wait until every node is ready; the first one then chooses a port and tells the others.

        Chosen there and then, on the machine that will listen, so that two jobs on one node cannot take the same one.

        Raises:
            UnavailableError: a node cannot take part, or does not come.
        """
        write_json(self._file("ready", self.rank), {})
        if self.rank == 0:
            for other in range(1, self.count):
                self._await(self._file("ready", other), other)
            endpoint = f"{_own_name()}:{_free_port()}"
            write_json(self._file("meet", 0), {"endpoint": endpoint})
            return endpoint
        return str(self._await(self._file("meet", 0), 0)["endpoint"])

    def _await(self, path: Path, other: int) -> Any:
        """The content of a file that another node writes."""
        deadline = time.monotonic() + self.config.launcher.timeout_s
        while True:
            # Opened, not looked for: an NFS client may keep saying for a while that there is none.
            content = read_json(path)
            if content is not None:
                return content
            failed = read_json(self._file("refused", other))
            if failed is not None:
                raise UnavailableError(f"node {other} cannot take part: {failed['detail']}")
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"node {other} was not ready within launcher.timeout_s={self.config.launcher.timeout_s}; do all "
                    f"nodes see {self.folder.path}?"
                )
            time.sleep(_POLL_S)


def job_id(on_slurm: bool) -> str:
    """What submitit calls the job that this process is a task of."""
    environ = os.environ
    if not on_slurm:
        return environ.get("SUBMITIT_LOCAL_JOB_ID", str(os.getpid()))
    if "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


def outcome_file(folder: RunFolder, job: str) -> Path:
    """Where the first node of a job leaves what became of all of them, for whoever follows it."""
    return folder.logs / f"outcome-{job}.json"


def read_outcome(path: Path) -> Outcome | None:
    """The outcome in a file, or None."""
    content = read_json(path)
    if content is None:
        return None
    content["failures"] = [RankFailure(**failure) for failure in content["failures"]]
    return Outcome(**content)


def _own_name() -> str:
    """The name under which Slurm knows this node, where it resolves here; the host's otherwise."""
    name = os.environ.get("SLURMD_NODENAME", "")
    with contextlib.suppress(OSError):
        if name and socket.getaddrinfo(name, None):
            return name
    return this_host()


def _free_port() -> int:
    for _ in range(100):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe, contextlib.suppress(
            OSError
        ):
            probe.bind(("", port))
            return port
    raise UnavailableError(f"{this_host()}: no free port between {_PORTS.start} and {_PORTS.stop - 1}")


def _queue_again(restarts: int, most: int) -> None:
    """Have Slurm start the job anew; it ends this process."""
    if restarts >= most:
        print(f"not queued again: launcher.max_requeues={most}", flush=True)  # noqa: T201
        return
    print("queued again", flush=True)  # noqa: T201
    refused = slurm.requeue(os.environ["SLURM_JOB_ID"])
    if refused is None:
        time.sleep(_REQUEUE_PATIENCE_S)
    else:
        print(f"not queued again: {refused}", flush=True)  # noqa: T201
