"""One run, one folder, one at a time; and a dead holder is no obstacle."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from exp import runlock
from exp.errors import ConfigError
from exp.lock_holder import LOCK, STALE_AFTER_S, Holder, holder_of, read_holder
from exp.runlock import RunLock
from tests.conftest import TINY, Forked, run_exp


def held_by(folder, **what):
    """A lock of somebody else's."""
    known = {**vars(Holder.me("theirs")), "host": "n7", "pid": 4242, **what}
    (folder / LOCK).write_text(json.dumps(known))


def names(folder) -> set:
    return {path.name for path in folder.iterdir()}


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_lock_names_its_holder_and_goes_with_it(tmp_path):
    lock = RunLock(tmp_path)
    assert lock.acquire() is False
    holder = holder_of(tmp_path)
    assert holder is not None
    assert holder.pid == os.getpid()
    with pytest.raises(ConfigError, match=rf"in use by another run: host {holder.host}, pid {os.getpid()}, since 20"):
        RunLock(tmp_path).acquire()
    assert names(tmp_path) == {LOCK}
    lock.release()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("age", [0, STALE_AFTER_S + 60])
@pytest.mark.parametrize(
    ("what", "live"),
    [
        ({"pid": os.getpid()}, True),
        ({"pid": os.getpid(), "started": 1}, False),  # the id is another process's now
        ({"pid": ended_process()}, False),
        ({"machine": "another"}, None),  # by its last sign of life
        ({"several": True}, None),
    ],
)
def test_who_counts_as_alive(tmp_path, what, live, age):
    held_by(tmp_path, **what)
    then = time.time() - age
    os.utime(tmp_path / LOCK, (then, then))
    lock = RunLock(tmp_path)
    if age == 0 if live is None else live:
        with pytest.raises(ConfigError, match="host n7, pid "):
            lock.acquire()
    else:
        assert lock.acquire() is False
        lock.release()
        assert names(tmp_path) == set()


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"\xff"])
def test_a_lock_that_cannot_be_read_counts_by_its_age(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(ConfigError, match="in use"):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / LOCK, (1, 1))
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_of_many_that_find_a_dead_holder_one_takes_the_folder(tmp_path):
    held_by(tmp_path, pid=ended_process())

    def attempt(won) -> None:
        lock = RunLock(tmp_path)
        try:
            lock.acquire()
        except ConfigError:
            return
        won.put(os.getpid())
        won_all.wait()

    context = multiprocessing.get_context("fork")
    won, won_all = context.Queue(), context.Event()
    processes = [context.Process(target=attempt, args=(won,)) for _ in range(12)]
    for process in processes:
        process.start()
    winner = won.get(timeout=60)
    others = [process for process in processes if process.pid != winner]
    for process in others:
        process.join(60)
        assert process.exitcode == 0
    assert won.empty()
    assert holder_of(tmp_path).pid == winner
    won_all.set()


def test_processes_of_one_job_hold_it_together_and_hand_it_on(tmp_path):
    first, second = RunLock(tmp_path, "node0:29500/exp"), RunLock(tmp_path, "node0:29500/exp")
    assert (first.acquire(), second.acquire()) == (False, True)
    with pytest.raises(ConfigError):
        RunLock(tmp_path).acquire()
    first.release()
    second._beat()  # what the first has removed too soon is there again
    assert holder_of(tmp_path) is not None
    second.release()
    assert names(tmp_path) == set()

    one = RunLock(tmp_path)
    one.acquire()
    one.let_go()
    other = RunLock(tmp_path, one.token)
    other.take_over()
    one.release()
    assert holder_of(tmp_path) is not None
    other.release()
    assert names(tmp_path) == set()


def test_losing_the_folder_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(runlock, "_BEAT_S", 0.05)
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        folder = tmp_path / "run"
        folder.mkdir()
        lock = RunLock(folder)
        lock.acquire()
        held_by(folder)
        assert lock.check().endswith("was taken by another run: " + str(read_holder(folder / LOCK)))
        runlock._wake.set()
        deadline = time.monotonic() + 20
        while not told.is_set():  # not one long wait: a signal that comes as it begins would be noticed at its end
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        runlock._wake.clear()
        lock.release()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_of_two_starts_into_one_folder_one_trains(tmp_path):
    """The second says who does; after kill -9 the folder is free."""
    done = []
    arguments = [*TINY, "max_steps=60", "max_epochs=9", "log_every=1", "output_dir=run"]
    threads = [threading.Thread(target=lambda: done.append(run_exp(tmp_path, *arguments))) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    refused, trained = sorted(done, key=lambda each: -each.returncode)
    assert (trained.returncode, refused.returncode) == (0, 2), trained.stderr
    assert "run is in use by another run: host " in refused.stderr.splitlines()[0]
    steps = [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
    assert len(steps) == 60
    assert not [name for name in names(tmp_path / "run") if name[0] == "."]


@pytest.mark.slow
def test_after_kill_9_the_folder_is_free(tmp_path):
    arguments = [*TINY, "output_dir=run"]
    endless = ["max_steps=100000", "max_epochs=10000", "log_every=1"]
    process = Forked(tmp_path, *arguments, *endless)
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "run" / "metrics.jsonl").is_file():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "run" / LOCK).is_file()
    done = run_exp(tmp_path, *arguments, "overwrite=true")
    assert done.returncode == 0, done.stderr
    assert not [name for name in names(tmp_path / "run") if name[0] == "."]
