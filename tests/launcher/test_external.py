"""launcher=external: processes that somebody else has started make one run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exp.errors import ConfigError
from exp.launcher.place import Place, given_group, suggested_group
from exp.launcher.processes import stat_of
from tests.conftest import TINY, clean_environment

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
WANTED = Place(3, 4, 1, 2, "127.0.0.1", 29500)
EXTERNAL = [*TINY, "launcher=external", "output_dir=run"]
LONG = ["max_steps=4000", "max_epochs=1000", "val_every=1000", "log_every=2", "checkpoint.every_epochs=0"]


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        (
            "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ],
)  # fmt: skip
def test_each_launchers_variables_give_the_place(names):
    values = ["3", "4", "1", "2(x2)" if names[0].startswith("SLURM") else "2"]
    assert Place.of({**dict(zip(names, values)), **MASTER}) == WANTED
    assert WANTED.nodes == 2
    assert Place.of(WANTED.environment()) == WANTED


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": None}, "RANK is not set, but WORLD_SIZE=4"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR, MASTER_PORT is not set"),
        ({"LOCAL_RANK": None}, "one process per node, or pod: LOCAL_RANK=0"),
        ({"RANK": "4"}, "RANK must be at least 0 and below WORLD_SIZE: RANK=4 WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_RANK must be at least 0 and below LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "5"}, "every node must have as many processes"),
        ({"LOCAL_WORLD_SIZE": "4"}, "on one node LOCAL_RANK must be RANK"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        ({"RANK": "first"}, "RANK=first is no whole number"),
        (dict.fromkeys(TORCH), "finds none"),
    ],
)
def test_variables_that_do_not_go_together_are_refused(change, text):
    given = {**TORCH, **MASTER, **change}
    with pytest.raises(ConfigError, match=re.escape(text)):
        Place.of({name: value for name, value in given.items() if value is not None})


def test_leftovers_are_told_from_a_living_group():
    whole = {**TORCH, **MASTER}
    assert given_group(whole).startswith("RANK=3 WORLD_SIZE=4 ")
    assert given_group({name: value for name, value in whole.items() if name != "LOCAL_WORLD_SIZE"}) is not None
    assert given_group({**whole, "WORLD_SIZE": "1"}) is None
    assert given_group({**whole, "RANK": "7"}) is None
    assert given_group({name: value for name, value in whole.items() if name != "MASTER_PORT"}) is None
    gone = {**whole, "MASTER_ADDR": "192.0.2.1"}  # an address that nobody has (RFC 5737)
    assert given_group(gone) is None
    assert given_group({**gone, "TORCHELASTIC_RUN_ID": "none"}) is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], env={**gone, "RANK": "2"}, stdin=subprocess.PIPE):
        assert given_group(gone) is not None


OMPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}  # fmt: skip
SBATCH = {name: value for name, value in SRUN.items() if "STEP" not in name}  # as a batch script has it


@pytest.mark.parametrize(
    ("given", "refused", "suggested"),
    [
        (OMPI, True, True),
        (MPICH, True, True),
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "1"}, False, False),
        ({**MPICH, "PMI_SIZE": "1"}, False, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False, False),
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "two"}, False, False),
        # Left over of torch's, below an mpirun of one process.
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "1", **TORCH, **MASTER, "MASTER_ADDR": "192.0.2.1"}, False, False),
        (SRUN, False, True),
        ({**SRUN, "PMI_RANK": "0", "PMI_SIZE": "2"}, False, True),  # srun --mpi=pmi2
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, False, False),  # srun -n1 --pty bash
        (SBATCH, False, False),
        ({}, False, False),
    ],
)
def test_groups_of_mpi_and_srun_are_known_without_a_master(given, refused, suggested):
    assert (given_group(given) is not None) is refused
    assert (suggested_group(given) is not None) is suggested
    assert given_group(given, 2) is None, "one agent on each of two nodes is as it should be"
    assert suggested_group(given, 2) is None


@pytest.mark.parametrize("given", [OMPI, MPICH])
def test_one_of_a_group_of_mpi_is_refused(exp, given):
    done = exp(*TINY, **given)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: this process was started as one of several (")
    assert "launcher=external takes this place" in done.stderr
    assert list(exp.folder.iterdir()) == []


def test_tasks_of_srun_are_refused_where_they_are_several(start, exp):
    """Each sees the other, though they do not begin at one time; one that is alone runs, with a warning."""
    processes = [start("exp", *TINY, **{**SRUN, "SLURM_PROCID": "0"})]
    time.sleep(0.5)
    processes.append(start("exp", *TINY, **{**SRUN, "SLURM_PROCID": "1"}))
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 2, errors
        assert errors.startswith("error: this process was started as one of several (SLURM_PROCID="), errors
    assert list(exp.folder.iterdir()) == []
    done = exp(*TINY, "max_steps=1", **SRUN)
    assert done.returncode == 0, done.stderr
    assert "SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=2 tell of several" in done.stderr


@pytest.mark.slow
def test_mpirun_may_start_one_agent_on_each_node(start, exp):
    settings = ["launcher=torchrun", "launcher.nnodes=2", f"launcher.rdzv_endpoint=127.0.0.1:{free_port()}"]
    ranks = ("0", "1")
    processes = [
        start("exp", *TINY, *settings, "output_dir=run", **{**OMPI, "OMPI_COMM_WORLD_RANK": rank}) for rank in ranks
    ]
    for process in processes:
        said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    assert exp.result("run")["world_size"] == 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(*command: str, **environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=tmp_path, env=clean_environment(**environment),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def group(start):
    """Two processes with their places, started by hand."""

    def begin(*settings: str, of_second: tuple = ()) -> list[subprocess.Popen]:
        port = str(free_port())
        places = [Place(rank, 2, rank, 2, "127.0.0.1", int(port)) for rank in (0, 1)]
        more = [settings, (*settings, *of_second)]
        return [start("exp", *EXTERNAL, *more[each.rank], **each.environment()) for each in places]

    return begin


def wait_for(condition, processes=(), seconds=120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def has_steps(folder: Path):
    return lambda: (folder / "metrics.jsonl").is_file() and '"train"' in (folder / "metrics.jsonl").read_text()


def test_notice_to_one_saves_on_all_and_a_killed_rank_is_named(group, exp):
    """And what it has saved, it goes on from."""
    first, second = group(*LONG)
    wait_for(has_steps(exp.path("run")), [first, second])
    second.send_signal(signal.SIGUSR2)
    said = [process.communicate(timeout=120) for process in (first, second)]
    assert [first.returncode, second.returncode] == [75, 75], said
    step = exp.result("run")["steps"]
    assert exp.result("run")["status"] == "preempted"
    assert [path.name for path in exp.path("run").glob("checkpoints/step*")] == [f"step_{step:08d}.pth"]
    assert f"preempted after step {step}" in said[0][0]
    assert said[1] == ("", "")  # rank 0 speaks for all

    first, second = group(*LONG, "resume=auto")
    begun = f"after step {step}"
    log = exp.path("run") / "logs" / "rank1.log"
    wait_for(lambda: begun in log.read_text(), [first, second])
    before = exp.path("run").joinpath("metrics.jsonl").stat().st_size
    wait_for(lambda: exp.path("run").joinpath("metrics.jsonl").stat().st_size > before, [first, second])
    second.kill()
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 1
    assert errors.startswith("error: rank 1 (local_rank 1, node 0) failed: RankLost: gone without a word"), errors
    assert exp.result("run")["error"]["rank"] == 1


@pytest.mark.slow
def test_the_rank_that_hangs_is_named(group, exp):
    processes = group(*LONG, "launcher.step_timeout_s=5")
    wait_for(has_steps(exp.path("run")), processes)
    everybody = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    mine = [pid for pid in everybody if stat_of(pid)[1:2] == [str(processes[1].pid)]]
    assert len(mine) == 1
    os.kill(mine[0], signal.SIGSTOP)
    said = [process.communicate(timeout=280) for process in processes]
    assert [process.returncode for process in processes] == [1, 1], said
    assert re.match(r"error: rank 1 \(local_rank 1, .*\) failed: RankHung: .*it is stopped \(SIGSTOP\)", said[0][1])
    assert list((exp.path("run") / "logs").glob("stuck-*")) == []


@pytest.mark.slow
def test_ranks_with_different_commands_are_refused(group, exp):
    first, second = group(of_second=("optim.lr=0.01",))
    said = [process.communicate(timeout=120) for process in (first, second)]
    assert [first.returncode, second.returncode] == [2, 2], said
    assert "error: rank 1 (" in said[0][1]
    assert "was given another command than rank 0: optim.lr=0.01 instead of nothing" in said[0][1]
    assert said[1] == ("", "")
    assert not exp.path("run").exists()


@pytest.mark.slow
def test_torchrun_outside_gives_the_same_losses_as_inside(start, exp):
    port = free_port()
    command = ["torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=x", "-m", "exp", *EXTERNAL]
    processes = [start(*command) for _ in range(2)]
    for process in processes:
        said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    assert exp.result("run")["world_size"] == 2
    inside = exp.train("inside", "nproc=2", "launcher=torchrun")
    assert exp.losses("run") == exp.losses("inside")
    assert exp.result("run")["metrics"] == inside["metrics"]


@pytest.mark.slow
def test_under_torchrun_it_has_to_be_asked_for(start, exp):
    process = start("torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", "-m", "exp", *TINY)
    _, errors = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "error: this process was started as one of several (RANK=" in errors
    assert "launcher=external takes this place; launcher=torchrun nproc=N" in errors
    assert list(exp.folder.iterdir()) == []
