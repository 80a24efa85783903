from __future__ import annotations

import pytest
import torch

from exp.errors import ConfigError
from exp.models.base import Model


class Line(Model):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, y=None, mode="tensor"):
        prediction = self.slope * x
        return {"loss": (prediction - y).square().mean()} if mode == "loss" else prediction


def test_several_losses_are_summed_by_name_and_others_are_refused():
    losses = {"time_loss": torch.tensor(2.0), "loss_kl": torch.tensor(3.0), "accuracy": torch.tensor(7.0)}
    assert Line().parse_losses(losses) == (5.0, {**losses, "loss": 5.0})
    wrong_ones = (
        ({"accuracy": torch.ones(())}, "accuracy"),
        ({"loss": torch.ones(3)}, r"\(3,\)"),
        (torch.ones(()), "Tensor"),
    )
    for wrong, named in wrong_ones:
        with pytest.raises(ConfigError, match=named):
            Line().parse_losses(wrong)
