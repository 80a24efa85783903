"""How ranks are started: by exp, by somebody else, on several nodes; and Slurm as far as it can be seen without one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.behaviour.conftest import LONG, STEADY, TINY, family, first_line, has_steps, losses, result, wait_for
from tests.conftest import clean_environment, free_port


def places(count: int) -> list[dict[str, str]]:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count),
              "LOCAL_WORLD_SIZE": str(count)}  # fmt: skip
    return [{**master, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@pytest.mark.legacy
def test_ranks_that_somebody_else_started_make_one_run(exp, start, trained):
    """With backend=auto, which is composed anew: each rank took the whole global batch."""
    words = ["backend=auto" if word == "backend=cpu" else word for word in STEADY]
    processes = [start(*words, "launcher=external", "output_dir=run", **place) for place in places(2)]
    said = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[1] == ("", "")  # rank 0 speaks for all
    assert exp.result("run")["world_size"] == 2
    assert losses(exp.path("run")) == pytest.approx(losses(trained("steady")), rel=1e-5)
    assert f"\nnproc: {len(processes)}\n" in (exp.path("run") / "config.yaml").read_text()


def test_variables_of_another_job_are_ignored_and_said(exp):
    """Left over in a shell, they made the next job wait for ranks that nobody starts."""
    stale = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "LOCAL_RANK": "3"}
    done = exp(*TINY, "max_steps=1", "output_dir=run", **stale)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: ")
    assert all(name in done.stderr.splitlines()[0] for name in stale)
    assert exp.result("run")["world_size"] == 1
    mpi = dict(zip((f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), "0202"))
    done = exp(*TINY, "output_dir=other", **mpi)  # one of several, that has not been told so: it would train alone
    assert done.returncode == 2
    assert "launcher=external" in done.stderr
    assert not exp.path("other").exists()


def test_a_rank_whose_master_never_comes_says_so_also_where_another_process_of_its_node_would(exp):
    """Without this line there would be nothing: no rank has a log before all have met."""
    _, place = places(2)
    done = exp(*TINY, "launcher=external", "launcher.timeout_s=1", "output_dir=run", **place)
    assert done.returncode == 1
    for words in (
        "MASTER_ADDR=127.0.0.1",
        f"MASTER_PORT={place['MASTER_PORT']}",
        "rank 1",
        "waited for",
        "timeout_s=1",
    ):
        assert words in first_line(done)
    assert "check that" in first_line(done)
    assert len(done.stderr.splitlines()) <= 3, "no stack of torch's C++ code"


@pytest.mark.extended
def test_torchrun_outside_gives_the_losses_of_torchrun_inside_also_when_it_restarts_the_ranks(exp, trained):
    outer = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    own, run = {"cwd": exp.folder, "env": clean_environment(), "text": True}, exp.path("run")
    words = ["launcher=external", "max_steps=30", "checkpoint.every_steps=1", "resume=auto", "output_dir=run"]
    process = subprocess.Popen([*outer, "--max_restarts=1", "-m", "exp", *STEADY, *words], **own)
    wait_for(has_steps(run, 3), process)
    os.kill(next(pid for pid, name in family(process.pid).items() if name == "exp-rank1"), signal.SIGKILL)
    assert process.wait(280) == 0
    expected, found = losses(trained("steady")), losses(run)
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-5)
    assert (exp.result("run")["restarts"], exp.result("run")["steps"]) == (1, 30)
    assert subprocess.run([*outer, "-m", "exp", *STEADY, "output_dir=alone"], **own, check=False).returncode != 0
    assert not exp.path("alone").exists()


@pytest.mark.extended
def test_the_rank_that_hangs_is_named(exp, start):
    settings = [*TINY, "max_steps=4000", "max_epochs=1000", "val_every=1000", "launcher=external", "output_dir=run"]
    processes = [start(*settings, "launcher.step_timeout_s=8", **place) for place in places(2)]
    wait_for(has_steps(exp.path("run")), *processes)
    (rank1,) = [pid for pid, name in family(processes[1].pid).items() if name == "exp-rank1"]
    os.kill(rank1, 19)
    said = [process.communicate(timeout=280) for process in processes]
    assert [process.returncode for process in processes] == [1, 1], said
    assert said[0][1].startswith("error: rank 1 "), said[0]


@pytest.mark.extended
def test_a_port_that_is_taken_is_named_and_jobs_of_one_machine_need_none(exp, start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = exp(*TINY, "launcher.nnodes=2", f"launcher.rdzv_endpoint=127.0.0.1:{port}", "output_dir=run")
        assert done.returncode == 2
        assert str(port) in first_line(done)
        taken = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [start(*TINY, "max_steps=2", "nproc=2", f"output_dir=job{job}", **taken) for job in (1, 2)]
        for process in processes:
            said = process.communicate(timeout=280)
            assert process.returncode == 0, said
    assert result(exp.path("job1"))["metrics"] == result(exp.path("job2"))["metrics"]


def test_a_job_for_slurm_is_shown_without_one_and_refused_where_there_is_none(exp, tmp_path):
    wanted = ["launcher=submitit", "launcher.nodes=2", "nproc=4", "output_dir=run"]
    asked = ["launcher.gres=gcu:8", "launcher.time_minutes=90", "launcher.account=me", "launcher.exclude=n9",
             "launcher.mem_gib=2", "+launcher.extra.mail_type=END", "launcher.setup=[module load it]"]  # fmt: skip
    shown = exp(*TINY, *wanted, *asked, "launcher.dry_run=true")
    assert shown.returncode == 0, shown.stderr
    script = shown.stdout.splitlines()
    options = ("nodes=2", "ntasks-per-node=1", "cpus-per-task=4", "gres=gcu:8", "time=90", "account=me", "exclude=n9",
               "mem=2048M", "mail-type=END", "requeue")  # fmt: skip
    assert {f"#SBATCH --{option}" for option in options} <= set(script)
    assert "module load it" in script
    assert any(line.startswith("#SBATCH --signal=") for line in script)
    assert not exp.path("run").exists()
    once = exp(*TINY, *wanted, "launcher.dry_run=true", "+launcher.extra.requeue=false").stdout.splitlines()
    assert [line for line in once if "requeue" in line] == ["#SBATCH --no-requeue"]
    for words, key in (
        (["backend=cuda"], "launcher.gres"),
        (["+launcher.extra.ntasks_per_node=2"], "launcher.extra.ntasks_per_node"),
        (["launcher.rdzv_endpoint=n1:29500"], "launcher.rdzv_endpoint"),
    ):
        done = exp(*TINY, *wanted, "launcher.dry_run=true", *words)
        assert done.returncode == 2, done.stdout
        assert key in first_line(done)
    (tmp_path / "bin").mkdir()
    done = exp(*TINY, *wanted, PATH=str(tmp_path / "bin"))
    assert done.returncode == 3
    assert "sbatch" in first_line(done) or "Slurm" in first_line(done)
    assert not exp.path("run").exists()


@pytest.mark.extended
def test_ranks_of_others_save_together_and_one_that_is_killed_or_told_otherwise_is_named(exp, start):
    settings = [*LONG, "launcher=external", "output_dir=run"]
    first, second = (start(*settings, **place) for place in places(2))
    wait_for(has_steps(exp.path("run")), first, second)
    second.send_signal(signal.SIGUSR2)  # notice to one
    said = [process.communicate(timeout=120) for process in (first, second)]
    assert [first.returncode, second.returncode] == [75, 75], said
    assert said[1] == ("", "")

    first, second = (start(*settings, "resume=auto", **place) for place in places(2))
    known = (exp.path("run") / "metrics.jsonl").stat().st_size
    wait_for(lambda: (exp.path("run") / "metrics.jsonl").stat().st_size > known, first, second)
    second.kill()
    errors = first.communicate(timeout=120)[1]
    assert first.returncode == 1
    assert errors.startswith("error: rank 1 "), errors

    several = zip(places(2), ([], ["optim.lr=0.01"]))
    processes = [start(*settings, *words, "output_dir=other", **place) for place, words in several]
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    assert said[0][1].startswith("error: rank 1 ")
    assert "optim.lr=0.01" in said[0][1].splitlines()[0]
    assert not exp.path("other").exists()


@pytest.mark.extended
def test_tasks_of_srun_are_refused_where_they_are_several(exp, python):
    """Each sees the other; one that is alone runs, with a warning."""
    srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}  # fmt: skip
    tasks = [
        subprocess.Popen([*python, *TINY], cwd=exp.folder, env=clean_environment(**srun, SLURM_PROCID=rank),
                         stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]  # fmt: skip
    for task in tasks:
        errors = task.communicate(timeout=100)[1]
        assert task.returncode == 2, errors
        assert "SLURM_PROCID=" in errors.splitlines()[0]
    assert list(exp.folder.iterdir()) == []
    done = exp(*TINY, "max_steps=1", **srun, SLURM_PROCID="0")
    assert done.returncode == 0, done.stderr
    assert "SLURM_STEP_NUM_TASKS=2" in done.stderr


@pytest.mark.extended
def test_a_node_that_never_comes_ends_the_run(exp):
    endpoint = f"127.0.0.1:{free_port()}"
    done = exp(
        *TINY, "launcher.nnodes=2", f"launcher.rdzv_endpoint={endpoint}", "launcher.timeout_s=4", "output_dir=run"
    )
    assert done.returncode == 1
    assert endpoint in first_line(done)
