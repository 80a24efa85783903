"""Sweeps on one machine: jobs are frozen, run side by side, ranked, and gone on with."""

from __future__ import annotations

import os
import signal

import pytest

import exp as package
from tests.behaviour.conftest import STEADY, family, first_line, gone, losses, snapshot, table, wait_for

SWEEP = ["-m", *STEADY, "output_dir=sweep"]


def test_jobs_are_ranked_a_failed_one_is_shown_and_the_sweep_goes_on_with_what_is_not_done(exp, trained):
    done = exp(*SWEEP, "optim.lr=1e-5,1e30,5e-4", "log_every=1")
    assert done.returncode == 1, done.stdout
    assert "optim.lr" in done.stderr
    assert "Traceback" not in done.stderr
    rows = table(exp.path("sweep/sweep.csv"))
    assert [(row["run"], row["status"]) for row in rows] == [("2", "completed"), ("0", "completed"), ("1", "failed")]
    assert losses(exp.path("sweep/2")) == losses(trained("steady"))  # a job is the run that it would be alone
    assert exp.path("sweep/report.html").is_file()

    frame = package.open_sweep(exp.path("sweep"))
    assert list(frame["optim.lr"])[:2] == [5e-4, 1e-5]
    assert package.open_run(frame.folder[0]).config.optim.lr == 5e-4

    before = snapshot(exp.path("sweep/0"))
    refused = exp(*SWEEP, "optim.lr=1e-5,1e-3")
    assert refused.returncode == 2
    assert "sweep.resume" in refused.stderr
    done = exp(*SWEEP, "optim.lr=1e-5,1e-3", "sweep.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert snapshot(exp.path("sweep/0")) == before
    assert "1 completed, 1 done before" in done.stdout
    rows = {row["optim.lr"]: row["status"] for row in table(exp.path("sweep/sweep.csv"))}
    assert rows["0.001"] == rows["1e-05"] == "completed"


@pytest.mark.extended
def test_a_sweep_that_is_refused_or_only_shown_leaves_nothing(exp):
    for words in (["precision=fp8,fp9"], ["launcher=submitit,local"], ["seed=1,2", "optim.typo=3"]):
        done = exp(*SWEEP, *words)
        assert done.returncode == 2, (words, done.stderr)
        assert first_line(done).startswith("error: ")
    shown = exp(*SWEEP, "launcher=submitit", "launcher.dry_run=true", "seed=1,2,3")
    assert shown.returncode == 0, shown.stderr
    assert any(line.startswith("#SBATCH --array=0-2") for line in shown.stdout.splitlines())
    assert list(exp.folder.iterdir()) == []


@pytest.mark.extended
def test_notice_saves_all_jobs_and_a_kill_leaves_none(exp, start):
    settings = [
        *SWEEP,
        "seed=1,2,3",
        "max_steps=300",
        "max_epochs=10",
        "checkpoint.every_steps=0",
        "sweep.parallel_jobs=2",
    ]
    process = start(*settings)
    wait_for(lambda: all(exp.path(f"sweep/{job}/metrics.jsonl").is_file() for job in (0, 1)), process)
    os.kill(process.pid, signal.SIGUSR2)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 75, output + errors
    assert exp.result("sweep/0")["status"] == "preempted"
    assert not exp.path("sweep/2/result.json").exists()
    process = start(*settings, "sweep.resume=true")
    wait_for(lambda: exp.path("sweep/2/metrics.jsonl").is_file() or process.poll() is not None)
    everybody = family(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: gone(everybody), seconds=60)
    done = exp(*settings, "sweep.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["status"] for row in table(exp.path("sweep/sweep.csv"))} == {"completed"}
    assert exp.result("sweep/0")["resumed_from"] is not None
