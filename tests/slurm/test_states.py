"""What Slurm knows of jobs, asked without an accounting database."""

from __future__ import annotations

from exp.launcher.slurm import JobState, describe_end, find_states
from tests.behaviour.conftest import wait_for


def test_jobs_that_have_ended_and_one_that_waits(cluster):
    def batch(script: str, *options: str) -> str:
        return cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}").stdout.strip()

    array = batch("true", "--array=0-1")
    jobs = [f"{array}_0", f"{array}_1", batch("exit 3"), batch("kill -9 $$")]
    held = batch("true", "--hold")
    wait_for(lambda: all(state.ended for state in find_states(jobs).values()))
    states = find_states([*jobs, held])
    assert [states[job].name for job in jobs] == ["COMPLETED", "COMPLETED", "FAILED", "FAILED"]
    assert (states[held].name, states[held].reason) == ("PENDING", "JobHeldUser")
    assert describe_end(jobs[2], states[jobs[2]]).startswith(f"Slurm job {jobs[2]} on n")


def test_a_job_that_nobody_knows_and_a_slurm_that_does_not_answer(cluster, monkeypatch):
    assert find_states(["1"]) == {"1": JobState("GONE")}
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    assert find_states(["1"]) is None


def test_an_end_that_slurm_explains_is_told_with_its_meaning():
    line = describe_end("7", JobState("OUT_OF_MEMORY", nodes="n1"))
    assert line.startswith("Slurm job 7 on n1 is OUT_OF_MEMORY: ")
    assert "launcher.mem_gib" in line
