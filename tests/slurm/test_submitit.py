"""launcher=submitit on a real Slurm: what users see when things go well, and when they do not."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal

import pytest
import torch

from tests.behaviour.conftest import table, wait_for
from tests.conftest import TINY, run_exp

LONG = ["max_steps=4000", "max_epochs=1000", "val_every=1000", "log_every=10", "checkpoint.every_epochs=0"]
EXACT = ["max_steps=200", "max_epochs=10", "log_every=10", "checkpoint.every_epochs=0"]


def test_a_wrong_request_is_refused_before_it_is_submitted(submit, cluster, tmp_path):
    for setting, named in (
        ("launcher.partition=nope", "nope"),
        ("launcher.gres=gcu:99", "launcher."),
        ("launcher.time_minutes=1", "launcher.signal_delay_s"),
    ):
        said = submit(setting, "global_batch_size=64").end(code=2)
        assert said.startswith("error: ")
        assert named in said.splitlines()[0]
    assert cluster.jobs() == []
    assert list(tmp_path.iterdir()) == []


def test_a_job_of_higher_priority_takes_both_nodes_and_gives_them_back(submit, result, cluster, tmp_path):
    """It is saved when it has to end, and goes on from there to the weights of a run that nobody interrupts."""
    asked = ["launcher.time_minutes=5", "launcher.mem_gib=1.5", "launcher.setup=[echo set up here]"]
    running = submit(*EXACT, "launcher.nodes=2", *asked)
    running.wait_for_steps()
    cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    said = running.end()
    assert [words in said for words in ("running on n", "queued again", "MSE")] == [True] * 3, said
    assert result()["restarts"] >= 1
    assert f"preempted after step {int(result()['resumed_from'][-12:-4])}" in running.logs()
    done = run_exp(tmp_path, *TINY, *EXACT, "nproc=2", "output_dir=whole")
    assert done.returncode == 0, done.stderr
    runs = running.run, tmp_path / "whole"
    one, other = (torch.load(run / "checkpoints/step_00000200.pth")["state_dict"] for run in runs)
    assert [name for name, weight in one.items() if not torch.equal(weight, other[name])] == []


def test_sigterm_alone_loses_no_step(submit, cluster):
    """With the workers forked, as they are by default here, and nothing saved on the way."""
    running = submit(*LONG, "nproc=2")
    running.wait_for_steps()
    job = running.job()
    cluster.run("scontrol", "requeue", job)
    running.wait_for_checkpoint()
    log = running.run / "logs" / "rank0.log"
    wait_for(lambda: "resume: from" in log.read_text(), running.process)
    assert "preempted after step" in running.logs()
    cluster.run("scancel", job)
    running.process.communicate(timeout=280)
    assert running.process.returncode in (1, 75)  # cancelled, or preempted


def test_a_job_that_is_submitted_from_a_job_has_only_what_it_asks_for(cluster, python, tmp_path):
    """The variables of the outer job contradict the request of the inner one, and would end its srun."""
    inner = [*python, *TINY, "launcher=submitit", "launcher.poll_s=0.5", "launcher.mem_gib=1", "output_dir=run"]
    script = tmp_path / "outer.sh"
    script.write_text(f"#!/bin/bash\nexec {shlex.join(inner)}\n")
    asked = ["--mem-per-cpu=300M", "--ntasks=2", "--signal=USR1@30", "--time=9", f"--output={tmp_path / 'outer.log'}"]
    cluster.run("sbatch", f"--chdir={tmp_path}", *asked, str(script))
    wait_for(lambda: (tmp_path / "run/result.json").is_file() or not cluster.jobs(), seconds=280)
    assert (tmp_path / "run/result.json").is_file(), (tmp_path / "outer.log").read_text()
    assert "completed" in (tmp_path / "run/result.json").read_text()


def test_a_failing_node_costs_what_was_not_saved(submit, result, cluster):
    running = submit(*EXACT, "nproc=2", "checkpoint.every_steps=10")
    running.wait_for_checkpoint()
    node = cluster.run("squeue", "-h", "-j", running.job(), "-o", "%N").stdout.strip()
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        running.end()
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)  # it may be back already
    assert int(result()["resumed_from"][-12:-4]) >= 10


@pytest.mark.parametrize("killed", [["exp-rank3"], ["exp-rank2", "exp-rank3", "exp-agent"]])
def test_a_killed_rank_is_named_and_where_all_of_a_node_was_killed_no_rank_of_another(submit, result, killed):
    running = submit(*LONG, "launcher.nodes=2", "nproc=2")
    running.wait_for_steps()
    for pid in [running.pid_of(name, node="n2") for name in killed]:
        os.kill(pid, signal.SIGKILL)
    (error,) = [line for line in running.end(code=1).splitlines() if line.startswith("error: ")]
    assert "n2" in error
    if killed == ["exp-rank3"]:
        assert "rank 3 (local_rank 1, n2) failed: killed by SIGKILL" in error
    assert result()["error"]["rank"] in ([3] if killed == ["exp-rank3"] else [None, 2, 3])


def test_the_time_limit_ends_a_run_that_saves_nothing(submit):
    """A task without state cannot use the signal; one that ignores it would look the same."""
    stuck = "launcher.setup=[exec sleep 200]"
    said = submit(stuck, "launcher.time_minutes=1", "launcher.signal_delay_s=5").end(code=1)
    assert "is TIMEOUT: its time limit came" in said
    assert "launcher.time_minutes" in said


def test_an_interrupt_leaves_the_job(submit, cluster):
    running = submit(*LONG)
    running.wait_for_steps()
    job = running.job()
    running.process.send_signal(signal.SIGINT)
    assert f"{job} will continue" in running.end(code=130)
    assert cluster.jobs() == [job]
    assert not (running.run / "result.json").exists()


def test_a_job_whose_follower_was_killed_is_followed_again(submit, start, cluster, result):
    """Killed followers leave one job, which has its folder while it waits to be started again, too."""
    running = submit(*EXACT, "nproc=2")
    running.wait_for_steps()
    job = running.job()
    running.process.kill()
    cluster.run("scancel", "--signal=USR2", job)
    assert "task=attach run=run" in submit(*EXACT, "nproc=2").end(code=2)
    said, errors = (again := start("task=attach", "run=run")).communicate(timeout=280)
    assert (again.returncode, f"following job {job}" in said) == (0, True), errors
    assert len(list(running.run.glob("slurm/*_submitted.pkl"))) == 1
    assert result()["status"] == "completed"
    assert not (running.run / ".lock").exists()


def test_a_sweep_is_one_array(submit, cluster, result):
    """Each of its jobs has its own result, and those that fail end no others."""
    sweep = submit("seed=1,2,3", "optim.lr=0.001,1e30", "launcher.array_parallelism=4", sweep=True)
    said = sweep.end(code=1)
    assert re.findall(r"submitted job array \d+ of (\d) jobs", said) == ["6"], said
    assert "--array=0-5%4" in next(sweep.run.glob("slurm/*_submission.sh")).read_text()
    results = [result(str(job)) for job in range(6)]
    assert [each["status"] for each in results] == ["completed", "failed"] * 3
    assert len({each["metric"] for each in results[::2]}) == 3, "of three seeds"
    seeds = {row["run"]: row["seed"] for row in table(sweep.run / "sweep.csv")}
    assert seeds == dict(zip("012345", "112233"))
    assert "3 completed, 3 failed" in said
    assert "optim.lr" in said, "what to lower"
    wait_for(lambda: not cluster.jobs())  # one that has ended is listed for a moment


def test_jobs_on_one_node_take_different_cards(submit):
    """The cluster counts its cards, but gives no numbers to the jobs; these are one array."""
    node = ["launcher.nodelist=n1", "launcher.gres=gcu:4", "launcher.cpus_per_node=1", "nproc=2"]
    sweep = submit("backend=gcu_simulated", *node, "seed=1,2", *EXACT, "val_every=200", sweep=True)
    assert len(re.findall(r"submitted job array \d+ of 2 jobs", sweep.end())) == 1
    assert len(table(sweep.run / "sweep.csv")) == 2
    records = [json.loads((sweep.run / job / "env.json").read_text())["devices"] for job in "01"]
    cards = [{device["card"] for device in devices} for devices in records]
    assert [len(each) for each in (*cards, cards[0] & cards[1])] == [2, 2, 0]
