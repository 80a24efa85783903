"""The rate of a training: operations by seconds, as a share of what the devices do at best."""

from __future__ import annotations

import pytest
import torch

from exp.data.base import Data
from exp.estimate import training as rate_module
from exp.estimate.training import LEAST_SECONDS, training_rate
from exp.hardware.compat import supports_estimates
from exp.models.base import Model


class Product(Model):
    """A product; ``reads`` a value, which the meta device has not."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.layer, self.reads = torch.nn.Linear(64, 256, bias=False), reads

    def forward(self, x, mode="loss"):
        loss = self.layer(x).mean()
        return {"loss": loss * 2 if self.reads and loss > 0 else loss}


class Rows(Data):
    def __init__(self):
        self.train = [{"x": torch.ones(64)}] * 16

    def metrics(self, detailed=False):
        """Nothing is measured."""


@pytest.mark.skipif(not supports_estimates(), reason="torch < 2.3 does not count")
def test_the_rate_is_that_of_all_ranks_if_the_training_was_long_and_its_operations_can_be_counted(
    make_session, monkeypatch
):
    def rate(seconds=LEAST_SECONDS, **model):
        session.config.model = {"_target_": f"{__name__}.Product", **model}
        return training_rate(session, Rows(), samples_per_second=1000.0, seconds=seconds)

    monkeypatch.setattr(rate_module, "matrix_rate", lambda *_: 1e9)
    session = make_session(world_size=2, batch_size=8)
    found = rate()
    assert found["flops_per_second"] == 1000 * 2 * (2 * 64 * 256)  # forward, and backward for the weights
    assert found["flops_share"] == found["flops_per_second"] / (2 * 1e9)
    assert rate(seconds=0.9 * LEAST_SECONDS) == rate(reads=True) == {}
