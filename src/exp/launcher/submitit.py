"""launcher=submitit: runs as Slurm jobs, one task per node, which starts the torchrun launcher there."""

from __future__ import annotations

import copy
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp.config.explain import nearest
from exp.config.schema import SubmititConfig
from exp.errors import ConfigError, UnavailableError
from exp.frozen import FrozenRun
from exp.hardware.registry import create_backend
from exp.launcher import slurm
from exp.launcher.base import Launcher, Watcher
from exp.launcher.follow import Followed, follow, remember
from exp.launcher.node import NodeTask
from exp.launcher.outcome import Outcome
from exp.launcher.status import StatusLine

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = ["SubmititLauncher", "array_size", "in_slices"]

_ARRAY_SIZE = 1001
_CLUSTERS = ("slurm", "local", "debug")
_TYPED = {  # options of sbatch that have a key of another name, which launcher.extra must not set again
    "time": "time_minutes",
    "cpus_per_task": "cpus_per_node",
    "mem": "mem_gib",
    "signal": "signal_delay_s",
    "array": "array_parallelism",
}


class SubmititLauncher(Launcher):
    """Submits frozen runs, and follows them.

    Args:
        **settings: :class:`exp.config.schema.SubmititConfig`.
    """

    keys = SubmititConfig
    submits = True

    @classmethod
    def is_elsewhere(cls, config: Any) -> bool:
        """On the nodes of a cluster."""
        return bool(config.cluster == "slurm")

    def __init__(self, **settings: Any) -> None:
        known = ("rdzv_id", "max_restarts", "fork", "timeout_s", "step_timeout_s")
        super().__init__(**{key: settings[key] for key in known})
        self.settings = settings
        self.nnodes = settings["nodes"]

    def check(self, nproc: int) -> None:
        """Refuse what no cluster would take.

        Raises:
            ConfigError: a value is wrong.
            UnavailableError: there is no Slurm here.
        """
        given = self.settings
        cluster = given["cluster"]
        if cluster not in _CLUSTERS:
            known = ", ".join(_CLUSTERS)
            raise ConfigError(f"launcher.cluster={cluster} is not one of {known}{nearest(cluster, _CLUSTERS)}")
        least = {"nodes": 1, "time_minutes": 1, "array_parallelism": 1, "signal_delay_s": 1, "max_requeues": 0}
        for key, value in least.items():
            if given[key] < value:
                raise ConfigError(f"launcher.{key}={given[key]} must be at least {value}")
        if given["signal_delay_s"] >= 60 * given["time_minutes"]:
            raise ConfigError(
                f"launcher.signal_delay_s={given['signal_delay_s']} is no less than the whole time limit of "
                f"launcher.time_minutes={given['time_minutes']}; lower it, or raise the limit"
            )
        for key in given["extra"]:
            option = str(key).replace("-", "_")
            typed = _TYPED.get(option, option)
            if typed in given:
                raise ConfigError(f"launcher.extra.{key} has a key of its own; set launcher.{typed}")
        if cluster != "slurm" and given["dry_run"]:
            raise ConfigError(f"launcher.dry_run=true shows a batch script, and launcher.cluster={cluster} has none")
        if cluster != "slurm" and self.nnodes > 1:
            raise ConfigError(f"launcher.nodes={self.nnodes} needs launcher.cluster=slurm")
        if cluster == "slurm" and not given["dry_run"] and not (shutil.which("sbatch") and shutil.which("srun")):
            raise UnavailableError(
                "launcher=submitit found no sbatch and srun; run it where Slurm's commands are (a login node), or use "
                "launcher.cluster=local"
            )

    def launch_run(self, run: FrozenRun) -> Outcome:
        """Submit the run and follow it; see :meth:`launch_all`."""
        with StatusLine() as status:
            return self.launch_all([run], status, run.folder.path / "slurm")[0]

    def launch(self, folder: RunFolder, nproc: int, saves: bool = True) -> Outcome:
        """Submit the run in ``folder`` and follow it; see :meth:`launch_all`."""
        del nproc, saves  # the node's task reads them in the folder
        return self.launch_run(FrozenRun.load(folder))

    def preflight(self, runs: Sequence[FrozenRun], logs: Path) -> str | None:
        """Show the batch script, with ``launcher.dry_run=true``; otherwise ask Slurm whether it would take it.

        Raises:
            ConfigError: Slurm would not.
        """
        if self.settings["cluster"] != "slurm":
            return None
        jobs = min(len(runs), array_size()) if len(runs) > 1 else 1  # those of the first array
        script = _script(self._executor(runs[0], logs), jobs)
        if self.settings["dry_run"]:
            return script
        slurm.check_script(script)
        return None

    def launch_all(self, runs: Sequence[FrozenRun], watcher: Watcher, logs: Path) -> list[Outcome]:
        """Submit runs, several as a job array (more than one where Slurm takes no array of so many), and follow them.

        Args:
            runs: with their folders written.
            watcher: is told what becomes of each.
            logs: folder of the batch scripts and of what jobs print.

        Returns:
            An outcome for each; one that says ``left`` where nobody waits.

        """
        if self.settings["cluster"] == "debug":
            return [self._run_here(run, number, watcher) for number, run in enumerate(runs)]
        executor = self._executor(runs[0], logs)
        on_slurm = self.settings["cluster"] == "slurm"
        tasks = [NodeTask(str(run.folder.path), on_slurm, _visible(run), _token(run)) for run in runs]
        jobs: list[Followed] = []
        slices = in_slices(tasks, array_size() if on_slurm and len(tasks) > 1 else len(tasks))
        if on_slurm and len(slices) > 1:  # each array has a limit of its own
            share = max(self.settings["array_parallelism"] // len(slices), 1)
            executor.update_parameters(array_parallelism=share)
        for part in slices:
            added = [executor.submit(part[0])] if len(part) == 1 else _submit_array(executor, part)
            jobs += [
                remember(run.folder, run.lock, job, self.settings["cluster"], logs)
                for job, run in zip(added, runs[len(jobs) :])
            ]
            watcher.say(_submitted([str(job.job_id) for job in added], on_slurm))
        if not self.settings["wait"]:
            for job in jobs:
                watcher.say(f"  {job.id}  {job.folder.path}")
            return [Outcome(left=True) for _ in runs]
        outcomes = follow(jobs, watcher, self.settings["poll_s"], self.settings["cancel_on_exit"])
        for run, outcome in zip(runs, outcomes):
            if run.lock is not None and not outcome.left:
                run.lock.release(ended=True)
        return outcomes

    @staticmethod
    def _run_here(run: FrozenRun, number: int, watcher: Watcher) -> Outcome:
        watcher.state(number, "running")
        if run.lock is not None:
            run.lock.let_go()
        code = NodeTask(str(run.folder.path), on_slurm=False, token=_token(run))()
        outcome = Outcome(code, reported=True)
        watcher.ended(number, outcome)
        return outcome

    def _executor(self, run: FrozenRun, logs: Path) -> Any:
        """Submitit's executor for jobs like this run."""
        import submitit

        logging.getLogger("submitit").setLevel(logging.WARNING)
        given = self.settings
        nproc = run.config.nproc
        if given["cluster"] == "local":
            executor = submitit.LocalExecutor(logs)
            executor.update_parameters(
                timeout_min=given["time_minutes"],
                signal_delay_s=given["signal_delay_s"],
                setup=list(given["setup"]),
                stderr_to_stdout=True,
            )
            return executor
        cpus = given["cpus_per_node"] or nproc
        extra = {"requeue": True, **given["extra"]}
        if given["mem_gib"] is not None:
            extra["mem"] = f"{round(given['mem_gib'] * 1024)}M"
        optional = ("partition", "account", "qos", "gres", "gpus_per_node", "constraint", "nodelist", "exclude")
        executor = _slurm_executor(submitit, logs)
        executor.update_parameters(
            job_name=given["job_name"] or run.config.name,
            time=given["time_minutes"],
            nodes=self.nnodes,
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
            **{key: given[key] for key in optional if given[key] is not None},
        )
        return executor


def _slurm_executor(submitit: Any, logs: Path) -> Any:
    class Executor(submitit.SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            """A script can be shown where there is no Slurm."""
            return 1

    return Executor(logs)


def _script(executor: Any, jobs: int) -> str:
    """What submitit will hand to sbatch."""
    shown = copy.copy(executor)
    shown.parameters = {**executor.parameters, **({"map_count": jobs} if jobs > 1 else {})}
    text: str = shown._make_submission_file_text(shown._submitit_command_str, "")
    return text


def _submit_array(executor: Any, tasks: Sequence[NodeTask]) -> list[Any]:
    with executor.batch():
        return [executor.submit(task) for task in tasks]


def array_size() -> int:
    """How many jobs this Slurm takes in one array (``MaxArraySize``); its own default where it does not say."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", slurm.ask(["scontrol", "show", "config"]) or "", re.MULTILINE)
    return max(int(found.group(1)), 1) if found else _ARRAY_SIZE


def in_slices(tasks: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """What is too much for one array, in parts of at most so many."""
    return [tasks[begin : begin + most] for begin in range(0, len(tasks), most)]


def _submitted(ids: Sequence[str], on_slurm: bool) -> str:
    if not on_slurm:
        return f"started process {', '.join(ids)}"
    base = ids[0].partition("_")[0]
    what = f"job {base}" if len(ids) == 1 else f"job array {base} of {len(ids)} jobs"
    return f"submitted {what}; squeue -j {base} shows it, scancel {base} ends it"


def _token(run: FrozenRun) -> str | None:
    return None if run.lock is None else run.lock.token


def _visible(run: FrozenRun) -> Mapping[str, str | None]:
    """Which cards the user has made visible: submitit's local executor would set variables of its own choice."""
    return {name: os.environ.get(name) for name in create_backend(run.config.backend).visible_variables}
