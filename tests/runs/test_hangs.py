"""A rank that hangs is named, soon, and the innocent that wait for it are not."""

from __future__ import annotations

import os

import pytest

from exp.runs import heartbeat
from exp.runs.failures import Failures, HangDetector
from exp.runs.folder import RunFolder
from exp.runs.heartbeat import Stage


class Watch:
    """Two nodes of two ranks each, whose ranks say what they are told to, and whose clocks go as they are told to."""

    def __init__(self, path, nnodes=1, step_timeout_s=None, nproc=2):
        self.folder = RunFolder(path / "run")
        self.folder.create()
        self.scratch = [path / f"node{node}" for node in range(nnodes)]
        self.detectors = []
        for scratch in self.scratch:
            scratch.mkdir()
            heartbeat.make_file(str(scratch), nproc)
            failures = Failures(self.folder, str(scratch))
            self.detectors.append(HangDetector(failures, str(scratch), nnodes, 1800, step_timeout_s))
            self.detectors[-1]._report_file = self.folder.logs / f"stuck-{scratch.name}.json"

    def say(self, rank, stage, step, times, count=1):
        beats = self.scratch[rank // 2] / "beats"
        content = bytearray(beats.read_bytes())
        numbers = (os.getpid() * 1000 + rank, rank, rank % 2, count, stage, step, times)
        heartbeat._FORMAT.pack_into(content, heartbeat._FORMAT.size * (rank % 2), *numbers)
        beats.write_bytes(content)

    def wait(self, seconds, node=0):
        """Look once a second; gives the process that was named."""
        found = None
        for _ in range(seconds):
            self.detectors[node]._polled_at -= 1
            found = self.detectors[node].poll([]) or found
        return found


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("exp.runs.failures.Patience.STACKS_S", 0)
    monkeypatch.setattr("exp.runs.failures.is_alive", lambda pid: True)
    monkeypatch.setattr("exp.runs.failures.proc_stat", lambda pid: ["S"])


@pytest.mark.parametrize(
    ("limit", "stage", "times", "seconds"),
    [
        (None, Stage.FORWARD, 2, 1621),
        (None, Stage.DATA, 9, 1621),
        (60, Stage.FORWARD, 2, 61),
        (60, Stage.FORWARD, 1, 1621),
        (60, Stage.CHECKPOINT, 9, 1621),
        (0, Stage.FORWARD, 2, 4000),  # never
        (None, Stage.FREE, 2, 4000),
    ],
)
def test_how_long_a_rank_may_stand_still_depends_on_where(tmp_path, limit, stage, times, seconds):
    """The first step compiles, disks are slow, and the user's hooks may do anything."""
    watch = Watch(tmp_path, step_timeout_s=limit)
    watch.say(0, Stage.BACKWARD, 5, 4)
    watch.say(1, stage, 4, times)
    assert watch.wait(seconds - 3) is None
    assert (watch.wait(5) is None) is (seconds == 4000)
    assert watch.folder.error_file(1).exists() is (seconds != 4000)


@pytest.mark.parametrize(("limit", "named"), [(None, False), (60, True)])
def test_of_one_process_nobody_waits_for_it(tmp_path, limit, named):
    watch = Watch(tmp_path, step_timeout_s=limit, nproc=1)
    watch.say(0, Stage.FORWARD, 5, 4)
    assert (watch.wait(4000) is not None) is named


def test_several_nodes_agree_on_whom_to_name(tmp_path):
    watch = Watch(tmp_path, nnodes=2, step_timeout_s=60)
    for rank in range(4):
        watch.say(rank, Stage.BACKWARD if rank != 3 else Stage.FORWARD, 7, 5)
    assert watch.wait(70, node=0) is None  # the other has not said anything
    assert watch.wait(70, node=1) == os.getpid() * 1000 + 3
    assert watch.wait(5, node=0) is None
    assert [path.name for path in watch.folder.logs.glob("rank*.error.json")] == ["rank3.error.json"]
