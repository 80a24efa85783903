"""F11: WORLD_SIZE and friends were exported by hand, in another shell script for each number of cards.

What such a script has left in the shell makes the next job wait for ranks that nobody starts.

With exp none are needed; stale ones are ignored with a warning that names them.
"""

from __future__ import annotations

import pytest

from tests.conftest import TINY
from tests.simulators import needs_card

STALE = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.slow
def test_stock_job_waits_for_ranks_that_nobody_starts(stock):
    script = """
        from datetime import timedelta
        import torch.distributed as dist
        dist.init_process_group("gloo", timeout=timedelta(seconds=2))  # it would be half an hour
    """
    (ended,) = stock(script, **STALE)
    assert ended.returncode == 1
    assert any(text in ended.last.lower() for text in ("timed out", "timeout")), ended.last


@pytest.mark.slow
def test_exp_ignores_them_and_says_so(exp):
    done = exp(*TINY, "max_steps=1", "output_dir=run", **STALE)
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("warning: ignoring LOCAL_RANK, MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE of the shell")
    assert exp.result("run")["world_size"] == 1


@needs_card
def test_exp_ignores_them_with_eight_ranks_too(eight_cards):
    assert eight_cards.stderr.startswith("warning: ignoring LOCAL_RANK, WORLD_SIZE of the shell")
    assert eight_cards.result["world_size"] == 8
