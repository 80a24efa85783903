"""launcher=torchrun where ranks ignore what they are told, and where they end at different times."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.behaviour.conftest import LONG, STEADY, family, gone, has_steps, losses, wait_for
from tests.conftest import Forked, free_port

# In the third step of the first attempt each rank leaves word that it has come so far; then one fails, or all wait.
USERS = """
import os, signal, subprocess, time
from pathlib import Path
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

@HOOKS.register_module()
class Disturb(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        case, seen = (os.environ["HOW"], runner.rank), Path(f"seen{runner.rank}")
        if batch_idx < 2 or seen.exists():
            return
        if case in (("kill beside", 0), ("sleep", 1)):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "300"])  # the rank's own child
        seen.touch()
        while len(list(Path().glob("seen*"))) < 2:
            time.sleep(0.01)
        if case[1] == 1 and case[0].startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)  # as in a collective of a card's: this rank notices nothing
"""
NOHUP = """
import runpy, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
runpy.run_module("exp", run_name="__main__")
"""


@pytest.fixture
def disturbed(exp, start):
    """Starts a run whose ranks do so; gives its process."""
    (exp.folder / "users.py").write_text(USERS)

    def begin(how: str, *settings: str) -> Forked:
        users = ["plugins=[users]", "hooks=[{type: users.Disturb}]", "output_dir=run"]
        return start(*STEADY, *users, *settings, HOW=how, PYTHONPATH=str(exp.folder))

    return begin


def test_a_failure_ends_the_run_even_beside_a_rank_that_ignores_the_end(exp, disturbed):
    process = disturbed("kill beside", "nproc=2")
    wait_for((exp.folder / "seen1").exists)
    everybody = family(process.pid)
    errors = process.communicate(timeout=15)[1]  # torch's agent would wait for half a minute
    assert (process.returncode, errors[:14]) == (1, "error: rank 1 "), errors
    assert gone(everybody)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_even_a_rank_that_ignores_it(exp, disturbed, number):
    process = disturbed("sleep", "nproc=2")
    wait_for(lambda: len(list(exp.folder.glob("seen*"))) == 2, process)
    everybody = family(process.pid)
    assert list(everybody.values()).count("sleep") == 2
    process.send_signal(number)
    if number == signal.SIGINT:
        time.sleep(0.3)
        process.send_signal(number)  # once more: at once
    errors = process.communicate(timeout=3 if number == signal.SIGINT else 10)[1]
    assert process.returncode == 128 + number
    assert errors.startswith(f"error: interrupted by {number.name}")
    assert gone(everybody)


def listening(pids) -> set[str]:
    """Addresses, as the kernel writes them, and ports at which processes listen for TCP connections."""
    files = set()
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").glob("*")):
        with contextlib.suppress(OSError):  # closed since
            files.add(os.readlink(str(link)))
    tables = [Path("/proc/net", table).read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return {cells[1] for cells in sockets if cells[3] == "0A" and f"socket:[{cells[9]}]" in files}


def test_nothing_listens_beyond_the_loopback_interface_and_nohup_is_respected(exp, start):
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        everywhere.listen()
        assert f"00000000:{everywhere.getsockname()[1]:04X}" in listening([os.getpid()])
    process = start(*LONG, "nproc=2", "output_dir=run", script=NOHUP)
    wait_for(has_steps(exp.path("run")), process)
    everybody = family(process.pid)
    assert {place.partition(":")[0] for place in listening(everybody)} <= {"0100007F"}
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None
    assert family(process.pid) == everybody


def two_nodes(port: int) -> list[str]:
    return ["launcher.nnodes=2", f"launcher.rdzv_endpoint=127.0.0.1:{port}", "launcher.timeout_s=60"]


def test_a_rank_that_is_killed_on_one_node_is_started_again_on_both(exp, disturbed, trained):
    nodes = two_nodes(free_port())
    processes = [disturbed("kill", *nodes, "launcher.max_restarts=1") for _ in range(2)]
    said = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    told = exp.result("run")
    assert (told["status"], told["restarts"], told["world_size"]) == ("completed", 1, 2)
    assert losses(exp.path("run")) == pytest.approx(losses(trained("steady")), rel=1e-5)
