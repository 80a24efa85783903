"""launcher=submitit: submits runs as Slurm jobs and follows them; :func:`run_job` is the task that runs on each node.

Everything that a restart needs is in the run folder. A job that is requeued (by exp, by an administrator, or after a
node failure) runs the same task on the same folder, and continues from the newest checkpoint. Imports no torch.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from exp import hub
from exp.config.check import check_hardware
from exp.config.schema import SubmititConfig
from exp.errors import EXIT_FAILED, EXIT_OK, ConfigError, ExpError, UnavailableError, nearest
from exp.frozen import FrozenRun
from exp.hardware.cards import only
from exp.hardware.registry import create_backend
from exp.launcher.base import Launcher, Outcome, outcome_file, take_stale_variables
from exp.launcher.follow import Followed, Watcher, follow, remember
from exp.launcher.processes import REQUEUES_VARIABLE
from exp.launcher.torchrun import TorchrunLauncher
from exp.runs import slurm
from exp.runs.files import UMASK, read_json, write_json
from exp.runs.folder import RunFolder
from exp.runs.lock import RunLock
from exp.runs.status import PREEMPT_SIGNAL, Failures, RankFailure

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["SubmititLauncher", "locked_cards", "run_job"]

_HERE = ("local", "debug")
_AS_IN_SBATCH = (
    "partition", "account", "qos", "gres", "gpus_per_node", "constraint", "nodelist", "exclude", "exclusive",
)  # fmt: skip
_POLL_S = 0.1
_REQUEUE_PATIENCE_S = 300.0
_PORTS = range(20000, 32768)  # below the kernel's range of ephemeral ports


class SubmititLauncher(Launcher):
    """Submits frozen runs to Slurm, and follows them."""

    keys = SubmititConfig
    submits = True

    @classmethod
    def is_elsewhere(cls, config: Any) -> bool:
        """True for ``cluster=slurm``: the runs are on the nodes of a cluster."""
        return bool(config.cluster == "slurm")

    def check(self, nproc: int) -> None:
        """Check the keys of ``launcher`` before anything is submitted.

        Raises:
            ConfigError: a value is wrong.
            UnavailableError: this machine has no ``sbatch``.
        """
        given = self.config
        if given.cluster not in ("slurm", *_HERE):
            hint = nearest(given.cluster, ("slurm", *_HERE))
            raise ConfigError(f"launcher.cluster={given.cluster} is neither slurm nor debug{hint}")
        if given.signal_delay_s >= 60 * given.time_minutes:
            raise ConfigError(
                f"launcher.signal_delay_s={given.signal_delay_s} is not below the time limit "
                f"launcher.time_minutes={given.time_minutes}; lower it, or raise the limit"
            )
        if given.nodes > 1 and given.cluster != "slurm":
            raise ConfigError(f"launcher.nodes={given.nodes} needs launcher.cluster=slurm")
        if given.cluster == "slurm" and not given.dry_run and not shutil.which("sbatch"):
            raise UnavailableError(
                "launcher=submitit found no sbatch; run it where Slurm's commands are (a login node), or use "
                "launcher.cluster=debug"
            )

    def launch(self, run: FrozenRun) -> Outcome:
        """Submit the run and follow it (:meth:`launch_all`); with ``cluster=debug`` run it in this process."""
        if self.config.cluster in _HERE:
            assert run.lock is not None, "it has been written"
            run.lock.let_go()
            return Outcome(run_job(str(run.folder.path), run.lock.token, on_slurm=False), reported=True)
        with Watcher() as watcher:
            return self.launch_all([run], watcher, run.folder.path / "slurm")[0]

    def preflight(self, runs: Sequence[FrozenRun], logs: Path) -> str | None:
        """Return the batch script, with ``launcher.dry_run=true``; otherwise ask Slurm whether it would accept it.

        Raises:
            ConfigError: Slurm would refuse the script.
        """
        if self.config.cluster in _HERE and not self.config.dry_run:
            return None
        shown = copy.copy(self._executor(runs[0], logs))
        if len(runs) > 1:
            shown.parameters = {**shown.parameters, "map_count": len(runs)}
        script: str = shown._make_submission_file_text(shown._submitit_command_str, "")
        if self.config.dry_run:
            return script
        slurm.check_script(script)
        return None

    def launch_all(self, runs: Sequence[FrozenRun], watcher: Watcher, logs: Path) -> list[Outcome]:
        """Submit runs, several as a job array, and follow them.

        Returns:
            An outcome for each run; with ``launcher.wait=false`` they are marked ``left``.
        """
        jobs = self._submit(runs, watcher, logs)
        if not self.config.wait:
            for job in jobs:
                watcher.say(f"  {job.id}  {job.folder.path}")
            return [Outcome(left=True) for _ in runs]
        outcomes = follow(jobs, watcher, self.config.poll_s)
        for run, outcome in zip(runs, outcomes):
            if run.lock is not None and not outcome.left:
                run.lock.release(ended=True)
        return outcomes

    def _submit(self, runs: Sequence[FrozenRun], watcher: Watcher, logs: Path) -> list[Followed]:
        executor = self._executor(runs[0], logs)
        with executor.batch() if len(runs) > 1 else contextlib.nullcontext():
            added = [executor.submit(run_job, str(run.folder.path), run.lock and run.lock.token) for run in runs]
        jobs = [remember(run, str(job.job_id), logs) for run, job in zip(runs, added)]
        base = jobs[0].id.partition("_")[0]
        what = f"job {base}" if len(runs) == 1 else f"job array {base} of {len(runs)} jobs"
        watcher.say(f"submitted {what}; squeue -j {base} shows it, scancel {base} ends it")
        return jobs

    def _executor(self, run: FrozenRun, logs: Path) -> Any:
        """Submitit's executor, configured for jobs like this run; its output goes to the folder ``logs``."""
        import submitit

        class Executor(submitit.SlurmExecutor):
            @classmethod
            def affinity(cls) -> int:
                """Pretend that Slurm is there, so that a script can be shown on a machine without it."""
                return 1

        logging.getLogger("submitit").setLevel(logging.WARNING)
        given = vars(self.config)
        cpus = given["cpus_per_node"] or run.config.nproc
        extra = {"requeue": True, **given["extra"]}
        if given["mem_gib"] is not None:
            extra["mem"] = f"{round(given['mem_gib'] * 1024)}M"
        executor = Executor(logs)
        executor.update_parameters(
            job_name=given["job_name"] or run.config.name,
            time=given["time_minutes"],
            nodes=given["nodes"],
            ntasks_per_node=1,
            cpus_per_task=cpus,
            signal_delay_s=given["signal_delay_s"],
            array_parallelism=given["array_parallelism"],
            setup=list(given["setup"]) or None,
            # Since Slurm 22.05 srun does not inherit this from sbatch, and would give its task a single core.
            srun_args=[f"--cpus-per-task={cpus}", *given["srun_args"]],
            stderr_to_stdout=True,
            additional_parameters=extra,
            **{key: given[key] for key in _AS_IN_SBATCH if given[key] not in (None, False)},
        )
        return executor


class _NodeLauncher(TorchrunLauncher):
    """Treats SIGTERM as preemption, too: Slurm sends SIGKILL only after its grace time or KillWait."""

    preemption_signals = (PREEMPT_SIGNAL, signal.SIGTERM)


def run_job(run_dir: str, token: str | None, on_slurm: bool = True) -> int:
    """Run this node's workers to the end, through torchrun.

    Args:
        run_dir: the run folder.
        token: of the run folder's lock, which the job holds; the same after a requeue.
        on_slurm: whether this is a task of a Slurm job, one per node; False: the process that would have submitted the
            job runs it.

    Returns:
        The exit code. On Slurm the process exits with this code instead of returning, unless it is 0.
    """
    os.umask(UMASK)
    take_stale_variables()
    environ = os.environ if on_slurm else {}
    node, restarts = (int(environ.get(name, 0)) for name in ("SLURM_NODEID", "SLURM_RESTART_COUNT"))
    if restarts:
        os.environ[REQUEUES_VARIABLE] = str(restarts)
    job, folder = environ.get("SLURM_JOB_ID", str(os.getpid())), RunFolder(run_dir)
    attempt = f"{job}-{restarts}"
    if node > 0:
        code = _run_workers(FrozenRun.load(folder), attempt, node).exit_code
    else:
        if "SLURM_ARRAY_JOB_ID" in environ:
            job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
        code = _lead(folder, token, job, on_slurm, attempt, restarts)
    sys.stdout.flush()
    if on_slurm and code != EXIT_OK:
        sys.exit(code)  # otherwise submitit, which called this function, would report the job as COMPLETED
    return code


def _lead(folder: RunFolder, token: str | None, job: str, on_slurm: bool, attempt: str, restarts: int) -> int:
    """The part of the first node: take the lock of the run folder, run the workers, and record the outcome."""
    file, lock = outcome_file(folder, job), RunLock(folder.path, token)
    if file.is_file():
        file.unlink()  # written by this job before it was requeued
    try:
        lock.take_over(job, "slurm" if on_slurm else "local")
    except ConfigError as error:  # another run holds the folder by now
        write_json(file, asdict(Outcome(error.exit_code, detail=str(error), recorded=True)))
        return error.exit_code
    run = FrozenRun.load(folder)
    outcome = _run_workers(run, attempt, 0)
    outcome.restarts += restarts
    lost = lock.check()
    if lost is not None:
        outcome = Outcome(EXIT_FAILED, detail=f"{lost}; what it computed is lost", recorded=True)
    code = run.tell_end(outcome)
    outcome.recorded = True
    write_json(file, asdict(outcome))
    signals = (outcome.preempted or {}).get("signals", [])
    if on_slurm and PREEMPT_SIGNAL.name in signals:
        _queue_again(restarts, run.config.launcher.max_requeues)
    # After SIGTERM alone Slurm may requeue the job, which must find its lock then; or the job was cancelled.
    if not (on_slurm and (outcome.interrupted_by or signals == ["SIGTERM"])):
        lock.release()
    lock.let_go()
    return code


def _run_workers(run: FrozenRun, attempt: str, node: int) -> Outcome:
    """Check this node's hardware, agree with the other nodes on a rendezvous, and run this node's workers."""
    config, folder, endpoint = run.config, run.folder, None
    nodes, keys = int(config.launcher.nodes), ("max_restarts", "timeout_s", "step_timeout_s")
    meeting = folder.logs / f"meet-{attempt}.json"
    with contextlib.ExitStack() as cards:
        try:
            if node > 0:
                endpoint = _await(meeting, config.launcher.timeout_s)
            else:
                Failures(folder).forget()
                if nodes > 1:  # chosen on the machine that will listen, so that jobs on one node take different ports
                    endpoint = f"{socket.gethostname()}:{_free_port()}"
                    write_json(meeting, endpoint)
            backend = create_backend(config.backend)
            check_hardware(config, backend)
            hub.bring(config)
            cards.enter_context(locked_cards(backend, config.nproc))
        except ExpError as error:
            kind = type(error).__name__
            failure = RankFailure(node * config.nproc, 0, kind, str(error), error.exit_code, own=True)
            if nodes > 1:  # the launchers of the other nodes wait for this file
                Failures(folder).write(failure)
            return Outcome.of([failure])
        if node == 0:
            run.announce(backend)
        common = {key: config.launcher[key] for key in keys}
        return _NodeLauncher(nnodes=nodes, rdzv_endpoint=endpoint, **common).launch(run)


def _await(meeting: Path, timeout_s: float) -> str:
    """Wait for the rendezvous endpoint that the first node writes to ``meeting``.

    Raises:
        UnavailableError: the file has not come within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        content = read_json(meeting)  # opened, not tested for existence: an NFS client caches that a file is missing
        if content is not None:
            return str(content)
        time.sleep(_POLL_S)
    raise UnavailableError(
        f"the first node was not ready within launcher.timeout_s={timeout_s}; do all nodes see {meeting.parent.parent}?"
    )


@contextlib.contextmanager
def locked_cards(backend: Backend, nproc: int) -> Iterator[None]:
    """Context in which only ``nproc`` cards of this node are visible, none of them used by another job of exp.

    For schedulers that count cards but do not assign them. The lock of a card is an abstract Unix socket name: it is
    exclusive, shared by all users, and gone with its process. No card is locked if at most ``nproc`` cards are visible,
    or if the backend cannot hide cards.

    Raises:
        UnavailableError: fewer than ``nproc`` cards are free.
    """
    count = backend.device_count() if backend.exclusive_devices else 0
    if count <= nproc or not backend.visible_variables:
        yield
        return
    with contextlib.ExitStack() as locks:
        mine: list[int] = []
        for card in range(count):
            # A digest, because host and card can be longer than a socket name may be.
            name = hashlib.sha256(f"{socket.gethostname()}/{only(backend, [card])}".encode()).hexdigest()
            lock = locks.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):  # another job has the lock
                lock.bind(f"\0exp-card/{name}".encode())
                mine.append(card)
            if len(mine) == nproc:
                break
        if len(mine) < nproc:
            raise UnavailableError(
                f"{socket.gethostname()} has {len(mine)} free {backend.name} cards of {count}, but nproc={nproc}; let "
                "all jobs ask for their cards (launcher.gres), or for whole nodes (launcher.exclusive=true)"
            )
        os.environ.update(only(backend, mine))
        yield


def _free_port() -> int:
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _queue_again(restarts: int, most: int) -> None:
    """Have Slurm requeue the job, which ends this process."""
    refused = f"launcher.max_requeues={most}" if restarts >= most else slurm.requeue(os.environ["SLURM_JOB_ID"])
    print("queued again" if refused is None else f"not queued again: {refused}", flush=True)  # noqa: T201
    if refused is None:
        time.sleep(_REQUEUE_PATIENCE_S)
