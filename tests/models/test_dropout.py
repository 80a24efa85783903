"""Masks by sample: the same at any number of ranks and micro-batches, of any device, and as often as they are asked."""

import pytest
import torch

from exp.data.sampler import TrainBatchSampler
from exp.errors import ConfigError
from exp.models.dropout import Dropout, Dropout2d, DropoutStream, backward_begins, sample_mask
from tests.conftest import TINY


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Dropout(0.3), Dropout(0.3), Dropout2d(0.5)


def _masks(world_size, accumulate, step=3, seed=5, rows=2):
    """Of the 16 samples of one step, in their order."""
    parts = []
    for micro in range(accumulate):
        for rank in range(world_size):
            size = 16 // world_size // accumulate
            net = Net()
            stream = DropoutStream(net, TrainBatchSampler(64, size, rank, world_size, accumulate), seed)
            stream.begin(step, micro)
            ones = torch.ones(size * rows, 3, 50)
            picture = net.c(torch.ones(size, 150, 2, 2)).view(size * rows, 3, 100)
            parts.append(torch.cat([net.a(ones), net.b(ones), net.b(ones, slot=1), picture], dim=-1))
            stream.end()
    return torch.cat(parts)


def test_ranks_and_micro_batches_have_the_masks_of_their_samples():
    whole = _masks(1, 1)
    for world_size, accumulate in ((2, 1), (1, 2), (2, 4), (8, 1)):
        assert torch.equal(_masks(world_size, accumulate), whole)


def test_every_layer_slot_sample_step_and_seed_has_a_mask_of_its_own():
    whole = _masks(1, 1)
    masks = [*whole[:, :, :150].split(50, dim=-1), _masks(1, 1, step=4)[..., :50], _masks(1, 1, seed=6)[..., :50]]
    masks += [masks[0].roll(2, 0), masks[0].roll(1, 0), masks[0].roll(1, 2)]
    kept = torch.stack([mask.flatten() for mask in masks]).gt(0).double()
    kept = (kept - kept.mean(1, keepdim=True)) / kept.std(1, keepdim=True)
    correlation = kept @ kept.t() / kept.shape[1] - torch.eye(len(kept)).double()
    assert correlation.abs().max() < 0.1


def test_the_probability_is_kept_and_the_mean_is_one():
    net = Net()
    stream = DropoutStream(net, TrainBatchSampler(64, 8), 1)
    stream.begin(0, 0)
    try:
        mask = sample_mask(net.a, torch.empty(8, 100_000), 0.1)
        rows = sample_mask(net.a, torch.empty(8, 5, 7, dtype=torch.bfloat16), 0.5, per_sample=True)
        with pytest.raises(ValueError, match="no multiple of the 8 samples"):
            sample_mask(net.a, torch.empty(9, 2), 0.1)
    finally:
        stream.end()
    assert rows.shape == (8, 1, 1)
    assert rows.dtype == torch.bfloat16
    assert mask.eq(0).double().mean().item() == pytest.approx(0.1, abs=2e-3)
    assert mask.double().mean().item() == pytest.approx(1.0, abs=2e-3)
    by_row = mask.eq(0).double().mean(1)
    assert by_row.sub(0.1).abs().max() < 5e-3


def test_a_module_that_is_used_twice_has_two_masks_and_the_same_ones_when_computed_anew():
    net = Net()
    ones = torch.ones(8, 100)
    stream = DropoutStream(net, TrainBatchSampler(64, 8), 1)
    for _ in range(2):
        stream.begin(0, 0)
        first, second, third = net.a(ones), net.a(ones), net.b(ones)
        assert not torch.equal(first, second)
        backward_begins()
        assert torch.equal(net.b(ones), third)  # as activation checkpointing does
        assert torch.equal(net.b(ones), third)
        with pytest.raises(ConfigError, match=r"Dropout drops 2 times in a pass.* slot="):
            net.a(ones)
        stream.end()
    backward_begins()  # without a stream, nothing


def test_one_and_two_processes_train_alike_with_dropout_and_resume_at_the_other_number(exp):
    settings = [*TINY[:-3], "max_steps=6", "log_every=1", "plots=false", "model.dropout=0.2", "dropout_by_sample=true"]
    settings += ["model.cointegrated_layers=1", "checkpoint.every_steps=3", "checkpoint.keep_last=9"]
    for name, *more in (
        ("one", "nproc=1"), ("two", "nproc=2"), ("back", "nproc=1", "resume=two/checkpoints/step_00000003.pth"),
    ):  # fmt: skip
        done = exp(*settings, f"output_dir={name}", *more)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two, back = (exp.losses(name) for name in ("one", "two", "back"))
    assert two == pytest.approx(one, rel=1e-5)
    assert back == pytest.approx({step: one[step] for step in (4, 5, 6)}, rel=1e-5)
