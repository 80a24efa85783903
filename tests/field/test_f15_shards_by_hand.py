"""F15: DataParallel had no sampler, shards were added by hand, and metrics came from padded or partial shards.

Torch's DistributedSampler repeats samples until every rank has as many: an evaluation over it counts some twice.

With exp sharding is automatic, and an evaluation covers every sample once, whatever the number of processes.
"""

from __future__ import annotations

import pytest

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
