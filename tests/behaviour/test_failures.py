"""A failure names its cause first, and only exp's own errors decide on the exit code."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import time

import pytest

from tests.behaviour.conftest import FORECAST, LONG, has_steps, losses, wait_for
from tests.conftest import Forked

USERS = """
import os, shutil, time
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from exp.forecasting.timebridge.model import TimeBridge

class Slow(TimeBridge):
    def __init__(self, *args, **kwargs):
        if os.environ.get("RANK") == "1":
            time.sleep(1000)
        super().__init__(*args, **kwargs)

@HOOKS.register_module()
class Leave(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if batch_idx == 1 and runner.rank == runner.world_size - 1:
            os._exit(int(os.environ["CODE"]))

@HOOKS.register_module()
class Bare(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        shutil.rmtree("run/logs")
        raise ValueError("lost")

@HOOKS.register_module()
class Stuck(Hook):
    def before_test_iter(self, runner, batch_idx, data_batch=None):
        if runner.rank == 1:
            time.sleep(1000)
"""


@pytest.fixture
def users(exp):
    (exp.folder / "users.py").write_text(USERS)
    return functools.partial(exp, "plugins=[users]", PYTHONPATH=str(exp.folder))


@pytest.mark.parametrize("code", ["75", pytest.param("0", marks=pytest.mark.extended)])
def test_what_a_rank_exits_with_is_data(exp, users, code):
    """75 would mean that the state is saved, 0 that all is done."""
    done = users(*FORECAST, "nproc=2", "hooks=[{type: users.Leave}]", "output_dir=run", CODE=code)
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 ")
    assert code in done.stderr.splitlines()[0]
    assert exp.result("run")["error"]["rank"] == 1


def test_what_a_job_of_a_sweep_exits_with_is_data(users):
    hook = ["hooks=[{type: users.Leave}]", "output_dir=sweep", "launcher=local"]
    done = users("-m", *FORECAST, *hook, "seed=1", CODE="0")
    assert done.returncode == 1
    assert "1 failed" in done.stdout


@pytest.mark.extended
def test_an_error_that_cannot_be_written_is_said_all_the_same(exp, users):
    done = users(*FORECAST, "hooks=[{type: users.Bare}]", "output_dir=run")
    assert done.returncode == 1
    assert "ValueError" in done.stderr.splitlines()[0]
    assert "users.py" in done.stderr.splitlines()[0]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("settings", "place"),
    [(["model._target_=users.Slow"], "__init__"), (["hooks=[{type: users.Stuck}]"], "before_test_iter")],
)
def test_the_rank_that_the_others_have_waited_for_is_named(users, settings, place):
    done = users(*FORECAST, *settings, "nproc=2", "launcher.timeout_s=8", "output_dir=run")
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 ")
    assert place in done.stderr.splitlines()[1]


def external(world_size: int, port: int, host: str = "127.0.0.1", rank: int = 0) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": host, "MASTER_PORT": str(port),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (external(2, 29500, "no.such.host"), "MASTER_ADDR"),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0", "MASTER_ADDR": "localhost",
             "MASTER_PORT": "29500", "SLURM_STEP_TASKS_PER_NODE": "2,1"},
            "SLURM_STEP_TASKS_PER_NODE=2,1",
        ),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_taken_is_refused_at_once(exp, place, named):
    done = exp(*FORECAST, "launcher=external", "output_dir=run", **place)
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[0]
    assert "whole number" not in done.stderr
    assert not exp.path("run").exists()


@pytest.mark.extended
def test_a_taken_port_and_a_peer_that_does_not_come_are_named_not_a_rank(exp):
    wanted = [*FORECAST, "launcher=external", "launcher.timeout_s=4"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        alone = exp(*wanted, "output_dir=alone", **external(2, port))
        taken.listen()
        done = exp(*wanted, "output_dir=taken", **external(2, port))
    for each, pid in ((alone, ""), (done, str(os.getpid()))):
        assert each.returncode == 1
        first = each.stderr.splitlines()[0]
        assert f"MASTER_PORT={port}" in first
        assert pid in first
        assert "failed: " not in first
        assert "frame #" not in each.stderr


def in_namespace(*options: str) -> list[str]:
    """The beginning of a command in namespaces of its own, as a container's."""
    if subprocess.run(["unshare", *options, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no namespaces")
    return ["unshare", *options]


def exp_in(exp, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=exp.folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.extended
def test_what_the_machine_lacks_is_said_in_one_line(exp, python):
    quick = [*python, *FORECAST]
    down = exp_in(exp, *in_namespace("-rn"), *quick, "nproc=2", "output_dir=down")
    assert down.returncode == 3
    assert "loopback" in down.stderr.splitlines()[0]
    assert not exp.path("down").exists()
    script = 'mount -t tmpfs -o ro none /dev/shm && exec "$@"'
    shared = exp_in(exp, *in_namespace("-rm"), "sh", "-c", script, "sh", *quick, "data.num_workers=1", "output_dir=shm")
    assert shared.returncode == 1
    assert "/dev/shm" in shared.stderr.splitlines()[0]
    few = exp_in(exp, "sh", "-c", 'ulimit -n 5; exec "$@"', "sh", *quick, "output_dir=few")
    assert few.returncode == 1
    assert few.stderr.count("error: ") == 1
    assert "ulimit -n" in next(line for line in few.stderr.splitlines() if line.startswith("error: "))


def test_a_deleted_current_folder_and_options_that_exclude_each_other_are_refused(exp):
    both = exp("-m", *FORECAST, "seed=1,2", "--cfg", "job")
    assert both.returncode == 2
    assert both.stderr.startswith("error: ")
    assert "--cfg" in both.stderr.splitlines()[0]
    gone = exp.folder / "gone"
    gone.mkdir()
    script = f"import os, runpy; os.rmdir({str(gone)!r}); runpy.run_module('exp', run_name='__main__')"
    process = Forked(gone, *FORECAST, script=script)
    errors = process.communicate(100)[1]
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1, errors


def test_a_foreign_line_and_a_renamed_checkpoint_do_no_harm(exp, copy_of):
    """The copy of an older checkpoint under the largest number is not the newest, and the newest is not set aside."""
    run = copy_of("forecast")
    checkpoints = run / "checkpoints"
    (checkpoints / "step_00000009.pth").write_bytes((checkpoints / "step_00000004.pth").read_bytes())
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[]\n")
    done = exp(*FORECAST, "max_steps=5", "output_dir=run", "resume=auto")
    assert done.returncode == 0, done.stderr
    assert "step_00000009.pth is a copy" in done.stdout
    assert max(losses(run)) in (4, 5)
    assert "step_00000009.pth" not in {path.name for path in checkpoints.iterdir()}


@pytest.mark.extended
def test_kill_9_leaves_no_folder_behind(exp, python, tmp_path_factory):
    place = tmp_path_factory.mktemp("t")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(place)}
    process = subprocess.Popen(
        [*python, *LONG, "data.num_workers=1", "output_dir=run"],
        cwd=exp.folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(has_steps(exp.path("run")), process)
        assert list(place.glob("*/listener-*"))
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 60
    while (left := [*place.glob("exp-*"), *place.glob("pymp-*")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_sigusr1_ends_in_one_line(exp, start):
    process = start(*LONG, "output_dir=run")
    wait_for(has_steps(exp.path("run")), process)
    process.send_signal(signal.SIGUSR1)
    errors = process.communicate(100)[1]
    assert process.returncode == 128 + signal.SIGUSR1
    assert errors.startswith("error: interrupted by SIGUSR1")
    assert exp.result("run")["status"] == "failed"
