"""The rate of a training: operations by theory, over seconds, over what the device does at best."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from exp.backends.cpu import CpuBackend
from torch import nn

from exp.compat import supports_estimates
from exp.data.base import Data
from exp.engine.rate import LEAST_SECONDS, training_rate
from exp.matrix_rate import matrix_rate
from exp.models.base import Model


class Two(Model):
    """Two products; ``reads`` a value, which the meta device has not."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256, bias=False), nn.Linear(256, 32, bias=False)
        self.reads = reads

    def forward(self, x, mode="loss"):
        loss = self.second(self.first(x)).mean()
        return {"loss": loss * 2 if self.reads and loss > 0 else loss}


class Rows(Data):
    def __init__(self) -> None:
        self.train = [{"x": torch.ones(64)}] * 16

    def metrics(self, detailed=False):
        raise NotImplementedError


def rate_of(seconds=LEAST_SECONDS, backend=CpuBackend, **model):
    config = SimpleNamespace(model={"_target_": f"{__name__}.Two", **model}, seed=1, batch_size=8, precision="fp32")
    info = SimpleNamespace(rank=0, world_size=2)
    session = SimpleNamespace(config=config, backend=backend(name="cpu"), device=torch.device("cpu"), info=info)
    return training_rate(session, Rows(), samples_per_second=1000.0, seconds=seconds)


@pytest.mark.skipif(not supports_estimates(), reason="torch < 2.1 does not count")
def test_operations_are_those_of_theory_and_the_share_is_of_all_ranks():
    rate = rate_of()
    first, second = 2 * 64 * 256, 2 * 256 * 32
    # Forward; backward once for the weights, and for the inputs of the second layer alone.
    assert rate["flops_per_second"] == 1000 * (2 * first + 3 * second)
    alone = matrix_rate(CpuBackend(name="cpu"), torch.device("cpu"), "fp32")
    assert rate["flops_share"] == pytest.approx(rate["flops_per_second"] / (2 * alone), rel=5)


def test_a_short_training_and_a_model_that_reads_values_have_none():
    assert rate_of(seconds=0.9 * LEAST_SECONDS) == {}
    assert rate_of(reads=True) == {}
