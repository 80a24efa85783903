"""A failure names its cause first, and only exp's own errors decide on the exit code."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import time

import pytest

from tests.behaviour.conftest import FORECAST, LONG, family, gone, has_steps, losses, wait_for

USERS = """
import os, shutil, signal, subprocess, sys, time, urllib.error
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from exp.backends.cpu import CpuBackend
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
            eval(os.environ["HOW"])

@HOOKS.register_module()
class Crash(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.rank < runner.world_size - 1:
            return
        if os.fork() == 0:
            raise SystemExit(0)  # not the rank
        os.wait()
        reads, writes = os.pipe()
        if os.fork() == 0:  # a daemon, as careless code makes them
            os.setsid()
            if os.fork() == 0:
                os.write(writes, b"%d" % os.getpid())
                time.sleep(1000)
            os._exit(0)
        others = [subprocess.Popen(["sleep", "1000"], **how) for how in ({"env": {}}, {"start_new_session": True})]
        with open("left", "w") as file:
            file.write(" ".join([os.read(reads, 9).decode(), *(str(each.pid) for each in others)]))
        os.kill(os.getpid(), signal.SIGSEGV)

@HOOKS.register_module()
class Offline(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.rank == runner.world_size - 1:
            raise urllib.error.URLError(ConnectionResetError(104, "Connection reset by peer"))

class Full(TimeBridge):
    def forward(self, *args, **kwargs):
        raise RuntimeError("GCU out of memory. Tried to allocate 20.00 MiB. GCU 0 has a total capacity of 1 GiB")

class Hangs(type(CpuBackend.collectives)):
    def destroy(self):
        time.sleep(1000)

class NeverDone(CpuBackend):
    collectives = Hangs("gloo", gloo=True)

@HOOKS.register_module()
class Ask(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        breakpoint() if os.environ["ASK"] == "breakpoint" else input()

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


@pytest.mark.parametrize(
    ("nproc", "how", "named"),
    [
        (1, "os._exit(0)", "exited with code 0 in step 2"),
        (2, "os._exit(75)", "exited with code 75 in step 2"),
        pytest.param(1, "sys.exit(0)", "sys.exit(0)", marks=pytest.mark.extended),
        (1, "(_ for _ in ()).throw(KeyboardInterrupt)",
         "KeyboardInterrupt: raised before the work was done (users.py, line "),
    ],
)  # fmt: skip
def test_what_a_rank_exits_with_is_data(exp, users, nproc, how, named):
    """75 would mean that the state is saved, 0 that all is done: success is a written result."""
    done = users(*FORECAST, f"nproc={nproc}", "hooks=[{type: users.Leave}]", "output_dir=run", HOW=how)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: rank {nproc - 1} ")
    assert named in done.stderr.splitlines()[0]
    assert exp.result("run")["status"] == "failed"
    assert exp.result("run")["error"]["rank"] == nproc - 1


def test_a_crash_is_named_and_what_user_code_has_forked_is_ended(exp, users):
    done = users(*FORECAST, "hooks=[{type: users.Crash}]", "output_dir=run")
    assert done.returncode == 1
    assert "failed: killed by SIGSEGV" in done.stderr.splitlines()[0]
    assert exp.result("run")["error"]["type"] == "SIGSEGV"
    left = [int(pid) for pid in (exp.folder / "left").read_text().split()]
    assert len(left) == 3
    assert gone(left)
    assert "users.py" in (exp.path("run") / "logs" / "rank0.log").read_text()  # its stack


def test_a_connection_of_user_code_is_not_that_of_a_rank(users):
    done = users(*FORECAST, "nproc=2", "hooks=[{type: users.Offline}]", "output_dir=run")
    first = done.stderr.splitlines()[0]
    assert first.startswith("error: rank 1 "), first
    assert "URLError" in first
    assert "(users.py, line " in first


@pytest.mark.parametrize("ask", ["breakpoint", pytest.param("input", marks=pytest.mark.extended)])
def test_who_asks_a_terminal_is_told_how_to_have_one_and_has_it(users, ask):
    arguments = [*FORECAST, "hooks=[{type: users.Ask}]", "output_dir=run"]
    done = users(*arguments, ASK=ask)
    assert done.returncode == 1
    assert "users.py" in done.stderr.splitlines()[0]
    assert "launcher.in_process=true" in done.stderr.splitlines()[0]
    here = users(*arguments, "launcher.in_process=true", ASK=ask)  # where stdin is empty
    assert here.returncode == 1
    assert ("BdbQuit" if ask == "breakpoint" else "EOFError") in here.stderr.splitlines()[0]
    assert users(*arguments, "launcher.in_process=true", "nproc=2").returncode == 2


def test_the_cause_is_waited_for_however_busy_the_node_is(exp, start):
    """As if nothing that looks after rank 1 had its turn for seconds."""
    process = start(*LONG, "nproc=2", "output_dir=run")
    wait_for(has_steps(exp.path("run")), process)
    pids = {name: pid for pid, name in family(process.pid).items()}
    busy = [pids[name] for name in ("exp-agent", "exp-fork-server", "exp-guard1") if name in pids]
    for pid in busy:
        os.kill(pid, signal.SIGSTOP)
    os.kill(pids["exp-rank1"], signal.SIGSEGV)
    time.sleep(8)
    for pid in busy:
        os.kill(pid, signal.SIGCONT)
    errors = process.communicate(100)[1]
    assert process.returncode == 1
    assert errors.startswith("error: rank 1 "), errors
    assert "failed: killed by SIGSEGV" in errors.splitlines()[0]


@pytest.mark.parametrize(("batch", "advice"), [
    (["batch_size=7"], "batch_size=1 accumulate=7 keeps the global batch of 7"),
    pytest.param(["batch_size=1"], "a smaller model", marks=pytest.mark.extended),
])  # fmt: skip
def test_the_advice_of_a_full_device_keeps_the_global_batch(users, batch, advice):
    words = [word for word in FORECAST if "batch_size" not in word]
    done = users(*words, *batch, "model._target_=users.Full", "output_dir=run")
    assert done.returncode == 1
    assert advice in done.stderr.splitlines()[0]


@pytest.mark.extended
def test_a_result_is_written_before_the_ranks_part(exp, users):
    """A process group that hangs when it is destroyed costs some seconds, and not the result."""
    done = users(*FORECAST, "nproc=2", "backend._target_=users.NeverDone", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["status"] == "completed"
    assert "in destroy" in (exp.path("run") / "logs" / "rank1.log").read_text()


@pytest.mark.extended
def test_a_killed_fork_server_is_named_and_no_rank(exp, start):
    process = start(*LONG, "nproc=2", "output_dir=run")
    wait_for(has_steps(exp.path("run")), process)
    pids = family(process.pid)  # this process itself has the name of the tests' own fork server
    os.kill([pid for pid, name in pids.items() if name == "exp-fork-server"][-1], signal.SIGKILL)
    errors = process.communicate(100)[1]
    assert process.returncode == 1
    assert errors.startswith("error: exp-fork-server"), errors
    assert "killed by SIGKILL" in errors.splitlines()[0]
    assert gone(pids)


def test_what_a_job_of_a_sweep_exits_with_is_data(users):
    hook = ["hooks=[{type: users.Leave}]", "output_dir=sweep", "launcher=local"]
    done = users("-m", *FORECAST, *hook, "seed=1", HOW="os._exit(0)")
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


def test_a_place_that_cannot_be_taken_is_refused_at_once(exp):
    done = exp(*FORECAST, "launcher=external", "output_dir=run", **external(2, 29500, "no.such.host"))
    assert done.returncode == 2
    assert "MASTER_ADDR" in done.stderr.splitlines()[0]
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
    few = exp_in(exp, "sh", "-c", 'ulimit -n 5; exec "$@"', "sh", *quick, "output_dir=few")
    assert few.returncode == 1
    assert few.stderr.count("error: ") == 1
    assert "ulimit -n" in next(line for line in few.stderr.splitlines() if line.startswith("error: "))


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
