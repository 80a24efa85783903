"""The losses that are shown are means over what was computed: by name, over micro-batches and ranks."""

from __future__ import annotations

import pytest
import torch

from exp.engine.losses import LossMeter


def test_a_loss_that_some_batches_have_not_is_the_mean_over_the_others():
    meter = LossMeter()
    for number in range(4):
        meter.add({"loss": torch.tensor(float(number)), **({"loss_rare": torch.tensor(8.0)} if number == 1 else {})})
    assert meter.read() == {"loss": 1.5, "loss_rare": 8.0}
    assert meter.read() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_sums_are_float32_whatever_comes_in(dtype):
    meter = LossMeter()
    for _ in range(3000):
        meter.add({"loss": torch.tensor(3, dtype=dtype)})  # 3000 times 3 is beyond what bf16 can count
    assert meter.read() == {"loss": 3.0}


def test_ranks_with_different_losses_agree_on_their_means(ranks):
    script = """
        from exp.engine.losses import mean_over_ranks
        distributed = join()
        own = {"loss": 1.0, "loss_a": 2.0} if rank == 0 else {"loss_b": 5.0, "loss": float("nan")}
        means, by_rank = mean_over_ranks({**own, "lr": float(rank)}, distributed)
        backend.destroy_process_group()
        print(json.dumps([sorted(means.items()), len(by_rank)]))
    """
    first, second = ranks(script, world_size=2)
    assert str(first) == str(second)
    means = dict(first[0])
    assert means["loss"] != means["loss"]
    assert (means["loss_a"], means["loss_b"], means["lr"]) == (2.0, 5.0, 0.5)
