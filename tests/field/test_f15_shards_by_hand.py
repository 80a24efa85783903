"""F15: DataParallel had no sampler, shards were added by hand, and metrics came from padded or partial shards.

Torch's DistributedSampler repeats samples until every rank has as many: an evaluation over it counts some twice.

With exp sharding is automatic, and an evaluation covers every sample once, whatever the number of processes.
"""

from __future__ import annotations

import pytest

from tests.conftest import TINY

pytestmark = pytest.mark.slow  # nothing in it depends on the version of torch


def test_stock_sampler_counts_samples_twice(stock):
    script = """
        from torch.utils.data import DistributedSampler
        data = list(range(10))
        seen = [i for rank in range(4) for i in DistributedSampler(data, 4, rank, shuffle=False)]
        print(len(seen), sum(data[i] for i in seen) / len(seen))
    """
    (ended,) = stock(script)
    assert ended.printed.split() == ["12", str((45 + 0 + 1) / 12)]  # not 10 and 4.5


def test_exp_evaluates_every_sample_once(exp):
    exp.train("run")
    evaluate = [*TINY, "task=eval", "init_from=run"]
    for nproc in (1, 3):  # the 2785 test windows divide by neither
        done = exp(*evaluate, f"nproc={nproc}", f"output_dir=eval{nproc}", "data.eval_batch_size=64")
        assert done.returncode == 0, done.stderr
    assert exp.result("eval3")["metrics"] == pytest.approx(exp.result("eval1")["metrics"], rel=1e-7)
    assert exp.result("eval1")["metrics"] == pytest.approx(exp.result("run")["metrics"], rel=1e-7)
