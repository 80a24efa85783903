from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from exp.data.loader import EvalBatchSampler, TrainBatchSampler, preserved_generators, seed_sample
from exp.errors import ConfigError, DataError


def flat(parts):
    return list(itertools.chain(*parts))


def steps(num_samples, batch_size, world_size, accumulate, epoch=0, samples=0, seed=7, parts=()):
    """By optimizer step, the samples of all ranks together, in global order."""
    ranks = []
    for rank in range(world_size):
        sampler = TrainBatchSampler(num_samples, batch_size, rank, world_size, accumulate, seed, parts=parts)
        sampler.set_position(epoch, samples)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == (len(sampler) - samples // sampler.global_batch_size) * accumulate
    micro_batches = [torch.cat(parts).tolist() for parts in zip(*ranks)]
    return [flat(micro_batches[begin : begin + accumulate]) for begin in range(0, len(micro_batches), accumulate)]


@pytest.mark.parametrize(
    ("batch_size", "world_size", "accumulate"),
    [(24, 1, 1), (12, 2, 1), (8, 3, 1), (3, 8, 1), (1, 24, 1), (12, 1, 2), (2, 4, 3), (1, 1, 24)],
)
def test_steps_do_not_depend_on_the_world_size_and_go_on_at_another(batch_size, world_size, accumulate):
    shape = batch_size, world_size, accumulate
    expected = steps(101, 24, 1, 1, epoch=2)
    assert len(set(flat(expected)) & set(range(101))) == 96  # none twice
    assert steps(101, *shape, epoch=2) == expected
    assert steps(101, *shape, epoch=2, samples=48) == expected[2:]


def test_steps_do_not_depend_on_the_parts_of_the_ranks():
    for accumulate, parts in ((1, (1, 20, 3)), (2, (7, 5)), (3, (1, 1, 1, 5))):
        shape = 0, len(parts), accumulate
        assert steps(101, *shape, epoch=1, samples=24, parts=parts) == steps(101, 24, 1, 1, epoch=1)[1:]


def test_order_depends_on_epoch_and_seed_alone():
    orders = [steps(50, 10, 1, 1, epoch=epoch, seed=seed) for epoch in range(3) for seed in range(3)]
    assert len({str(order) for order in orders}) == 9
    # Pins the order across versions of Python, numpy and torch: a checkpoint continues under another one.
    assert steps(8, 8, 1, 1, seed=2023) == [[1, 7, 4, 6, 2, 0, 3, 5]]


def test_what_cannot_be_is_refused():
    for position in ((0, 3), (0, 12), (-1, 0), (0, -4)):
        with pytest.raises(ConfigError, match="global_batch_size=4"):
            TrainBatchSampler(10, 4).set_position(*position)
    with pytest.raises(DataError, match=r"47 samples.* 48 .*batch_size 4 x 3 ranks x accumulate 4.*at most 47"):
        TrainBatchSampler(47, 4, rank=0, world_size=3, accumulate=4)


def test_evaluation_sees_each_sample_once():
    for num_samples, batch_size, world_size in itertools.product((1, 7, 20, 101), (1, 4, 5, 128), (1, 2, 3, 8, 13)):
        ranks = [EvalBatchSampler(num_samples, batch_size, rank, world_size) for rank in range(world_size)]
        shares = [[batch.tolist() for batch in sampler] for sampler in ranks]
        assert [len(batches) for batches in shares] == [len(sampler) for sampler in ranks]
        assert all(0 < len(batch) <= batch_size for batches in shares for batch in batches)
        sizes = [sum(map(len, batches)) for batches in shares]
        assert max(sizes) - min(sizes) <= 1
        assert {sampler.common_batches for sampler in ranks} == {min(sizes) // batch_size}
        assert sorted(flat(flat(shares))) == list(range(num_samples))
    ranks = [EvalBatchSampler(20, 4, rank, 3, [1.0, 3.0, 1.0]) for rank in range(3)]
    assert [(sampler.first, sampler.end, sampler.common_batches) for sampler in ranks] == [
        (0, 4, 1), (4, 16, 1), (16, 20, 1)
    ]  # fmt: skip


def test_random_numbers_of_a_sample_follow_from_seed_epoch_and_sample_alone():
    def draws():
        return random.random(), np.random.rand(), float(torch.rand(()))

    def sample(*place):
        seed_sample(*place)
        return draws()

    # Pins them across versions of Python, NumPy and torch, as the order above.
    assert sample(2023, 1, 5) == pytest.approx((0.3782109, 0.8043060, 0.5365197), rel=1e-6)
    every = [sample(*place) for place in itertools.product((0, 1), (0, 1), (0, 1))]
    assert len({*every}) == 8
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with preserved_generators():
        sample(0, 0, 0)
    assert draws() == first
