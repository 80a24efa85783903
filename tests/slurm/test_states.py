"""What Slurm knows of jobs, asked without an accounting database."""

from __future__ import annotations

import time

import pytest

from exp.launcher.slurm import JobState, describe_end, find_states, never_starts


@pytest.fixture
def batch(cluster, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)

    def submit(script: str, *options: str) -> str:
        return cluster.run(
            "sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}"
        ).stdout.strip()  # fmt: skip

    return submit


def wait_until_ended(*jobs: str) -> dict[str, JobState]:
    deadline = time.monotonic() + 240
    while True:
        states = find_states(jobs)
        assert states is not None
        if all(state.ended for state in states.values()):
            return states
        assert time.monotonic() < deadline, states
        time.sleep(0.2)


def test_every_kind_of_end(batch):
    good, bad, killed = batch("true"), batch("exit 3"), batch("kill -9 $$")
    states = wait_until_ended(good, bad, killed)
    assert [states[job].name for job in (good, bad, killed)] == ["COMPLETED", "FAILED", "FAILED"]
    assert "exit code 3" in describe_end(bad, states[bad])
    assert "killed by signal 9" in describe_end(killed, states[killed])
    assert describe_end(bad, states[bad]).startswith(f"Slurm job {bad} on n")


def test_an_array_and_what_waits(batch):
    array = batch("sleep 1", "--array=0-1")
    waiting = batch("true", "--hold")
    states = find_states([f"{array}_0", f"{array}_1", waiting])
    assert states is not None
    assert (states[waiting].name, states[waiting].reason) == ("PENDING", "JobHeldUser")
    assert not never_starts(states[waiting])
    ended = wait_until_ended(f"{array}_0", f"{array}_1")
    assert {state.name for state in ended.values()} == {"COMPLETED"}


def test_a_job_that_nobody_knows_and_a_slurm_that_does_not_answer(batch, monkeypatch):
    assert find_states(["1"]) == {"1": JobState("GONE")}
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    assert find_states(["1"]) is None


@pytest.mark.parametrize("name", ["TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "GONE"])
def test_each_end_says_what_it_means(name):
    line = describe_end("7", JobState(name, nodes="n1"))
    assert line.startswith(f"Slurm job 7 on n1 is {name}: ")
    assert "no result" not in line
