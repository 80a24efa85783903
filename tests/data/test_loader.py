from __future__ import annotations

import pytest
import torch

from exp.data.loader import eval_loader, train_loader
from exp.data.sampler import EvalBatchSampler, TrainBatchSampler
from exp.forecasting.data.windows import WindowDataset


@pytest.fixture
def dataset():
    return WindowDataset(torch.randn(5, 60).t(), torch.randn(4, 60).t(), range(60), 7, 3)


def assert_equal_batches(these, those):
    these, those = list(these), list(those)
    assert len(these) > 0
    torch.testing.assert_close(these, those, rtol=0, atol=0, check_stride=True)


def test_workers_change_nothing(dataset):
    loaders = [train_loader(dataset, TrainBatchSampler(51, 4, 1, 2, seed=3), workers, 3) for workers in (0, 2)]
    assert_equal_batches(*loaders)
    loaders = [eval_loader(dataset, EvalBatchSampler(51, 8, 0, 2), workers) for workers in (0, 2)]
    assert_equal_batches(*loaders)


@pytest.mark.parametrize("workers", [0, 2])
def test_continues_at_the_position(dataset, workers):
    sampler = TrainBatchSampler(51, 4, seed=3)
    batches_of = train_loader(dataset, sampler, workers, 3)
    whole = list(batches_of)
    batches = iter(batches_of)
    for _ in range(5):  # the trainer stops in the middle; workers have read ahead
        next(batches)
        sampler.advance()
    del batches
    assert_equal_batches(batches_of, whole[5:])
