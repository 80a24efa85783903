"""How a worker ends: what its device needs is done, and what hangs there holds nobody up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import clean_environment

WORKER = """
import ctypes, sys, threading, time
from exp import heartbeat, worker
from exp.errors import Preempted, UnavailableError
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
def body(folder, info):
    info.at_end.extend([globals()[last], closes])
    if how == "preempted":
        raise Preempted(3)
    if how == "refused":
        raise UnavailableError("no card")
    if how == "failed":
        raise ValueError("planted")
worker.work_to_end(folder, RankInfo.single(), body)
"""


@pytest.mark.parametrize(
    ("how", "last", "code", "printed"),
    [
        ("preempted", "closes", 0, "main thread\nmain thread\n"),
        ("refused", "raises", 3, "main thread\n"),
        ("failed", "hangs", 1, ""),
        ("well", "hangs_with_the_lock", 1, ""),
    ],
)
def test_what_comes_last_is_done_and_bounded(tmp_path, how, last, code, printed):
    done = subprocess.run(
        [sys.executable, "-c", WORKER, how, last],
        cwd=tmp_path,
        env=clean_environment(EXP_SCRATCH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert (done.returncode, done.stdout) == (code, printed), done.stderr + log
    if last == "raises":
        assert "clean-up failed" in log
        assert "the driver is gone" in log
    if last.startswith("hangs"):
        assert f"in {last}" in log  # where it hangs
