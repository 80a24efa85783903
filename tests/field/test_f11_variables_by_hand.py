"""F11: WORLD_SIZE and friends were exported by hand, in another shell script for each number of cards.

What an earlier script has left in the shell makes the next job wait for ranks that nobody starts.

With exp none are needed; stale ones are ignored with a warning that names them.
"""

from __future__ import annotations

from tests.conftest import TINY

STALE = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_stock_job_waits_for_ranks_that_nobody_starts(stock, tmp_path):
    script = """
        import torch.distributed as dist
        from datetime import timedelta
        dist.init_process_group("gloo", init_method="file://STORE", timeout=timedelta(seconds=3),
                                rank=0, world_size=int(__import__("os").environ["WORLD_SIZE"]))
    """
    (ended,) = stock(script.replace("STORE", str(tmp_path / "rendezvous")), **STALE)
    assert ended.returncode == 1
    assert "imeout" in ended.printed or "timed out" in ended.printed


def test_exp_ignores_them_and_says_so(exp):
    done = exp(*TINY, "nproc=2", "output_dir=run", **STALE)
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("warning: ignoring LOCAL_RANK, MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE of the shell")
    assert exp.result("run")["world_size"] == 2
