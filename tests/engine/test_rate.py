"""The rate of a training: operations by theory, over seconds, over what the device does at best."""

from __future__ import annotations

import pytest
import torch
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
    train = [{"x": torch.ones(64)}] * 16

    def metrics(self, detailed=False):
        raise NotImplementedError


@pytest.mark.skipif(not supports_estimates(), reason="torch < 2.1 does not count")
def test_operations_are_those_of_theory_and_the_share_is_of_all_ranks(make_session):
    session = make_session(world_size=2, model={"_target_": f"{__name__}.Two"}, batch_size=8)
    rate = training_rate(session, Rows(), samples_per_second=1000.0, seconds=LEAST_SECONDS)
    first, second = 2 * 64 * 256, 2 * 256 * 32
    # Forward; backward once for the weights, and for the inputs of the second layer alone.
    assert rate["flops_per_second"] == 1000 * (2 * first + 3 * second)
    alone = matrix_rate(session.backend, session.device, "fp32")
    assert rate["flops_share"] == pytest.approx(rate["flops_per_second"] / (2 * alone), rel=5)


@pytest.mark.parametrize(("seconds", "reads"), [(0.9 * LEAST_SECONDS, False), (LEAST_SECONDS, True)])
def test_a_short_training_and_a_model_that_reads_values_have_none(make_session, seconds, reads):
    session = make_session(model={"_target_": f"{__name__}.Two", "reads": reads}, batch_size=8)
    assert training_rate(session, Rows(), samples_per_second=1000.0, seconds=seconds) == {}
