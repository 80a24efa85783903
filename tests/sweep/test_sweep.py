"""-m on one machine: jobs packed side by side, frozen, recorded, gone on with."""

from __future__ import annotations

import csv
import json
import os
import signal
import time

from exp.launcher.submitit import in_slices
from tests.conftest import TINY, Forked

SWEEP = ["-m", *TINY, "output_dir=sweep"]


def rows(exp) -> list[dict[str, str]]:
    with exp.path("sweep/sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def start(exp, *arguments: str, options: tuple[str, ...] = ()) -> Forked:
    return Forked(exp.folder, *options, *SWEEP, *arguments, new_session=True)


def wait_for(process: Forked, condition, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_jobs_share_the_cards_and_each_sees_its_own(exp):
    """Eight simulated cards and two for each job: four at a time, if cores did not count."""
    done = exp(*SWEEP, "backend=gcu_simulated", "nproc=2", "seed=1,2", "sweep.parallel_jobs=2", "plots=false")
    assert done.returncode == 0, done.stderr
    records = [json.loads(exp.path(f"sweep/{job}/env.json").read_text())["devices"] for job in range(2)]
    cards = [{device["card"] for device in devices} for devices in records]
    assert [len(each) for each in cards] == [2, 2]
    assert not cards[0] & cards[1]
    assert len(rows(exp)) == 2


def test_going_on_skips_what_is_done_and_knows_jobs_by_what_they_are(exp):
    folder = exp.path("mine/optim")
    folder.mkdir(parents=True)
    written = "defaults: [adam, _self_]\nweight_decay: 0.001\n"
    (folder / "own.yaml").write_text(written)
    own = ("--config-dir", "mine")
    process = start(exp, "optim=own", "seed=2,3", "sweep.parallel_jobs=1", options=own)
    wait_for(process, lambda: exp.path("sweep/0/config.yaml").is_file())
    (folder / "own.yaml").write_text(written.replace("0.001", "123"))  # of no effect: all jobs are frozen
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert "weight_decay: 0.001" in exp.path("sweep/1/config.yaml").read_text()
    (folder / "own.yaml").write_text(written)
    finished = exp.path("sweep/0/result.json").stat().st_mtime_ns
    refused = exp(*own, *SWEEP, "optim=own", "seed=1,2,3")
    assert refused.returncode == 2
    assert "sweep.resume=true" in refused.stderr
    done = exp(*own, *SWEEP, "optim=own", "seed=1,2,3", "sweep.resume=true", "sweep.parallel_jobs=1")
    assert done.returncode == 0, done.stderr
    assert "2 of 3 jobs are done already" in done.stdout
    assert exp.path("sweep/0/result.json").stat().st_mtime_ns == finished
    assert {row["run"]: row["seed"] for row in rows(exp)} == {"0": "2", "1": "3", "2": "1"}


def test_an_interrupt_before_any_job_has_begun_is_one(exp):
    process = start(exp, "seed=range(0,100)")
    wait_for(process, lambda: exp.path("sweep/0/config.yaml").is_file())
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 130, output + errors
    assert errors.startswith("error: interrupted"), errors
    assert "not begun; " in output
    assert "sweep.resume=true" in output
    assert "Traceback" not in errors


def test_a_sweep_too_large_for_one_array_is_several(exp, tmp_path_factory):
    programs = tmp_path_factory.mktemp("bin")
    (programs / "scontrol").write_text("#!/bin/sh\necho 'MaxArraySize            = 40'\n")
    (programs / "scontrol").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    shown = exp(*SWEEP, "launcher=submitit", "launcher.dry_run=true", "seed=range(0,50)", PATH=path)
    assert shown.returncode == 0, shown.stderr
    assert "freezing 50 jobs" in shown.stdout.splitlines()
    assert "#SBATCH --array=0-39%40" in shown.stdout.splitlines(), "the first of two arrays"
    assert [len(part) for part in in_slices(list(range(50)), 40)] == [40, 10]
