"""The worst and the best samples: the same for any batch size and number of ranks, and no more than these are kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from exp.engine.distributed import Distributed
from exp.engine.extremes import Extremes
from exp.metrics import Evaluator, SampleMetric

VALUES = torch.tensor([5.0, 1.0, float("nan"), 9.0, 3.0, 9.0, 2.0, 7.0])


class Score(SampleMetric):
    names = ("score",)

    def per_sample(self, outputs, batch):
        return outputs[:, 0]


def found(ranks: int, batch: int, greater: bool, worst: int = 3, best: int = 2):
    """Numbers of the worst and of the best samples, which all ranks have; ranks are threads here."""
    barrier, sent = threading.Barrier(ranks, timeout=20), [None] * ranks

    def work(rank: int):
        group = Distributed()

        def gather(value):
            assert len(value) <= worst + best
            sent[rank] = value
            barrier.wait()
            gathered = list(sent)
            barrier.wait()
            return gathered

        group.gather = gather
        score = Score()
        score.greater_is_better = greater
        extremes = Extremes(Evaluator([score]), score, worst, best)
        extremes.reset()
        for part in torch.arange(len(VALUES))[rank::ranks].split(batch):
            extremes.update(VALUES[part].unsqueeze(1).repeat(1, 4), {"index": part})
        both = extremes.collect(group)
        for sample in both[0] + both[1]:
            assert sample.outputs.tolist() == [sample.value] * 4
            assert sample.outputs.storage().size() == 4, "not whole batches"
        return tuple([sample.number for sample in part] for part in both)

    with ThreadPoolExecutor(ranks) as pool:
        first, *others = pool.map(work, range(ranks))
    assert others == [first] * (ranks - 1)
    return first


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_worst_and_the_best(ranks, batch):
    assert found(ranks, batch, greater=True) == ([1, 6, 4], [3, 5])
    assert found(ranks, batch, greater=False) == ([3, 5, 7], [1, 6])


def test_few_samples_are_in_one_of_the_two_lists():
    assert found(2, 4, greater=True, worst=5, best=9) == ([1, 6, 4, 0, 7], [3, 5])
