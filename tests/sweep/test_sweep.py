"""-m on one machine: jobs packed side by side, frozen, recorded, gone on with."""

from __future__ import annotations

import json

from tests.behaviour.conftest import table, wait_for
from tests.conftest import TINY

SWEEP = ["-m", *TINY, "output_dir=sweep"]


def test_jobs_share_the_cards_and_each_sees_its_own(exp):
    """Eight simulated cards and two for each job: four at a time, if cores did not count."""
    done = exp(*SWEEP, "backend=gcu_simulated", "nproc=2", "seed=1,2", "sweep.parallel_jobs=2")
    assert done.returncode == 0, done.stderr
    records = [json.loads(exp.path(f"sweep/{job}/env.json").read_text())["devices"] for job in range(2)]
    cards = [{device["card"] for device in devices} for devices in records]
    assert [len(each) for each in (*cards, cards[0] & cards[1])] == [2, 2, 0]


def test_going_on_skips_what_is_done_and_knows_jobs_by_what_they_are(exp, start):
    own = exp.path("mine/optim/own.yaml")
    own.parent.mkdir(parents=True)
    written = "defaults: [adam, _self_]\nweight_decay: 0.001\n"
    own.write_text(written)
    sweep = ["--config-dir", "mine", *SWEEP, "optim=own", "sweep.parallel_jobs=1"]
    process = start(*sweep, "seed=2,3,3")
    wait_for(exp.path("sweep/0/config.yaml").is_file, process)
    own.write_text(written.replace("0.001", "123"))  # of no effect: all jobs are frozen
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert "weight_decay: 0.001" in exp.path("sweep/1/config.yaml").read_text()
    own.write_text(written)
    exp.path("sweep/1/result.json").unlink()  # of two jobs that are the same
    finished = exp.path("sweep/0/result.json").stat().st_mtime_ns
    done = exp(*sweep, "seed=1,2,3,3", "sweep.resume=true")
    assert done.returncode == 0, done.stderr
    assert "2 of 4 jobs are done already" in done.stdout
    assert exp.path("sweep/0/result.json").stat().st_mtime_ns == finished
    rows = {row["run"]: (row["seed"], row["status"]) for row in table(exp.path("sweep/sweep.csv"))}
    assert rows == {job: (seed, "completed") for job, seed in zip("0123", "2331")}
