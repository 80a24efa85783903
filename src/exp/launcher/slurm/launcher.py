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
import shutil
import signal
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from exp import hub
from exp.errors import EXIT_FAILED, EXIT_OK, ConfigError, ExpError, UnavailableError, nearest
from exp.hardware.cards import visible_devices_env
from exp.launcher.base import FrozenRun, Launcher
from exp.launcher.execute import print_header, report_outcome
from exp.launcher.freeze import check_hardware
from exp.launcher.outcome import Outcome, ProgressDisplay, outcome_file
from exp.launcher.rank_environment import clear_stale_environment
from exp.launcher.slurm.follow import JOB_FILE, SubmittedJob, follow
from exp.launcher.slurm.keys import SubmititConfig
from exp.launcher.slurm.submission import asks_for_cards, check_options, environment_for
from exp.launcher.torchrun import TorchrunLauncher
from exp.runs import slurm
from exp.runs.failures import Failures, RankFailure
from exp.runs.files import UMASK, write_json
from exp.runs.folder import RunFolder
from exp.runs.job import PREEMPT_SIGNAL
from exp.runs.lock import RunLock
from exp.worker.processes import REQUEUES_VARIABLE

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["SubmititLauncher", "locked_cards", "run_job"]

_IN_PROCESS = ("local", "debug")
_SUBMITIT_KEYS = (
    "job_name", "nodes", "partition", "account", "qos", "gres", "constraint", "nodelist", "exclude", "exclusive",
    "array_parallelism", "setup",
)  # fmt: skip
_REQUEUE_PATIENCE_S = 300.0
_PORTS = range(20000, 32768)  # below the kernel's range of ephemeral ports


class SubmititLauncher(Launcher):
    """Submits frozen runs to Slurm, and follows them."""

    keys = SubmititConfig

    @classmethod
    def is_remote(cls, config: Any) -> bool:
        """True for ``cluster=slurm``: the runs are on the nodes of a cluster."""
        return bool(config.cluster == "slurm")

    def check(self, nproc: int) -> None:
        """Check the keys of ``launcher`` before anything is submitted.

        Raises:
            ConfigError: a value is wrong.
            UnavailableError: this machine has no ``sbatch``.
        """
        config = self.config
        if config.cluster not in ("slurm", *_IN_PROCESS):
            hint = nearest(config.cluster, ("slurm", *_IN_PROCESS))
            raise ConfigError(f"launcher.cluster={config.cluster} is neither slurm nor debug{hint}")
        if config.signal_delay_s >= 60 * config.time_minutes:
            raise ConfigError(
                f"launcher.signal_delay_s={config.signal_delay_s} is not below the time limit "
                f"launcher.time_minutes={config.time_minutes}; lower it, or raise the limit"
            )
        check_options(config.extra, config.srun_args)
        if config.rdzv_endpoint is not None or config.nnodes != config.nodes:
            key = "nnodes" if config.nnodes != config.nodes else "rdzv_endpoint"
            raise ConfigError(f"launcher.{key} cannot be set with launcher=submitit; set launcher.nodes instead")
        if config.nodes > 1 and config.cluster != "slurm":
            raise ConfigError(f"launcher.nodes={config.nodes} needs launcher.cluster=slurm")
        if config.cluster == "slurm" and not config.dry_run and not shutil.which("sbatch"):
            raise UnavailableError(
                "launcher=submitit found no sbatch; run it where Slurm's commands are (a login node), or use "
                "launcher.cluster=debug"
            )

    def launch(self, run: FrozenRun) -> Outcome:
        """Submit the run and follow it (:meth:`launch_all`); with ``cluster=debug`` run it in this process."""
        if self.config.cluster in _IN_PROCESS:
            code = run_job(str(run.folder.path))
            return replace(Outcome.read(outcome_file(run.folder, str(os.getpid()))) or Outcome(code), printed=True)
        with ProgressDisplay() as watcher:
            return self.launch_all([run], watcher, run.folder.path / "slurm")[0]

    def preflight(self, runs: Sequence[FrozenRun], logs: Path) -> str | None:
        """Return the batch script, with ``launcher.dry_run=true``; otherwise ask Slurm whether it would accept it.

        Raises:
            ConfigError: Slurm would refuse the script, or it asks for no cards although the backend needs some.
        """
        config = runs[0].config
        if self.config.cluster in _IN_PROCESS and not self.config.dry_run:
            return None
        backend = runs[0].backend
        needs_cards = not backend.capabilities.shared_device and not backend.simulate and runs[0].task.uses_hardware
        if needs_cards and not asks_for_cards(self.config):
            raise ConfigError(
                f"backend={backend.name} needs cards, and the job would ask Slurm for none; set launcher.gres=<the "
                f"cards' name there, such as gpu>:{config.nproc}, or launcher.exclusive=true for whole nodes"
            )
        executor = self._executor(runs[0], logs)
        script = _script(executor, len(runs))
        if self.config.dry_run:
            return script
        with environment_for(script, backend.visible_variables):
            slurm.check_script(script)
        return None

    def launch_all(self, runs: Sequence[FrozenRun], watcher: ProgressDisplay, logs: Path) -> list[Outcome]:
        """Submit runs, several as a job array, and follow them.

        Returns:
            An outcome for each run.
        """
        executor, backend = self._executor(runs[0], logs), runs[0].backend
        environment = environment_for(_script(executor, len(runs)), backend.visible_variables)
        with environment, executor.batch() if len(runs) > 1 else contextlib.nullcontext():
            added = [executor.submit(run_job, str(run.folder.path), run.lock and run.lock.token) for run in runs]
        cluster = slurm.local_cluster() or ""
        jobs = [SubmittedJob(str(job.job_id), run.folder, logs) for run, job in zip(runs, added)]
        for run, job in zip(runs, jobs):
            write_json(run.folder.logs / JOB_FILE, {"job": job.id, "cluster": cluster, "logs": str(logs)})
            if run.lock is not None:
                run.lock.transfer_to(job=job.id, cluster=cluster)
        base = jobs[0].id.partition("_")[0]
        what = f"job {base}" if len(runs) == 1 else f"job array {base} of {len(runs)} jobs"
        watcher.say(f"submitted {what}; squeue -j {base} shows it, scancel {base} ends it")
        return follow(jobs, watcher, self.config.poll_s)

    def _executor(self, run: FrozenRun, logs: Path) -> Any:
        """Submitit's executor, configured for jobs like this run; its output goes to the folder ``logs``."""
        import submitit

        class Executor(submitit.SlurmExecutor):
            @classmethod
            def affinity(cls) -> int:
                """Pretend that Slurm is there, so that a script can be shown on a machine without it."""
                return 1

        logging.getLogger("submitit").setLevel(logging.WARNING)
        settings = vars(self.config)
        cpus = settings["cpus_per_node"] or run.config.nproc
        extra = {"requeue": True, **{name: value for name, value in settings["extra"].items() if value is not None}}
        extra["requeue" if extra["requeue"] else "no-requeue"] = True
        extra = {name: value for name, value in extra.items() if value is not False}
        if settings["mem_gib"] is not None:
            extra["mem"] = f"{round(settings['mem_gib'] * 1024)}M"
        executor = Executor(logs)
        executor.update_parameters(
            time=settings["time_minutes"],
            ntasks_per_node=1,
            cpus_per_task=cpus,
            signal_delay_s=settings["signal_delay_s"],
            # Since Slurm 22.05 srun does not inherit this from sbatch, and would give its task a single core.
            srun_args=[f"--cpus-per-task={cpus}", *settings["srun_args"]],
            stderr_to_stdout=True,
            additional_parameters=extra,
            **{"job_name": run.config.name, **{key: settings[key] for key in _SUBMITIT_KEYS if settings[key]}},
        )
        return executor


def _script(executor: Any, jobs: int) -> str:
    """The batch script of one job, or of an array."""
    example = copy.copy(executor)
    if jobs > 1:
        example.parameters = {**example.parameters, "map_count": jobs}
    return str(example._make_submission_file_text(example._submitit_command_str, ""))


def run_job(run_dir: str, token: str | None = None) -> int:
    """Run this node's workers to the end, through torchrun.

    Args:
        run_dir: the run folder.
        token: if this is a task of a Slurm job, one per node: of the run folder's lock, which the job holds; the same
            after a requeue. None: the process that would have submitted the job runs it, and holds the lock.

    Returns:
        The exit code. On Slurm the process exits with this code instead of returning, unless it is 0.
    """
    os.umask(UMASK)
    clear_stale_environment()
    folder, job, node, restarts = RunFolder(run_dir), str(os.getpid()), 0, 0
    if token is not None:
        import submitit

        environment = submitit.JobEnvironment()
        job, node, restarts = environment.job_id, environment.node, int(os.environ.get("SLURM_RESTART_COUNT", 0))
    if restarts:
        os.environ[REQUEUES_VARIABLE] = str(restarts)
    is_first_node = node == 0
    code = (
        _run_first_node(folder, token, job, restarts)
        if is_first_node
        else _run_workers(FrozenRun.load(folder), node).exit_code
    )
    sys.stdout.flush()
    if token is not None and code != EXIT_OK:
        sys.exit(code)  # otherwise submitit, which called this function, would report the job as COMPLETED
    return code


def _run_first_node(folder: RunFolder, token: str | None, job: str, restarts: int) -> int:
    """The part of the first node: take the lock of the run folder, run the workers, and record the outcome."""
    file, lock = outcome_file(folder, job), RunLock(folder.path, token)
    file.unlink(missing_ok=True)  # written by this job before it was requeued
    try:
        if token is not None:
            lock.acquire(job)
    except ConfigError as error:  # another run holds the folder by now
        write_json(file, asdict(Outcome(error.exit_code, detail=str(error), result_written=True)))
        return error.exit_code
    run = FrozenRun.load(folder)
    outcome = _run_workers(run, 0)
    outcome.restarts += restarts
    lost = lock.check()
    if lost is not None:
        outcome = Outcome(EXIT_FAILED, detail=f"{lost}; what it computed is lost", result_written=True)
    code = report_outcome(run, outcome)
    outcome.result_written = True
    write_json(file, asdict(outcome))
    signals = (outcome.preempted or {}).get("signals", [])
    if token is not None and PREEMPT_SIGNAL.name in signals:
        _requeue(restarts, run.config.launcher.max_requeues)
    # After SIGTERM alone Slurm may requeue the job, which must find its lock then; or the job was cancelled.
    lock.release(keep_file=bool(outcome.interrupted_by) or signals == ["SIGTERM"])
    return code


def _run_workers(run: FrozenRun, node: int) -> Outcome:
    """Check this node's hardware, and run this node's workers."""
    config, folder, nodes, endpoint = run.config, run.folder, int(run.config.launcher.nodes), None
    first = node * config.nproc
    folder.clear_error_files(range(first, first + config.nproc))
    if nodes > 1:  # jobs that share a node have different numbers, and so different ports
        import submitit

        port = _PORTS[int(os.environ["SLURM_JOB_ID"]) % len(_PORTS)]
        endpoint = f"{submitit.JobEnvironment().hostnames[0]}:{port}"
    common = {key: config.launcher[key] for key in ("max_restarts", "timeout_s", "step_timeout_s")}
    launcher = TorchrunLauncher(nnodes=nodes, rdzv_endpoint=endpoint, **common)
    # SIGTERM is preemption, too: Slurm sends SIGKILL only after its grace time or KillWait.
    launcher.preemption_signals = (PREEMPT_SIGNAL, signal.SIGTERM)
    with contextlib.ExitStack() as cards:
        try:
            launcher.check(config.nproc)
            backend = run.backend
            check_hardware(config, backend)
            hub.download(config)
            cards.enter_context(locked_cards(backend, config.nproc))
        except ExpError as error:
            failure = RankFailure.of(error, first, 0)
            if nodes > 1:  # the launchers of the other nodes wait for this file
                Failures(folder).write(failure)
            return Outcome.of([failure])
        if node == 0:
            print_header(run)
        return launcher.launch(run)


@contextlib.contextmanager
def locked_cards(backend: Backend, nproc: int) -> Iterator[None]:
    """Context in which only ``nproc`` cards of this node are visible, none of them used by another job of exp.

    For schedulers that count cards but do not assign them. The lock of a card is an abstract Unix socket name: it is
    exclusive, shared by all users, and gone with its process. No card is locked if at most ``nproc`` cards are visible,
    or if the backend cannot hide cards.

    Raises:
        UnavailableError: fewer than ``nproc`` cards are free.
    """
    count = backend.device_count() if not backend.capabilities.shared_device else 0
    if count <= nproc or not backend.visible_variables:
        yield
        return
    with contextlib.ExitStack() as locks:
        cards: list[int] = []
        for card in range(count):
            # A digest, because host and card can be longer than a socket name may be.
            name = hashlib.sha256(f"{socket.gethostname()}/{visible_devices_env(backend, [card])}".encode()).hexdigest()
            lock = locks.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):  # another job has the lock
                lock.bind(f"\0exp-card/{name}".encode())
                cards.append(card)
            if len(cards) == nproc:
                break
        if len(cards) < nproc:
            raise UnavailableError(
                f"{socket.gethostname()} has {len(cards)} free {backend.name} cards of {count}, but nproc={nproc}; let "
                "all jobs ask for their cards (launcher.gres), or for whole nodes (launcher.exclusive=true)"
            )
        os.environ.update(visible_devices_env(backend, cards))
        yield


def _requeue(restarts: int, most: int) -> None:
    """Have Slurm requeue the job, which ends this process."""
    refused = f"launcher.max_requeues={most}" if restarts >= most else slurm.requeue(os.environ["SLURM_JOB_ID"])
    print("queued again" if refused is None else f"not queued again: {refused}", flush=True)  # noqa: T201
    if refused is None:
        time.sleep(_REQUEUE_PATIENCE_S)
