"""F6: scripts tried eccl, then gloo, then nccl, and reported "eccl" while they ran gloo.

With exp the process group is chosen once, before anything else, by all ranks together, from backend and configuration.
A fallback happens only where it is allowed, is announced on every rank, and is recorded in the result.
"""

from __future__ import annotations

import pytest

from tests.field.conftest import CARDS, JOIN, OWN_GCU
from tests.simulators import needs_card

HALVED = """
class Halved(Gcu):  # a machine on which one rank's collectives are not there
    def collectives_missing(self):
        return "libeccl.so: cannot open shared object file" if os.environ["RANK"] == "1" else None
"""


@pytest.mark.slow
def test_stock_script_guesses(stock):
    script = """
        for name in ("eccl", "gloo", "nccl"):
            try:
                join(name)
                break
            except Exception:
                continue
        print("training over eccl")
        print("the group is", dist.get_backend())
    """
    (ended,) = stock(script, begin=JOIN)
    assert ended.returncode == 0, ended.printed
    assert "training over eccl\nthe group is gloo\n" in ended.printed


@pytest.mark.slow
@needs_card
def test_exp_refuses_without_permission_and_names_the_choices(exp, library):
    mine = library(HALVED, begin=OWN_GCU)
    done = exp(*CARDS, "nproc=2", "backend._target_=mine.Halved", "output_dir=run", **mine)
    assert done.returncode == 3
    first = done.stderr.splitlines()[0]
    assert "cannot be made: rank 1: libeccl.so: cannot open shared object file" in first
    assert "backend.allow_fallback=true, or backend.process_group=gloo" in first


@pytest.mark.slow
@needs_card
def test_exp_falls_back_where_it_may_on_all_ranks_and_says_so(exp, library):
    mine = library(HALVED, begin=OWN_GCU)
    allowed = ["backend._target_=mine.Halved", "backend.allow_fallback=true"]
    done = exp(*CARDS, "nproc=2", *allowed, "output_dir=run", **mine)
    assert done.returncode == 0, done.stderr
    assert "FALLBACK on every rank: gloo, staged through the CPU instead of" in done.stdout
    result = exp.result("run")
    assert result["process_group"] == result["fallback"]["used"] == "gloo, staged through the CPU"
    assert "eccl" in result["fallback"]["wanted"]
    assert result["fallback"]["reason"] == "rank 1: libeccl.so: cannot open shared object file"
    for rank in (0, 1):
        assert "fallback: gloo, staged" in (exp.path("run") / "logs" / f"rank{rank}.log").read_text()
