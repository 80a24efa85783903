"""How a worker ends: what its device needs is done, and its monitor says what became of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import Forked, clean_environment

PLACE = {"RANK": "0", "LOCAL_RANK": "0", "EXP_SCRATCH": "."}
# This process becomes the monitor of the worker that does so.
WORKER = """
import ctypes, os, signal, sys, threading, time
from exp import heartbeat, worker
from exp.errors import Preempted, UnavailableError
from exp.launcher.monitor import go_on_monitored
from exp.launcher.rank import RankInfo
from exp.runfolder import RunFolder
how, last = sys.argv[1:]
worker._CLEAN_UP_S = worker._CLEAN_UP_AFTER_FAILURE_S = 0.5
folder = RunFolder(".")
folder.logs.mkdir()
heartbeat.make_file(".", 1)
def closes():
    print("main thread" if threading.current_thread() is threading.main_thread() else "another", flush=True)
def hangs():
    time.sleep(600)
def hangs_with_the_lock():
    ctypes.PyDLL(None).sleep(600)
def raises():
    raise RuntimeError("the driver is gone")
def crashes():
    os.kill(os.getpid(), signal.SIGILL)
def body(folder, info):
    info.at_end.extend([globals()[last], closes])
    if how == "preempted":
        raise Preempted(3)
    if how == "refused":
        raise UnavailableError("no card")
    if how == "failed":
        raise ValueError("planted")
    if how == "crashed":
        crashes()
os.environ["EXP_AGENT_PID"] = str(os.getpid())
if go_on_monitored(folder, os.getppid()):
    worker.work_to_end(folder, RankInfo.single(), body)
"""


@pytest.mark.parametrize(
    ("how", "last", "code", "printed", "logged"),
    [
        ("preempted", "closes", 0, 2, ""),
        ("refused", "raises", 3, 1, "the driver is gone"),
        ("failed", "hangs", 1, 0, "in hangs"),
        ("well", "hangs_with_the_lock", 0, 0, "in hangs_with_the_lock"),
        ("well", "crashes", 0, 0, "killed by SIGILL, in the clean-up of its device"),
        ("crashed", "closes", -4, 0, ""),
    ],
)
def test_what_comes_last_is_done_and_bounded_and_does_not_change_the_end(tmp_path, how, last, code, printed, logged):
    worker = Forked(tmp_path, how, last, script=WORKER, **PLACE)
    output, errors = worker.communicate(timeout=280)
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert (worker.returncode, output) == (code, "main thread\n" * printed), errors + log
    assert logged in log
    assert (tmp_path / "logs" / "rank0.error.json").exists() is (code != 0)


# Pairs of a monitor and a worker, one after the other: the worker ends, and SIGTERM comes, within the same millisecond.
PAIRS = """
import os, random, signal, time
from exp.launcher.monitor import go_on_monitored
from exp.runfolder import RunFolder
ends = set()
os.environ["EXP_AGENT_PID"] = str(os.getpid())
for _ in range(300):
    parent, (reads, writes) = os.getpid(), os.pipe()
    monitor = os.fork()
    if monitor == 0:
        if go_on_monitored(RunFolder("."), parent):
            os.write(writes, b"x")
            time.sleep(0.001 * random.random())
        os._exit(0)
    os.read(reads, 1)
    time.sleep(0.002 * random.random())
    os.kill(monitor, signal.SIGTERM)
    ends.add(os.waitpid(monitor, 0)[1])
    os.close(reads), os.close(writes)
print(ends <= {0, signal.SIGTERM}, ends)
"""


def test_the_end_of_a_worker_and_being_told_to_end_it_may_come_together(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PAIRS], cwd=tmp_path, env=clean_environment(**PLACE), capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert (done.stdout[:4], done.stderr) == ("True", ""), done.stdout
