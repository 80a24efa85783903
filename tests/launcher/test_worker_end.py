"""How a worker ends: what its device needs is done, and its agent tells what became of it."""

from __future__ import annotations

import pytest

from exp.runs import heartbeat
from exp.runs.failures import Failures
from exp.runs.files import read_json
from exp.runs.folder import RunFolder
from exp.runs.heartbeat import Stage
from tests.conftest import Forked

PLACE = {"RANK": "0", "LOCAL_RANK": "0", "EXP_SCRATCH": "."}
WORKER = """
import ctypes, os, signal, sys, threading, time
from exp.runs import heartbeat
from exp.errors import Preempted, UnavailableError
from exp.worker import main, session
from exp.session import RankInfo
from exp.runs.failures import Patience
from exp.runs.folder import RunFolder
how, last = sys.argv[1:]
Patience.CLEAN_UP_S = Patience.CLEAN_UP_FAILED_S = 0.5
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
    info.exit_handlers.extend([globals()[last], closes])
    if how == "preempted":
        raise Preempted(3)
    if how == "refused":
        raise UnavailableError("no card")
    if how == "failed":
        raise ValueError("planted")
session.run_rank = body
main.run_and_exit(folder, RankInfo())
"""


@pytest.mark.parametrize(
    ("how", "last", "code", "printed", "logged"),
    [
        ("preempted", "closes", 0, 2, ""),
        ("refused", "raises", 3, 1, "the driver is gone"),
        ("failed", "hangs", 1, 0, "in hangs"),
        ("well", "hangs_with_the_lock", 1, 0, "in hangs_with_the_lock"),
        ("well", "crashes", -4, 0, ""),
    ],
)
def test_what_comes_last_is_done_and_bounded_and_does_not_change_the_end(tmp_path, how, last, code, printed, logged):
    worker = Forked(tmp_path, how, last, script=WORKER, **PLACE)
    output, errors = worker.communicate(timeout=280)
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert (worker.returncode, output) == (code, "main thread\n" * printed), errors + log
    assert logged in log
    assert (tmp_path / "logs" / "rank0.error.json").exists() is (how in ("refused", "failed"))


@pytest.mark.parametrize(
    ("stage", "code", "well", "word"),
    [
        (Stage.DONE, -4, True, None),  # in the clean-up of its device
        (Stage.HOOKS, 0, False, "exited with code 0 in step 7"),
        (Stage.HOOKS, 7, False, "exited with code 7 in step 7"),
        (Stage.HOOKS, -15, False, "killed by SIGTERM"),
    ],
)
def test_the_guard_leaves_a_word_for_a_worker_that_could_not(tmp_path, stage, code, well, word):
    folder = RunFolder(tmp_path)
    folder.create()
    heartbeat.make_file(str(tmp_path), 2)
    (tmp_path / "beats").write_bytes(bytes(56) + heartbeat._FORMAT.pack(11, 3, 1, 9, stage, 7, 1))
    assert Failures(folder, str(tmp_path)).record_end(3, 1, code, 11) is well
    told = read_json(folder.error_file(3))
    assert (told and told["finding"].startswith(word)) is (None if word is None else True)
