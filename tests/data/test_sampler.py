from __future__ import annotations

import itertools

import pytest
import torch

from exp.data.sampler import EvalBatchSampler, TrainBatchSampler
from exp.errors import ConfigError, DataError


def steps(num_samples, batch_size, world_size, accumulate, epoch=0, samples=0, seed=7):
    """By optimizer step, the samples of all ranks together, in global order."""
    ranks = []
    for rank in range(world_size):
        sampler = TrainBatchSampler(num_samples, batch_size, rank, world_size, accumulate, seed)
        sampler.set_position(epoch, samples)
        batches = list(sampler)
        assert len(batches) == (len(sampler) - samples // sampler.global_batch_size) * accumulate
        assert all(batch.shape == (batch_size,) for batch in batches)
        ranks.append(batches)
    micro_batches = [torch.cat(parts).tolist() for parts in zip(*ranks)]
    return [
        list(itertools.chain(*micro_batches[begin : begin + accumulate]))
        for begin in range(0, len(micro_batches), accumulate)
    ]


SHAPES = [(24, 1, 1), (12, 2, 1), (8, 3, 1), (3, 8, 1), (1, 24, 1), (12, 1, 2), (2, 4, 3), (1, 1, 24)]


@pytest.mark.parametrize(("batch_size", "world_size", "accumulate"), SHAPES)
def test_steps_do_not_depend_on_the_world_size(batch_size, world_size, accumulate):
    expected = steps(101, 24, 1, 1)
    assert len(expected) == 101 // 24
    assert steps(101, batch_size, world_size, accumulate) == expected


@pytest.mark.parametrize(("batch_size", "world_size", "accumulate"), SHAPES)
def test_resumes_exactly_at_another_world_size(batch_size, world_size, accumulate):
    whole = steps(101, 24, 1, 1, epoch=2)
    assert steps(101, batch_size, world_size, accumulate, epoch=2, samples=48) == whole[2:]


def test_an_epoch_has_no_sample_twice_and_drops_the_rest():
    seen = list(itertools.chain(*steps(101, 4, 3, 2)))
    assert len(seen) == len(set(seen)) == 96
    assert set(seen) <= set(range(101))


def test_order_depends_on_epoch_and_seed():
    orders = [steps(50, 10, 1, 1, epoch=epoch, seed=seed) for epoch in range(3) for seed in range(3)]
    assert len({str(order) for order in orders}) == 9
    assert steps(50, 10, 1, 1, epoch=1, seed=2) == orders[5]


def test_order_is_a_fixed_one():
    # Pins the order across versions of Python, numpy and torch: a checkpoint continues under another one.
    assert steps(8, 8, 1, 1, seed=2023) == [[1, 7, 4, 6, 2, 0, 3, 5]]


def test_the_position_is_that_of_iter():
    sampler = TrainBatchSampler(20, 4, seed=1)
    expected = list(sampler)
    batches = iter(sampler)
    sampler.advance()  # as the trainer does, while a worker has not asked for its first batch
    assert torch.equal(next(batches), expected[0])


@pytest.mark.parametrize(("epoch", "samples"), [(0, 3), (0, 12), (-1, 0), (0, -4)])
def test_impossible_positions(epoch, samples):
    sampler = TrainBatchSampler(10, 4)
    with pytest.raises(ConfigError, match="global_batch_size=4"):
        sampler.set_position(epoch, samples)
    assert sampler.state_dict() == {"epoch": 0, "samples": 0}


def test_fewer_samples_than_a_global_batch():
    with pytest.raises(DataError) as error:
        TrainBatchSampler(47, 4, rank=0, world_size=3, accumulate=4)
    for part in ("47 samples", "global batch of 48", "batch_size 4 x 3 ranks x accumulate 4", "at most 47"):
        assert part in str(error.value)


def test_each_epoch_leaves_out_others():
    sampler = TrainBatchSampler(23, 5)
    left = []
    for epoch in range(3):
        sampler.set_position(epoch, 0)
        left.append(set(range(23)) - set(torch.cat(list(sampler)).tolist()))
    assert [len(each) for each in left] == [sampler.left_out] * 3 == [3] * 3
    assert not left[0] == left[1] == left[2]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 128])
@pytest.mark.parametrize("num_samples", [1, 7, 20, 101])
def test_evaluation_sees_each_sample_once(num_samples, batch_size, world_size):
    seen, shares = [], []
    for rank in range(world_size):
        sampler = EvalBatchSampler(num_samples, batch_size, rank, world_size)
        batches = [batch.tolist() for batch in sampler]
        assert len(batches) == len(sampler)
        assert all(0 < len(batch) <= batch_size for batch in batches)
        shares.append(sum(map(len, batches)))
        seen += itertools.chain(*batches)
    assert sorted(seen) == list(range(num_samples))
    assert max(shares) - min(shares) <= 1
