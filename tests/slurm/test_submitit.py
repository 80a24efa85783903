"""launcher=submitit on a real Slurm: what users see when things go well, and when they do not."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, run_exp

LONG = ["max_steps=4000", "max_epochs=1000", "val_every=1000", "log_every=10"]
EXACT = ["max_steps=200", "max_epochs=10", "log_every=10", "checkpoint.every_epochs=0", "nproc=2"]


def hosts(result: dict) -> list[str]:
    return [device["host"] for device in result["devices"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """What a run of EXACT leaves that nobody has interrupted, wherever its two processes are."""
    folder = tmp_path_factory.mktemp("whole")
    done = run_exp(folder, *TINY, *EXACT, "output_dir=run")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def assert_same_weights(first: Path, second: Path) -> None:
    one, other = (torch.load(run / "checkpoints/step_00000200.pth") for run in (first, second))
    for name, weight in one["state_dict"].items():
        assert torch.equal(weight, other["state_dict"][name]), name


def test_a_job_is_followed_to_its_result(submit, result):
    code, said = submit("launcher.time_minutes=5", "launcher.mem_gib=1.5", "launcher.setup=[echo set up here]").end()
    assert code == 0, said
    assert "running on n" in said
    assert "MSE" in said
    assert result("run")["status"] == "completed"
    assert hosts(result("run"))[0] in ("n1", "n2")


def test_two_nodes_are_one_run(submit, result):
    code, said = submit("launcher.nodes=2", "nproc=2").end()
    assert code == 0, said
    assert hosts(result("run")) == ["n1", "n1", "n2", "n2"]
    assert result("run")["world_size"] == 4


def test_a_wrong_request_is_refused_before_it_is_submitted(submit, cluster, tmp_path):
    for setting, named in (
        ("launcher.partition=nope", "nope"),
        ("launcher.gres=gcu:99", "launcher."),
        ("launcher.time_minutes=1", "launcher.signal_delay_s"),
        ("+launcher.extra.gres=gcu:1", "launcher.gres"),
    ):
        code, said = submit(setting, "global_batch_size=64").end()
        assert code == 2, said
        assert said.startswith("error: ")
        assert named in said.splitlines()[0]
    assert cluster.jobs() == []
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_can_never_be_met_is_cancelled(submit, cluster, result):
    code, said = submit("launcher.partition=small", "launcher.time_minutes=20").end()
    assert code == 3, said
    assert "will never start" in said
    assert "PartitionTimeLimit" in said
    assert cluster.jobs() == []
    with pytest.raises(FileNotFoundError):  # code 3: nothing has been computed
        result("run")


def test_the_signal_before_the_time_limit_loses_no_step(submit, whole, result, cluster, tmp_path):
    running = submit(*EXACT)
    running.wait_for_steps()
    cluster.run("scancel", "--signal=USR2", running.job())
    code, said = running.end()
    assert code == 0, said + running.logs()
    assert "queued again" in said
    assert result("run")["restarts"] == 1
    step = int(result("run")["resumed_from"][-12:-4])
    assert f"preempted after step {step}" in running.logs()
    assert_same_weights(tmp_path / "run", whole)


def test_a_job_of_higher_priority_takes_both_nodes_and_gives_them_back(submit, whole, result, cluster, tmp_path):
    settings = [*EXACT[:-1], "nproc=1"]
    running = submit(*settings, "launcher.nodes=2")
    running.wait_for_steps()
    urgent = cluster.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"
    )
    code, said = running.end()
    assert code == 0, said + running.logs()
    assert urgent.stdout.strip() not in cluster.jobs()
    assert result("run")["restarts"] >= 1
    step = int(result("run")["resumed_from"][-12:-4])
    assert f"preempted after step {step}" in running.logs()
    assert_same_weights(tmp_path / "run", whole)


def test_sigterm_alone_loses_no_step(submit, result, cluster):
    """With the workers forked, as they are by default here, and nothing saved on the way."""
    running = submit(*LONG, "checkpoint.every_epochs=0", "nproc=2")
    running.wait_for_steps()
    job = running.job()
    cluster.run("scontrol", "requeue", job)
    running.wait_for(lambda: any(running.place.glob("run/checkpoints/step_*.pth")))
    running.wait_for(lambda: "resume: from" in "".join(p.read_text() for p in running.place.glob("run/logs/rank0.log")))
    cluster.run("scancel", job)
    code, said = running.end()
    assert code in (1, 75), said
    assert "CANCELLED" in said or "preempted" in said
    assert "preempted after step" in running.logs()


def test_a_failing_node_costs_what_was_not_saved(submit, result, cluster):
    running = submit(*EXACT, "checkpoint.every_steps=10")
    running.wait_for_steps()
    running.wait_for(lambda: any(running.place.glob("run/checkpoints/step_*.pth")))
    node = cluster.run("squeue", "-h", "-j", running.job(), "-o", "%N").stdout.strip()
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        code, said = running.end()
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)  # it may be back already
    assert code == 0, said + running.logs()
    assert int(result("run")["resumed_from"][-12:-4]) >= 10


def test_a_killed_rank_on_another_node_is_the_one_that_is_named(submit, result):
    running = submit(*LONG, "launcher.nodes=2", "nproc=2")
    running.wait_for_steps()
    os.kill(running.process_of("exp-rank3"), signal.SIGKILL)
    code, said = running.end()
    assert code == 1, said
    assert "rank 3 (local_rank 1, n2) failed: killed by SIGKILL" in said
    assert result("run")["error"]["rank"] == 3


def test_a_node_of_which_all_was_killed_is_named_and_no_rank_of_another(submit, result):
    running = submit(*LONG, "launcher.nodes=2", "nproc=1")
    running.wait_for_steps()
    for pid in [running.process_of(name, node="n2") for name in ("exp-rank1", "exp-agent")]:
        os.kill(pid, signal.SIGKILL)
    code, said = running.end()
    assert code == 1, said
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "n2" in error
    assert "rank 0" not in error
    assert result("run")["error"]["rank"] in (None, 1)


def test_a_job_that_dies_without_a_word_is_noticed(submit):
    running = submit(*LONG)
    running.wait_for_steps()
    os.kill(running.process_of("-m\0submitit.core._submit"), signal.SIGKILL)
    code, said = running.end()
    assert code == 1, said
    assert "is FAILED: it left no result" in said


def test_the_time_limit_ends_a_run_that_saves_nothing(submit):
    """A task without state cannot use the signal; one that ignores it would look the same."""
    stuck = "launcher.setup=[exec sleep 200]"
    code, said = submit(stuck, "launcher.time_minutes=1", "launcher.signal_delay_s=5").end()
    assert code == 1, said
    assert "is TIMEOUT: its time limit came" in said
    assert "launcher.time_minutes" in said


@pytest.mark.parametrize("cancel", [False, True])
def test_an_interrupt_leaves_or_cancels_the_job(submit, cluster, tmp_path, cancel):
    running = submit(*LONG, f"launcher.cancel_on_exit={cancel}")
    running.wait_for_steps()
    job = running.job()
    os.kill(running.process.pid, signal.SIGINT)
    code, said = running.end()
    assert code == 130, said
    if cancel:
        assert f"cancelled {job}" in said
        deadline = time.monotonic() + 240
        while cluster.jobs():
            assert time.monotonic() < deadline
            time.sleep(0.2)
    else:
        assert f"{job} will go on" in said
        assert cluster.jobs() == [job]
        assert not (tmp_path / "run" / "result.json").exists()


def test_the_same_command_follows_the_job_that_is_there(submit, cluster, result, tmp_path):
    """Killed followers leave one job, which has its folder while it waits to be started again, too."""
    running = submit(*EXACT)
    running.wait_for_steps()
    job = running.job()
    os.kill(running.process.pid, signal.SIGKILL)
    cluster.run("scancel", "--signal=USR2", job)
    code, said = submit(*EXACT).end()
    assert code == 0, said
    assert f"following job {job}" in said
    assert len(list((tmp_path / "run" / "slurm").glob("*_submitted.pkl"))) == 1
    assert result("run")["status"] == "completed"
    assert not (tmp_path / "run" / ".lock").exists()


def test_nobody_need_wait(submit, cluster, result):
    running = submit("launcher.wait=false")
    code, said = running.end()
    assert code == 0, said
    job = running.job()
    assert f"  {job}  " in said
    deadline = time.monotonic() + 240
    while job in cluster.jobs():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert result("run")["status"] == "completed"


def test_a_sweep_that_this_slurm_takes_in_two_arrays_only(submit, cluster, tmp_path):
    """It takes four jobs in one; of six, each has its own result, and those that fail end no others."""
    code, said = submit("seed=1,2,3", "optim.lr=0.001,-1", "launcher.array_parallelism=4", sweep=True).end()
    assert code == 1, said
    arrays = re.findall(r"submitted job array (\d+) of (\d) jobs", said)
    assert [int(jobs) for _, jobs in arrays] == [4, 2], said
    assert len({array for array, _ in arrays}) == 2
    folder = tmp_path / "run"
    scripts = sorted(path.read_text() for path in folder.glob("slurm/*_submission.sh"))
    assert ["--array=0-3%2" in script or "--array=0-1%2" in script for script in scripts] == [True] * 2
    results = [json.loads((folder / str(job) / "result.json").read_text()) for job in range(6)]
    assert [result["status"] for result in results] == ["completed", "failed"] * 3
    assert len({result["metric"] for result in results[::2]}) == 3, "of three seeds"
    with (folder / "sweep.csv").open(newline="") as file:
        seeds = {row["run"]: row["seed"] for row in csv.DictReader(file)}
    assert seeds == {str(job): str(1 + job // 2) for job in range(6)}
    assert "3 completed, 3 failed" in said
    assert "Invalid learning rate: -1.0" in said
    assert (folder / "report.html").is_file()
    assert cluster.jobs() == []


def test_jobs_on_one_node_take_different_cards(submit, cluster, tmp_path):
    """The cluster counts its cards, but gives no numbers to the jobs; these are one array."""
    code, said = submit(
        "backend=gcu_simulated", "launcher.nodelist=n1", "launcher.gres=gcu:4", "launcher.cpus_per_node=1", "nproc=2",
        "seed=1,2", "max_steps=200", "max_epochs=10", "val_every=200", sweep=True,
    ).end()  # fmt: skip
    assert code == 0, said
    assert len(re.findall(r"submitted job array \d+ of 2 jobs", said)) == 1
    assert len((tmp_path / "run" / "sweep.csv").read_text().splitlines()) == 3
    records = [json.loads((tmp_path / "run" / str(job) / "env.json").read_text())["devices"] for job in range(2)]
    cards = [{device["card"] for device in devices} for devices in records]
    assert [len(each) for each in cards] == [2, 2]
    assert not cards[0] & cards[1]


def test_the_same_without_slurm(exp):
    """In this process; in one of its own: tests/launcher/test_attach.py."""
    where = ["launcher=submitit", "launcher.cluster=debug"]
    done = exp(*TINY, *where, "nproc=2", "output_dir=run")
    assert done.returncode == 0, done.stderr + done.stdout
    assert exp.result("run")["status"] == "completed"
    assert "MSE" in done.stdout
    failed = exp(*TINY, *where, "optim.lr=-1", "output_dir=no")
    assert failed.returncode == 2
    assert "Invalid learning rate" in failed.stdout + failed.stderr
