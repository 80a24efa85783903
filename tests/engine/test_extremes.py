"""The worst and the best samples: the same for any batch size and number of ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from exp.engine.evaluate import Ranking
from exp.metrics import SampleMetric

VALUES = torch.tensor([5.0, 1.0, float("nan"), 9.0, 3.0, 9.0, 2.0, 7.0])


class Score(SampleMetric):
    names = ("score",)

    def per_sample(self, outputs, batch):
        return outputs[:, 0]


def found(ranks: int, batch: int, greater: bool, worst: int = 3, best: int = 2):
    """Numbers of the worst and of the best samples, one rank after another."""
    sent: list = []
    for rank in range(ranks):
        score = Score()
        score.greater_is_better = greater
        ranking = Ranking(score)
        for part in torch.arange(len(VALUES))[rank::ranks].split(batch):
            ranking.add(VALUES[part].unsqueeze(1).repeat(1, 4), {"index": part})
        group = SimpleNamespace(gather=lambda value: [*sent, value])
        both = ranking.worst_and_best(group, worst, best)
        ranking.worst_and_best(SimpleNamespace(gather=lambda value: sent.append(value) or []), worst, best)
    return tuple([number for number, _ in part] for part in both)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_worst_and_the_best(ranks, batch):
    assert found(ranks, batch, greater=True) == ([1, 6, 4], [3, 5])
    assert found(ranks, batch, greater=False) == ([3, 5, 7], [1, 6])
    assert found(ranks, batch, greater=True, worst=5, best=9) == ([1, 6, 4, 0, 7], [3, 5])  # none is in both
