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
