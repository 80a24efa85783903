"""Which failure comes first, and how it is told."""

from __future__ import annotations

import pytest

from exp.launcher.failures import LOST, collect_failures, describe_failure, exit_code_of, is_of_peer
from exp.launcher.node import _Node
from exp.launcher.outcome import Outcome, RankFailure
from exp.runfolder import RunFolder, write_json


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path)
    made.create()
    return made


def write_error(folder, rank, time, message="boom", kind="ValueError", exit_code=1, of_peer=False, own=False):
    error = {"rank": rank, "local_rank": rank, "host": "h", "type": kind, "message": message, "exit_code": exit_code}
    write_json(folder.error_file(rank), {**error, "time": time, "pid": 1, "restart": 0, "of_peer": of_peer, "own": own})


def ended(rank, exit_code, time=5):
    return {"rank": rank, "local_rank": rank, "exit_code": exit_code, "time": time}


def test_the_earliest_error_comes_first(folder):
    write_error(folder, 0, 12.0, "connection closed by peer")
    write_error(folder, 1, 11.0, "the cause")
    failures = collect_failures(folder, [ended(0, 1), ended(1, 1)], "h")
    assert [failure.rank for failure in failures] == [1, 0]
    folder.log_file(1).touch()
    assert describe_failure(Outcome(1, failures=failures)).splitlines() == [
        "rank 1 (local_rank 1, h) failed: ValueError: the cause",
        "  failed after it: rank 0",
        f"  log: {folder.log_file(1)}",
    ]


def test_a_killed_rank_comes_before_the_errors_that_it_caused(folder):
    write_error(folder, 0, 1.0, "connection closed by peer")
    failures = collect_failures(folder, [ended(0, 1), ended(1, -9, time=2)], "h")
    assert [failure.rank for failure in failures] == [1, 0]
    assert failures[0].message == "killed by SIGKILL (out of memory, or kill -9)"
    assert exit_code_of(failures[0]) == 1


def test_whom_a_lost_peer_is_blamed_on_does_not_depend_on_the_time(folder):
    """The word of a rank that was killed comes seconds late on a busy machine, and clocks of nodes differ."""
    write_error(folder, 0, 1.0, "Connection closed by peer", "RuntimeError", of_peer=True)
    write_error(folder, 2, 2.0, "Connection closed by peer", "RuntimeError", of_peer=True)
    write_error(folder, 3, 50.0, "killed by SIGKILL", "SIGKILL", -9)
    assert [failure.rank for failure in collect_failures(folder, [ended(0, 1)], "h")] == [3, 0, 2]
    write_error(folder, 3, 60.0, "its own error")
    assert [failure.rank for failure in collect_failures(folder, [], "h")] == [3, 0, 2]


def test_the_error_of_a_collective_is_another_ranks_fault():
    code = compile("raise RuntimeError('operation failed')", "/lib/torch/distributed/distributed_c10d.py", "exec")
    with pytest.raises(RuntimeError) as of_collective:
        exec(code)
    assert is_of_peer(of_collective.value)
    assert is_of_peer(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4711"))
    assert not is_of_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_of_peer(ValueError("broken pipe"))


def outcome_of(*failures, **settings):
    keys = ("rank", "exit_code", "time", "of_peer", "type")
    made = [dict(zip(keys, failure)) for failure in failures]
    about = {"host": "h", "type": "", "message": "", "log": "", "local_rank": 0}
    return Outcome(1, failures=[RankFailure(**{**about, **each}) for each in made], **settings)


@pytest.mark.parametrize(
    ("of_first", "of_other", "ranks"),
    [
        (outcome_of((0, 1, 1.0, True), (1, 1, 1.1, True)), outcome_of((3, -9, 9.0, False)), [3, 0, 1]),
        (outcome_of((0, 1, 9.0, False)), outcome_of((2, 1, 1.0, True)), [0, 2]),
        (outcome_of((0, 1, 1.0, True)), outcome_of(detail="torch's agent was killed by SIGKILL"), []),
        (outcome_of((2, 1, 1.0, False, LOST), (0, 1, 1.0, True)), outcome_of(detail="torch's agent was killed"), []),
    ],
)
def test_the_cause_is_the_same_on_whatever_node_it_was(folder, of_first, of_other, ranks):
    node = _Node.__new__(_Node)
    node.count, node.folder, node.attempt = 2, folder, "a"
    node.rank = 1
    node.write_outcome(of_other)
    node.rank = 0
    assert [failure.rank for failure in node.merged(of_first).failures] == ranks


@pytest.mark.parametrize("end", [(-15, 1), (-9, 5)], ids=["SIGTERM", "SIGKILL after its patience"])
def test_a_rank_that_the_agent_ended_is_not_the_cause(folder, end):
    write_error(folder, 1, 1.0, "the cause")
    failures = collect_failures(folder, [ended(0, *end), ended(1, 1)], "h")
    assert [failure.rank for failure in failures] == [1]


def test_somebody_elses_sigterm_is_named(folder):
    (failure,) = collect_failures(folder, [ended(0, -15)], "h")
    assert "killed by SIGTERM" in failure.message


def test_a_rank_without_an_error_file_is_told_by_its_exit_code(folder):
    (failure,) = collect_failures(folder, [ended(2, 75)], "h")
    assert "75" in describe_failure(Outcome(1, failures=[failure])).splitlines()[0]
    assert exit_code_of(failure) == 1


def test_the_first_failure_gives_the_exit_code(folder):
    write_error(folder, 0, 1.0, "no card", "UnavailableError", 3, own=True)
    (failure,) = collect_failures(folder, [ended(0, 3)], "h")
    assert exit_code_of(failure) == 3


def test_an_interruption_and_what_could_not_be_killed_are_told():
    text = describe_failure(Outcome(130, interrupted_by="SIGINT", unkillable=[41, 42]))
    assert text.splitlines()[0].startswith("interrupted by SIGINT")
    assert "41, 42" in text
