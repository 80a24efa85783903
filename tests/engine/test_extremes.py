"""The worst and the best samples: the same for any batch size and number of ranks, and no more than these are kept."""

from __future__ import annotations

import threading

import pytest
import torch

from exp.engine.distributed import Distributed
from exp.engine.extremes import Extremes
from exp.metrics import Evaluator, SampleMetric

VALUES = torch.tensor([5.0, 1.0, float("nan"), 9.0, 3.0, 9.0, 2.0, 7.0])


class Score(SampleMetric):
    names = ("score",)

    def __init__(self, greater_is_better: bool) -> None:
        super().__init__()
        self.greater_is_better = greater_is_better

    def per_sample(self, outputs, batch):
        return outputs[:, 0]


class Ranks:
    """``gather`` of several ranks that are threads."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.values = [None] * count
        self.sent = []

    def of(self, rank: int) -> Distributed:
        group = Distributed()

        def gather(value):
            self.sent.append(len(value))
            self.values[rank] = value
            self.barrier.wait(20)
            found = list(self.values)
            self.barrier.wait(20)
            return found

        group.gather = gather
        return group


def found(ranks: int, batch: int, greater: bool, worst: int = 3, best: int = 2):
    groups, results = Ranks(ranks), [None] * ranks

    def work(rank: int) -> None:
        extremes = Extremes(Evaluator([Score(greater)]), Score(greater), worst, best)
        extremes.reset()
        numbers = torch.arange(len(VALUES))[rank::ranks]
        for part in numbers.split(batch):
            outputs = VALUES[part].unsqueeze(1).repeat(1, 4)
            extremes.update(outputs, {"index": part})
        kept = extremes._worst + extremes._best
        assert all(sample.outputs.storage().size() == 4 for sample in kept), "not whole batches"
        results[rank] = extremes.collect(groups.of(rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert max(groups.sent) <= worst + best
    for each in results:
        for sample in each[0] + each[1]:
            assert sample.outputs.tolist() == [sample.value] * 4
    shown = [tuple([sample.number for sample in part] for part in each) for each in results]
    assert all(each == shown[0] for each in shown)
    return shown[0]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_worst_and_the_best(ranks, batch):
    assert found(ranks, batch, greater=True) == ([1, 6, 4], [3, 5])
    assert found(ranks, batch, greater=False) == ([3, 5, 7], [1, 6])


def test_few_samples_are_in_one_of_the_two_lists():
    assert found(2, 4, greater=True, worst=5, best=9) == ([1, 6, 4, 0, 7], [3, 5])
