"""Masks by sample: the same at any number of ranks and micro-batches, of any device, and as often as they are asked."""

from __future__ import annotations

import pytest
import torch

from exp.data.loader import TrainBatchSampler
from exp.errors import ConfigError
from exp.models.dropout import Dropout, Dropout2d, DropoutStream, DropPath, sample_mask


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = Dropout(0.3), Dropout(0.3), Dropout2d(0.5), DropPath(0.5)


def _masks(world_size=1, accumulate=1, step=3, seed=5, sizes=()):
    """Of the 16 samples of one step, two rows each, in their order."""
    parts = []
    sizes = sizes or [16 // world_size // accumulate] * world_size
    for micro in range(accumulate):
        for rank, size in enumerate(sizes):
            net = Net()
            stream = DropoutStream(net, TrainBatchSampler(64, 0, rank, world_size, accumulate, parts=sizes), seed)
            stream.begin(step, micro)
            ones = torch.ones(size * 2, 3, 50)
            picture = net.c(torch.ones(size, 150, 2, 2)).view(size * 2, 3, 100)
            paths = [net.d(ones, slot) for slot in (0, 1)]
            parts.append(torch.cat([net.a(ones), net.b(ones), net.b(ones, slot=1), picture, *paths], dim=-1))
            stream.end()
    return torch.cat(parts)


def test_every_layer_slot_sample_step_and_seed_has_a_mask_of_its_own_at_any_number_of_ranks():
    whole = _masks()
    for world_size, accumulate in ((2, 1), (1, 2), (2, 4), (8, 1)):
        assert torch.equal(_masks(world_size, accumulate), whole)
    assert torch.equal(_masks(3, 2, sizes=[5, 1, 2]), whole)
    paths = whole[..., -100:].reshape(32, 3, 2, 50).transpose(1, 2).flatten(2)  # of each row and slot
    assert paths.eq(paths[:, :, :1]).all()
    assert len(paths[:, :, 0].unique(dim=0)) == 4
    masks = [*whole[:, :, :150].split(50, dim=-1), _masks(step=4)[..., :50], _masks(seed=6)[..., :50]]
    masks += [masks[0].roll(2, 0), masks[0].roll(1, 0), masks[0].roll(1, 2)]
    correlation = torch.corrcoef(torch.stack([mask.flatten() for mask in masks]).gt(0).double())
    assert (correlation - torch.eye(len(masks)).double()).abs().max() < 0.1


def test_the_probability_is_kept_and_the_mean_is_one():
    net = Net()
    stream = DropoutStream(net, TrainBatchSampler(64, 8), 1)
    stream.begin(0, 0)
    try:
        mask = sample_mask(net.a, torch.empty(8, 100_000), 0.1).double()
        rows = sample_mask(net.a, torch.empty(8, 5, 7, dtype=torch.bfloat16), 0.5, per_sample=True)
        with pytest.raises(ValueError, match="8 samples"):
            sample_mask(net.a, torch.empty(9, 2), 0.1)
    finally:
        stream.end()
    assert (rows.shape, rows.dtype) == ((8, 1, 1), torch.bfloat16)
    assert mask.mean().item() == pytest.approx(1.0, abs=2e-3)
    assert mask.eq(0).double().mean(1).tolist() == pytest.approx([0.1] * 8, abs=5e-3)


def test_a_module_that_is_used_twice_has_two_masks_and_the_same_ones_when_computed_anew():
    net = Net()
    ones = torch.ones(8, 100)
    stream = DropoutStream(net, TrainBatchSampler(64, 8), 1)
    for _ in range(2):
        stream.begin(0, 0)
        first, second, third = net.a(ones), net.a(ones), net.b(ones)
        assert not torch.equal(first, second)
        with stream.during_backward():
            for _ in range(2):
                assert torch.equal(net.b(ones), third)  # as activation checkpointing does
            with pytest.raises(ConfigError, match=r"slot="):
                net.a(ones)
        assert not torch.equal(net.b(ones), third)  # a further forward pass of the same step
        stream.end()
