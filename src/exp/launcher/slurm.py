"""What Slurm knows of jobs, with or without an accounting database."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Sequence

from exp.errors import ConfigError, UnavailableError

__all__ = [
    "JobState", "ask", "cancel", "check_script", "describe_end", "find_states", "never_starts", "requeue",
]  # fmt: skip

_TIMEOUT_S = 60
_NEVER = (
    "BadConstraints",
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "InvalidAccount",
    "InvalidQOS",
)
_HINTS = {
    "TIMEOUT": "its time limit came before its state was saved; raise launcher.time_minutes or launcher.signal_delay_s",
    "OUT_OF_MEMORY": "it used more memory than it had asked for; raise launcher.mem_gib",
    "CANCELLED": "somebody cancelled it (scancel)",
    "NODE_FAIL": "its node failed, and it was not queued again",
    "PREEMPTED": "another job took its place, and it was not queued again",
    "DEADLINE": "its deadline passed",
    "BOOT_FAIL": "its node did not start",
    "GONE": "Slurm no longer knows it",
}


@dataclass(frozen=True)
class JobState:
    """One job."""

    name: str = "GONE"
    """Slurm's word, such as ``PENDING``; ``GONE`` where nobody knows the job any more."""
    reason: str = ""
    """Why it waits, or why it ended."""
    nodes: str = ""
    exit_code: str = ""
    """``code:signal``, once it has ended."""

    @property
    def ended(self) -> bool:
        """Whether it will not run any more, unless somebody queues it again."""
        return self.name in (*_HINTS, "COMPLETED", "FAILED")


def find_states(ids: Sequence[str]) -> dict[str, JobState] | None:
    """The states of jobs, asked for in one call: ``squeue``, then ``scontrol``, then ``sacct`` for what is gone.

    Args:
        ids: ``123`` or ``123_4``.

    Returns:
        A state for each; None where Slurm does not answer.
    """
    bases = sorted({job.partition("_")[0] for job in ids})
    queue = ask(["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(bases)}",
                  "--format=%i|%T|%r|%N|"])  # fmt: skip
    if queue is None:
        return None
    found = {}
    for line in queue.splitlines():
        job, name, reason, nodes, *_ = line.strip().split("|")
        found[job] = JobState(name, "" if reason == "None" else reason, nodes)
    states = {}
    for job in ids:
        state = found.get(job)
        if state is None or state.ended:
            state = _from_controller(job) or state or _from_accounting(job) or JobState()
        states[job] = state
    return states


def _from_controller(job: str) -> JobState | None:
    """A job that has ended, with its exit code; the controller forgets it after MinJobAge (300 s)."""
    said = ask(["scontrol", "show", "job", "--oneliner", job])
    if not said:
        return None
    fields = dict(re.findall(r"(\w+)=(\S*)", said.splitlines()[0]))
    if "JobState" not in fields:
        return None
    reason = fields.get("Reason", "")
    nodes = fields.get("NodeList", "").replace("(null)", "")
    return JobState(fields["JobState"], "" if reason == "None" else reason, nodes, fields.get("ExitCode", ""))


def _from_accounting(job: str) -> JobState | None:
    said = ask(["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}",
                 "--format=JobID,State,Reason,NodeList,ExitCode"])  # fmt: skip
    for line in (said or "").splitlines():
        cells = line.split("|")
        if cells[0] == job:
            return JobState(cells[1].split()[0], cells[2].replace("None", ""), cells[3], cells[4])
    return None


def never_starts(state: JobState) -> bool:
    """Whether a job waits for what it will not get, such as more nodes than its partition has."""
    return state.name == "PENDING" and state.reason in _NEVER


def describe_end(job: str, state: JobState) -> str:
    """One line: which job, where, how it ended, and what to do."""
    where = f" on {state.nodes}" if state.nodes else ""
    hint = _HINTS.get(state.name)
    if hint is None:
        hint = "it left no result"
        code, _, number = state.exit_code.partition(":")
        if number not in ("", "0"):
            hint += f"; killed by signal {number}"
        elif code:
            hint += f"; exit code {code}"
    return f"Slurm job {job}{where} is {state.name}: {hint}"


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs; those that have ended already do not matter."""
    ask(["scancel", *ids])


def requeue(job: str) -> str | None:
    """Have Slurm start a running job anew; it ends this one. Returns why it does not."""
    try:
        done = _run(["scontrol", "requeue", job])
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()


def check_script(script: str) -> None:
    """Ask Slurm whether it would take a batch script, before anything is submitted.

    Raises:
        ConfigError: it would not.
        UnavailableError: it does not answer.
    """
    with tempfile.NamedTemporaryFile("w", prefix="exp-", suffix=".sh") as file:
        file.write(script)
        file.flush()
        done = _run(["sbatch", "--test-only", file.name])
    if done.returncode != 0:
        said = done.stderr.strip().replace("sbatch: error: ", "").replace("allocation failure: ", "")
        kind = UnavailableError if "contact" in said else ConfigError
        first, *rest = said.splitlines() or ["no reason given"]
        raise kind("\n  ".join([f"Slurm refuses this job: {first}; correct launcher.*", *rest]))


def ask(command: list[str]) -> str | None:
    """What a client of Slurm's prints; "" where it knows no such job, None where it gets no answer."""
    try:
        done = _run(command)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout
    return "" if "Invalid job id" in done.stderr else None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
