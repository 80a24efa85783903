"""What the parent makes of the journals that ranks leave: who hangs, who died, who never came, and who is to blame."""

from __future__ import annotations

import faulthandler
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from exp.checks.check import Journal, fail, ok
from exp.checks.doctor import CHECKS, END, START, journal_of, judge
from exp.launcher.outcome import Outcome, RankFailure
from exp.runs.folder import RunFolder

TIMEOUT_S = 60


@pytest.fixture
def judged(tmp_path):
    """Findings of ranks whose journals end as told: None has left none, a check was begun, True has finished."""

    def run(*ends, answers=(), outcome=None, took=1.0, timeout_s=TIMEOUT_S):
        folder = RunFolder(tmp_path)
        for rank, end in enumerate(ends):
            if end is None:
                continue
            journal = Journal(journal_of(folder, rank), 600)
            journal.end(START, host="here")
            for name in CHECKS:
                if name == end:
                    journal.begin(name)
                    faulthandler.cancel_dump_traceback_later()  # this process goes on
                    break
                answer = dict(answers).get((rank, name), ok("well"))
                journal.end(name, **asdict(answer))
            else:
                journal.end(END, absent=[rank for rank, other in enumerate(ends) if other is None])
        config = SimpleNamespace(
            nproc=len(ends),
            launcher=SimpleNamespace(nnodes=1),
            task=SimpleNamespace(timeout_s=timeout_s),
            backend=SimpleNamespace(name="cpu", simulate=False),
        )
        return judge(config, folder, outcome or Outcome(1), started=time.time() - took)

    return run


def findings(found):
    return [(each["check"], each["status"], each["ranks"]) for each in found[1]]


def died(rank, code=-9):
    return Outcome(1, failures=[RankFailure(rank, rank, "Killed", "killed by SIGKILL", code)])


def test_ranks_that_are_well_are_ok_and_a_rank_that_others_waited_for_is_not(judged):
    ranks, found = judged(True, True, outcome=Outcome(0))
    assert found == []
    assert [list(rank.checks) for rank in ranks] == [list(CHECKS)] * 2
    assert findings(judged(True, None, took=TIMEOUT_S + 10)) == [("ranks", "failed", [1])]


def test_a_rank_that_hangs_or_dies_is_blamed_and_those_that_waited_for_it_are_not(judged):
    broken = {(0, "all_reduce"): fail("timed out", "look")}
    found = judged(True, "all_reduce", answers=broken, outcome=died(1))
    assert findings(found) == [("all_reduce", "failed", [1])]
    skipped = found[0][0].checks["all_reduce"]
    assert (skipped.status, "rank 1" in skipped.finding) == ("skipped", True)
    ranks, found = judged(True, "all_reduce", answers=broken, timeout_s=0)
    assert found[0]["finding"].startswith("hung")
    assert ranks[1].stayed_in == "all_reduce"
