"""launcher=submitit: runs as Slurm jobs, one task per node, which starts the torchrun launcher there."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any, Sequence

from exp.config.explain import nearest
from exp.config.schema import SubmititConfig
from exp.errors import ConfigError, UnavailableError
from exp.launcher.base import Launcher
from exp.launcher.follow import Followed, Watcher, follow, remember
from exp.launcher.job import log_file, run_job
from exp.launcher.outcome import Outcome
from exp.launcher.processes import start_module
from exp.runs import slurm
from exp.runs.lock import Holder

if TYPE_CHECKING:
    from pathlib import Path

    from exp.frozen import FrozenRun

__all__ = ["SubmititLauncher"]

_CLUSTERS = ("slurm", "local", "debug")
_AS_IN_SBATCH = ("partition", "account", "qos", "gres", "gpus_per_node", "constraint", "nodelist", "exclude")


class SubmititLauncher(Launcher):
    """Submits frozen runs, and follows them."""

    keys = SubmititConfig
    submits = True

    @classmethod
    def is_elsewhere(cls, config: Any) -> bool:
        """On the nodes of a cluster."""
        return bool(config.cluster == "slurm")

    def check(self, nproc: int) -> None:
        """Refuse what no cluster would take.

        Raises:
            ConfigError: a value is wrong.
            UnavailableError: there is no Slurm here.
        """
        given = vars(self.config)
        if given["cluster"] not in _CLUSTERS:
            hint = nearest(given["cluster"], _CLUSTERS)
            raise ConfigError(f"launcher.cluster={given['cluster']} is not one of {', '.join(_CLUSTERS)}{hint}")
        if given["signal_delay_s"] >= 60 * given["time_minutes"]:
            raise ConfigError(
                f"launcher.signal_delay_s={given['signal_delay_s']} is no less than the whole time limit of "
                f"launcher.time_minutes={given['time_minutes']}; lower it, or raise the limit"
            )
        of_slurm = {"dry_run=true": given["dry_run"], "nodes>1": given["nodes"] > 1, "setup": given["setup"]}
        wrong = [key for key, is_set in of_slurm.items() if is_set and given["cluster"] != "slurm"]
        if wrong:
            raise ConfigError(f"launcher.{wrong[0]} needs launcher.cluster=slurm")
        asks = given["cluster"] == "slurm" and not given["dry_run"]
        if asks and not (shutil.which("sbatch") and shutil.which("srun")):
            raise UnavailableError(
                "launcher=submitit found no sbatch and srun; run it where Slurm's commands are (a login node), or use "
                "launcher.cluster=local"
            )

    def launch(self, run: FrozenRun) -> Outcome:
        """Submit the run and follow it; see :meth:`launch_all`."""
        with Watcher() as watcher:
            return self.launch_all([run], watcher, run.folder.path / "slurm")[0]

    def preflight(self, runs: Sequence[FrozenRun], logs: Path) -> str | None:
        """Show the batch script, with ``launcher.dry_run=true``; otherwise ask Slurm whether it would take it.

        Raises:
            ConfigError: Slurm would not.
        """
        if self.config.cluster != "slurm":
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
            An outcome for each; one that says ``left`` where nobody waits.
        """
        if self.config.cluster == "debug":
            return [self._run_here(run, number, watcher) for number, run in enumerate(runs)]
        jobs = self._submit(runs, watcher, logs) if self.config.cluster == "slurm" else self._start(runs, watcher)
        if not self.config.wait:
            for job in jobs:
                watcher.say(f"  {job.id}  {job.folder.path}")
            return [Outcome(left=True) for _ in runs]
        outcomes = follow(jobs, watcher, self.config.poll_s, self.config.cancel_on_exit)
        for run, outcome in zip(runs, outcomes):
            if run.lock is not None and not outcome.left:
                run.lock.release(ended=True)
        return outcomes

    def _submit(self, runs: Sequence[FrozenRun], watcher: Watcher, logs: Path) -> list[Followed]:
        executor = self._executor(runs[0], logs)
        with executor.batch() if len(runs) > 1 else contextlib.nullcontext():
            added = [executor.submit(run_job, str(run.folder.path), _token(run), "slurm") for run in runs]
        jobs = [remember(run, Holder.me(_token(run), str(job.job_id), "slurm"), logs) for run, job in zip(runs, added)]
        base = jobs[0].id.partition("_")[0]
        what = f"job {base}" if len(runs) == 1 else f"job array {base} of {len(runs)} jobs"
        watcher.say(f"submitted {what}; squeue -j {base} shows it, scancel {base} ends it")
        return jobs

    @staticmethod
    def _start(runs: Sequence[FrozenRun], watcher: Watcher) -> list[Followed]:
        """Start a process for each run, which outlives this one."""
        jobs = []
        for run in runs:
            arguments = [str(run.folder.path), _token(run)]
            with log_file(run.folder).open("wb") as log:
                job = start_module("exp.launcher.job", *arguments, environment=os.environ, stdout=log, stderr=log)
            holder = Holder.me(_token(run), str(job.pid), "local", pid=job.pid)
            jobs.append(remember(run, holder, run.folder.logs))
        watcher.say(f"started process {', '.join(job.id for job in jobs)}")
        return jobs

    @staticmethod
    def _run_here(run: FrozenRun, number: int, watcher: Watcher) -> Outcome:
        watcher.state(number, "running")
        if run.lock is not None:
            run.lock.let_go()
        outcome = Outcome(run_job(str(run.folder.path), _token(run), "debug"), reported=True)
        watcher.ended(number, outcome)
        return outcome

    def _executor(self, run: FrozenRun, logs: Path) -> Any:
        """Submitit's executor for jobs like this run."""
        import submitit

        class Executor(submitit.SlurmExecutor):
            @classmethod
            def affinity(cls) -> int:
                """A script can be shown where there is no Slurm."""
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
            # Since Slurm 22.05 srun does not take this over from sbatch, and gives its task a single core.
            srun_args=[f"--cpus-per-task={cpus}", *given["srun_args"]],
            stderr_to_stdout=True,
            additional_parameters=extra,
            **({"exclusive": True} if given["exclusive"] else {}),
            **{key: given[key] for key in _AS_IN_SBATCH if given[key] is not None},
        )
        return executor


def _token(run: FrozenRun) -> str:
    assert run.lock is not None, "it has been written"
    return run.lock.token
