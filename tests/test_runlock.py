"""One run, one folder, one at a time; and a dead holder is no obstacle."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time

import pytest

from exp.errors import ConfigError
from exp.runs.lock import LOCK, STALE_AFTER_S, LockHolder, RunLock, live_holder


def held_by(folder, age, **what):
    """A lock of somebody else's, who has shown a sign of life ``age`` seconds ago."""
    known = {**vars(LockHolder.current("theirs")), "host": "n7", "pid": os.getpid(), **what}
    (folder / LOCK).write_text(json.dumps(known))
    os.utime(folder / LOCK, (time.time() - age,) * 2)


def names(folder) -> set:
    return {path.name for path in folder.iterdir()}


def ended_process() -> int:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize(
    ("what", "age"),
    [({"started": 1}, 0),  # the id is another process's now
     ({"pid": ended_process()}, 0),
     ({"machine": "another"}, STALE_AFTER_S + 1)],
)  # fmt: skip
def test_what_a_dead_holder_has_left_is_taken(tmp_path, what, age):
    held_by(tmp_path, age, **what)
    lock = RunLock(tmp_path)
    assert lock.acquire() is False
    lock.release()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("what", [{"machine": "another container"}, None])
def test_a_holder_that_only_its_lock_tells_of_is_waited_for(tmp_path, what):
    """A sign of life means that it is in use; none for long enough, that it is free."""
    held_by(tmp_path, 0, **(what or {}))
    if what is None:
        (tmp_path / LOCK).write_bytes(b"\xff")  # a lock that cannot be read
    os.utime(tmp_path / LOCK, (time.time() - STALE_AFTER_S + 1,) * 2)
    lock = RunLock(tmp_path)
    assert lock.acquire() is False
    lock.release()

    held_by(tmp_path, 0, **{"machine": "another", **(what or {})})
    beat = threading.Timer(1.0, os.utime, [tmp_path / LOCK])
    beat.start()
    with pytest.raises(ConfigError, match="in use"):
        RunLock(tmp_path).acquire()
    beat.join()


OURS, THEIRS = "lab@n0:6817", "lab@far:6817"


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    """Commands of the cluster ``OURS``, whose squeue shows these lines; None: it does not answer."""

    def put(shown: str | None) -> None:
        folder = tmp_path_factory.mktemp("bin")
        config = "ClusterName = lab\nSlurmctldHost[0] = n0\nSlurmctldPort = 6817"
        commands = {
            "squeue": f"echo '{shown}'"
            if shown
            else "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
            "scontrol": f"echo '{config}'",
        }
        for name, line in commands.items():
            silent = "echo 'Unable to contact slurm controller' >&2; exit 1"
            (folder / name).write_text(f"#!/bin/sh\n{silent if shown is None else line}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return put


@pytest.mark.parametrize(
    ("shown", "cluster", "age"),
    [(None, OURS, STALE_AFTER_S + 1),  # it has no heartbeat before it runs
     ("7|PENDING|Priority|", OURS, STALE_AFTER_S + 1),
     ("", THEIRS, 0),  # squeue of another cluster says "Invalid job id", or knows another job of that number
     ("", THEIRS, STALE_AFTER_S + 1),
     ("7|COMPLETED|None|n1", THEIRS, 0)],
)  # fmt: skip
def test_a_job_that_may_be_alive_keeps_its_folder(shown, cluster, age, tmp_path, slurm):
    slurm(shown)
    held_by(tmp_path, age, machine="another", job="7", cluster=cluster)
    with pytest.raises(ConfigError, match=f"in use by another run: Slurm job 7 of cluster {cluster}"):
        RunLock(tmp_path).acquire()


@pytest.mark.parametrize(
    ("shown", "age"),
    [("7|CANCELLED|None|n1", 0), ("", STALE_AFTER_S + 1), ("", STALE_AFTER_S - 1)],  # the last: after another second
)  # fmt: skip
def test_a_job_that_has_ended_does_not(shown, age, tmp_path, slurm):
    slurm(shown)
    held_by(tmp_path, age, machine="another", job="7", cluster=OURS)
    lock = RunLock(tmp_path)
    assert lock.acquire() is False
    lock.release()


def test_a_heartbeat_proves_more_than_a_slurm_that_has_forgotten_the_job(tmp_path, slurm):
    slurm("")
    held_by(tmp_path, 5, machine="another", job="7", cluster=OURS)
    beat = threading.Timer(1.0, os.utime, [tmp_path / LOCK])
    beat.start()
    with pytest.raises(ConfigError, match="in use"):
        RunLock(tmp_path).acquire()
    beat.join()


def test_of_many_that_find_a_dead_holder_one_takes_the_folder(tmp_path):
    held_by(tmp_path, 0, pid=ended_process())
    context = multiprocessing.get_context("fork")
    won, tried = context.Queue(), context.Barrier(12)

    def attempt() -> None:
        try:
            RunLock(tmp_path).acquire()
            won.put(os.getpid())
        except ConfigError:
            pass
        tried.wait(60)

    processes = [context.Process(target=attempt) for _ in range(12)]
    for process in processes:
        process.start()
    winner = won.get(timeout=60)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert won.empty()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == winner


def test_processes_of_one_job_hold_it_together(tmp_path):
    first, second = RunLock(tmp_path, "node0:29500/exp"), RunLock(tmp_path, "node0:29500/exp")
    assert (first.acquire(), second.acquire()) == (False, True)
    with pytest.raises(ConfigError):
        RunLock(tmp_path).acquire()
    first.release()
    second.check()  # what the first has removed too soon is there again
    assert live_holder(tmp_path) is not None
    second.release()
    assert names(tmp_path) == set()


def test_another_configuration_joins_a_job_that_lives_and_replaces_one_that_is_dead(tmp_path):
    """Nodes that are started by hand have the name of their meeting point, also that of an earlier attempt."""
    name = "node0:29500"
    held_by(tmp_path, 5, token=name, machine="", config="a")
    assert RunLock(tmp_path, name).acquire(config="a") is True
    beat = threading.Timer(1.0, os.utime, [tmp_path / LOCK])
    beat.start()
    assert RunLock(tmp_path, name).acquire(config="b") is True
    beat.join()
    for config in "ab":
        held_by(tmp_path, STALE_AFTER_S + 1, token=name, machine="", config="a")
        assert RunLock(tmp_path, name).acquire(config=config) is False
        assert json.loads((tmp_path / LOCK).read_text())["config"] == config


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/rank0.log", "checkpoints"])
def test_a_link_that_leads_out_of_the_folder_is_refused_by_name(name, tmp_path):
    """exp appends to its files, and writes into its folders: into somebody else's, if they were links."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / name).parent.mkdir(parents=True)
    outside.mkdir()
    (run / "trackers").mkdir()
    (run / "trackers" / "latest").symlink_to("run-7")  # trackers make such links
    (tmp_path / "linked").symlink_to(run)
    RunLock(tmp_path / "linked").acquire()
    (tmp_path / "linked" / LOCK).unlink()
    (run / name).symlink_to(outside)
    for folder in (run, tmp_path / "linked"):
        with pytest.raises(ConfigError, match=f"{name} is a link to {outside}"):
            RunLock(folder).acquire()
    assert not (run / LOCK).exists()


def test_losing_the_folder_is_noticed(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    held_by(tmp_path, 0)
    assert "n7" in lock.check()
    lock.release()
    assert live_holder(tmp_path).host == "n7"
