"""Asks Slurm about jobs, with squeue, scontrol and sbatch; needs no accounting database."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from typing import Sequence

from exp.errors import ConfigError, UnavailableError

_TIMEOUT_S = 60
_END_REASONS = {
    "TIMEOUT": "its time limit came before its state was saved; raise launcher.time_minutes or launcher.signal_delay_s",
    "OUT_OF_MEMORY": "it used more memory than it had asked for; raise launcher.mem_gib",
    "CANCELLED": "it was cancelled (scancel)",
    "NODE_FAIL": "its node failed, and it was not queued again",
    "PREEMPTED": "another job took its place, and it was not queued again",
    "DEADLINE": "its deadline passed",
    "BOOT_FAIL": "its node did not start",
    "GONE": "Slurm no longer knows it; sacct may know more",
    "COMPLETED": "it left no result",
    "FAILED": "it left no result",
}


@dataclass(frozen=True)
class JobState:
    """State of one job.

    Attributes:
        name: Slurm's name of the state, such as ``PENDING``; ``GONE`` if Slurm does not know the job (any more).
        reason: why the job waits, or why it ended.
    """

    name: str = "GONE"
    reason: str = ""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job will not run any more, unless it is requeued."""
        return self.name in _END_REASONS


def find_states(ids: Sequence[str]) -> dict[str, JobState] | None:
    """The states of jobs, by one call of squeue; Slurm forgets an ended job after MinJobAge (300 s by default).

    Args:
        ids: job ids, ``123`` or ``123_4``.

    Returns:
        A state for each id; None if Slurm does not answer.
    """
    bases = sorted({job.partition("_")[0] for job in ids})
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N"]
    done = _run_command([*command, f"--jobs={','.join(bases)}"])
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        return None
    rows = (line.strip().split("|") for line in done.stdout.splitlines())
    states = {job: JobState(name, reason.replace("None", ""), nodes) for job, name, reason, nodes in rows}
    return {job: states.get(job, JobState()) for job in ids}


def local_cluster() -> str | None:
    """The cluster that Slurm's commands ask here, ``name@host:port`` of its controller: names alone are not unique.

    Returns:
        None if Slurm does not answer.
    """
    output = _run_command(["scontrol", "show", "config"]).stdout
    settings = dict(re.findall(r"^(\w+)(?:\[0\])?\s*= *(\S+)", output, re.MULTILINE))
    if "ClusterName" not in settings:
        return None
    return "{ClusterName}@{SlurmctldHost}:{SlurmctldPort}".format_map(
        {"SlurmctldHost": "", "SlurmctldPort": "", **settings}
    )


def describe_end(job: str, state: JobState) -> str:
    """One line for the user: which job, on which nodes, how it ended, and what to do."""
    where = f" on {state.nodes}" if state.nodes else ""
    return f"Slurm job {job}{where} is {state.name}: {_END_REASONS[state.name]}"


def requeue(job: str) -> str | None:
    """Have Slurm requeue a running job, which ends its processes; return the reason if Slurm refuses."""
    done = _run_command(["scontrol", "requeue", job])
    return None if done.returncode == 0 else done.stderr.strip()


def check_script(script: str) -> None:
    """Ask Slurm whether it would accept a batch script, before anything is submitted.

    Raises:
        ConfigError: Slurm would refuse the script.
        UnavailableError: Slurm does not answer.
    """
    done = _run_command(["sbatch", "--test-only"], script)
    if done.returncode != 0:
        text = done.stderr.strip().replace("sbatch: error: ", "").replace("allocation failure: ", "")
        first, *rest = text.splitlines() or ["no reason given"]
        if find_states(["1"]) is None:  # other commands fail, too
            raise UnavailableError(f"Slurm does not answer: {first}", "is its controller up?", rest)
        raise ConfigError(f"Slurm refuses this job: {first}", "correct launcher.*", rest)


def _run_command(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a Slurm command, with ``text`` as stdin; a command that is missing or takes longer than 60 s has failed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}  # would filter
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
