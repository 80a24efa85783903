"""Which failure comes first, and how it is told."""

from __future__ import annotations

import signal
import socket
from types import SimpleNamespace

import pytest

from exp.launcher.outcome import Outcome, describe_failure, tail_of
from exp.launcher.supervisor import Supervisor
from exp.runs.failures import Failures, describe_exit
from exp.runs.files import write_json
from exp.runs.folder import RunFolder
from exp.runs.heartbeat import Heartbeat, Stage
from exp.runs.job import PREEMPT_FLAG
from exp.tasks.train import Train


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path)
    made.create()
    return made


def collected(folder, errors):
    """The failures of ranks that left errors."""
    about = {"host": "h", "type": "ValueError", "finding": "boom", "pid": 1, "is_exp_error": False}
    for rank, time, caused_by_peer, exit_code in errors:
        told = {
            "rank": rank,
            "local_rank": rank,
            "time": time,
            "caused_by_peer": caused_by_peer,
            "exit_code": exit_code,
        }
        write_json(folder.error_file(rank), {**about, **told})
    return Failures(folder).collect()


@pytest.mark.parametrize(
    ("errors", "ranks"),
    [
        ([(0, 12.0, False, 1), (1, 11.0, False, 1)], [1, 0]),  # the earliest
        ([(0, 1.0, False, 1), (1, 2.0, False, -9)], [1, 0]),  # a killed rank, before the error that it caused
        # The word of a killed rank comes late on a busy machine, and clocks of nodes differ.
        ([(0, 1.0, True, 1), (2, 2.0, True, 1), (3, 50.0, False, -9)], [3, 0, 2]),
        ([(0, 1.0, True, 1), (2, 2.0, True, 1), (3, 60.0, False, 1)], [3, 0, 2]),
    ],
)
def test_the_cause_comes_first(folder, errors, ranks):
    assert [failure.rank for failure in collected(folder, errors)] == ranks


def test_the_cause_is_told_first_then_who_failed_after_it_where_the_log_is_and_what_still_runs(folder):
    collected(folder, [(0, 2.0, False, 1)])
    Failures(folder).write(describe_exit(Heartbeat(5, 1, 1, 9, Stage.HOOKS, 3, 1), -9))
    failures = Failures(folder).collect()
    folder.log_file(1).touch()
    assert describe_failure(Outcome(1, failures=failures), folder).splitlines() == [
        f"rank 1 (local_rank 1, {socket.gethostname()}) failed: killed by SIGKILL (out of memory, or kill -9)",
        "  failed after it: rank 0",
        f"  log: {folder.log_file(1)}",
    ]
    text = describe_failure(Outcome(130, interrupted_by="SIGINT", unkillable=[41, 42]), folder)
    assert text.startswith("interrupted by SIGINT\n")
    assert "41, 42" in text
    folder.log_file(0).write_text("one\n\ntwo\nthree\n")
    assert tail_of(folder.log_file(0), 2) == [f"  log: {folder.log_file(0)}", "  | two", "  | three"]


def test_a_first_notice_saves_the_state_and_a_second_ends_the_job(tmp_path, folder):
    run = SimpleNamespace(task=Train())
    launcher, usr2 = SimpleNamespace(is_external=False), signal.SIGUSR2
    supervisor = Supervisor(launcher, run, str(tmp_path), [usr2], Failures(folder))
    for received in (None, usr2):
        supervisor._on_signal(usr2, None)
        assert (supervisor.preempt_signals, supervisor.end_signal) == ([usr2], received)
    assert (tmp_path / PREEMPT_FLAG).exists()
