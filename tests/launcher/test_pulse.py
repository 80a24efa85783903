"""A rank that hangs is named, soon, and the innocent that wait for it are not."""

from __future__ import annotations

import os

import pytest

from exp import heartbeat
from exp.heartbeat import Stage
from exp.launcher.pulse import Pulse
from exp.runfolder import RunFolder, read_json


@pytest.fixture
def pulse(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()

    class Tester:
        nodes = 1

        def __init__(self):
            self.scratch = [tmp_path / "a", tmp_path / "b"]
            for place in self.scratch:
                place.mkdir()
                heartbeat.make_file(str(place), 2)
            self.folder = folder

        def begin(self, nnodes=1, timeout_s=1800, **settings):
            self.pulses = [
                Pulse(folder, str(self.scratch[node]), nnodes, timeout_s, settings.get("step_timeout_s"))
                for node in range(nnodes)
            ]
            for number, each in enumerate(self.pulses):
                each._word = folder.logs / f"stuck-{number}.json"

        def say(self, rank, stage, step, times, count=1):
            """What ``rank``, the second of two on its node, tells."""
            place = self.scratch[rank // 2] / "beats"
            content = bytearray(place.read_bytes())
            numbers = (os.getpid() * 1000 + rank, rank, count, stage, step, times)
            heartbeat._FORMAT.pack_into(content, heartbeat._FORMAT.size * (rank % 2), *numbers)
            place.write_bytes(content)

        def wait(self, monkeypatch, seconds, node=0):
            """As so many looks, one a second."""
            found = None
            for _ in range(seconds):
                self.pulses[node]._looked -= 1
                found = self.pulses[node].look() or found
            return found

    return Tester()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("exp.launcher.pulse._STACKS_WITHIN_S", 0)
    monkeypatch.setattr("exp.launcher.pulse._state", lambda pid: "S")  # those of the tests that only write beats


@pytest.mark.parametrize(
    ("stage", "times", "seconds"),
    [(Stage.FORWARD, 2, 61), (Stage.FORWARD, 1, 1621), (Stage.HOOKS, 2, 601), (Stage.CHECKPOINT, 9, 1621)],
)
def test_how_long_a_rank_may_stand_still_depends_on_where(pulse, monkeypatch, stage, times, seconds):
    """The first step compiles, disks are slow, and the user's hooks may do anything."""
    pulse.begin()
    pulse.say(0, Stage.BACKWARD, 5, 4)
    pulse.say(1, stage, 4, times)
    assert pulse.wait(monkeypatch, seconds - 3) is None
    assert pulse.wait(monkeypatch, 5) is not None
    assert read_json(pulse.folder.error_file(1))["type"] == "RankHung"


def test_twenty_times_the_slowest_step_and_never_where_it_is_switched_off(pulse, monkeypatch):
    pulse.begin()
    pulse.say(0, Stage.FORWARD, 5, 4)
    pulse.say(1, Stage.FORWARD, 5, 4)
    pulse.wait(monkeypatch, 10)
    for rank in (0, 1):
        pulse.say(rank, Stage.BACKWARD, 5, 4, count=2)
    assert pulse.wait(monkeypatch, 190) is None
    assert pulse.wait(monkeypatch, 20) is not None
    for off in ({"step_timeout_s": 0}, {}):
        pulse.begin(**off)
        pulse.say(0, Stage.FREE, 5, 4)
        assert pulse.wait(monkeypatch, 4000) is None


def test_several_nodes_agree_on_whom_to_name(pulse, monkeypatch):
    pulse.begin(nnodes=2)
    for rank in range(4):
        pulse.say(rank, Stage.BACKWARD if rank != 3 else Stage.FORWARD, 7, 5)
    assert pulse.wait(monkeypatch, 70, node=0) is None  # the other has not said anything
    hung = pulse.wait(monkeypatch, 70, node=1)
    assert hung is not None
    assert hung % 1000 == 3
    assert pulse.wait(monkeypatch, 5, node=0) is None
    assert [path.name for path in pulse.folder.logs.glob("rank*.error.json")] == ["rank3.error.json"]
