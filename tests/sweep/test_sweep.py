"""-m on one machine: jobs packed side by side, frozen, recorded, gone on with."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time

import pytest
import yaml

from exp.launcher.submitit import in_slices
from tests.conftest import TINY, Forked

pytestmark = pytest.mark.slow

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


def test_results_are_ranked_and_reported(exp):
    done = exp(*SWEEP, "optim.lr=1e-5,1e-2", "seed=1")
    assert done.returncode == 0, done.stderr
    first, second = rows(exp)
    assert (first["optim.lr"], second["optim.lr"]) == ("0.01", "1e-05")
    assert float(first["mse"]) < float(second["mse"])
    alone = exp.train("alone", "optim.lr=1e-2", "seed=1")
    assert exp.result("sweep/1")["metrics"] == alone["metrics"]
    for name in ("sweep.json", "report.html"):
        assert exp.path(f"sweep/{name}").is_file()
    assert len(done.stdout.splitlines()) < 20
    again = exp("task=report", "run=sweep")
    assert again.returncode == 0
    assert "sweep/report.html" in again.stdout


def test_a_failed_job_is_shown_and_the_others_go_on(exp):
    done = exp(*SWEEP, "optim.lr=-1,1e-3,1e30", "log_every=1", "max_steps=8")
    assert done.returncode == 1, done.stdout
    assert "0 optim.lr=-1: optim: Adam does not take these settings: Invalid learning rate: -1.0" in done.stderr
    assert "2 optim.lr=1e+30: loss is " in done.stderr
    assert "Traceback" not in done.stderr
    states = {row["run"]: row["status"] for row in rows(exp)}
    assert states == {"0": "failed", "1": "completed", "2": "failed"}


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


def test_notice_saves_all_jobs_and_the_sweep_goes_on_where_it_was(exp):
    settings = ["seed=1,2,3", "max_steps=300", "max_epochs=10", "log_every=10", "sweep.parallel_jobs=2"]
    process = start(exp, *settings)
    wait_for(process, lambda: all(exp.path(f"sweep/{job}/metrics.jsonl").is_file() for job in (0, 1)))
    os.kill(process.pid, signal.SIGUSR2)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 75, output + errors
    assert "2 preempted, 1 not begun; " in output
    assert exp.result("sweep/0")["status"] == "preempted"
    assert not exp.path("sweep/2/result.json").exists()
    done = exp(*SWEEP, *settings, "sweep.resume=true")
    assert done.returncode == 0, done.stderr
    assert exp.result("sweep/0")["resumed_from"] is not None
    assert {row["status"] for row in rows(exp)} == {"completed"}


def test_nothing_is_left_when_the_sweep_is_killed(exp):
    process = start(exp, "seed=1,2", "max_steps=4000", "max_epochs=1000", "sweep.parallel_jobs=2")
    wait_for(process, lambda: exp.path("sweep/1/metrics.jsonl").is_file())

    def jobs():
        return subprocess.run(["pgrep", "-f", str(exp.path("sweep"))], capture_output=True).stdout.split()

    assert len(jobs()) >= 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 240
    while jobs():
        assert time.monotonic() < deadline
        time.sleep(0.1)


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


def test_a_grid_over_hardware(exp):
    done = exp(*SWEEP, "backend=cpu,gcu_simulated", "seed=1")
    assert done.returncode == 0, done.stderr
    assert {row["backend"] for row in rows(exp)} == {"cpu", "gcu"}
    assert len({round(float(row["mse"]), 5) for row in rows(exp)}) == 1


def test_optuna_searches_with_trials_side_by_side(exp):
    pytest.importorskip("optuna", reason="the extra 'optuna' is not installed")
    done = exp(
        *SWEEP, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=2",
        "optim.lr=tag(log, interval(1e-5, 1e2))",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(rows(exp)) == 3
    best = yaml.safe_load(exp.path("sweep/optimization_results.yaml").read_text())["best_params"]
    assert float(rows(exp)[0]["optim.lr"]) == pytest.approx(float(best["optim.lr"]), rel=1e-4)


def test_a_sweep_that_is_refused_or_only_shown_leaves_nothing(exp):
    refused = exp(*SWEEP, "precision=fp8,fp9")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    shown = exp(*SWEEP, "launcher=submitit", "launcher.dry_run=true", "seed=1,2,3")
    assert shown.returncode == 0, shown.stderr
    assert "#SBATCH --array=0-2%3" in shown.stdout.splitlines()
    assert list(exp.folder.iterdir()) == []


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
