from __future__ import annotations

import torch

from tests.engine.conftest import Line


def test_several_losses_are_summed_by_name_and_others_are_logged():
    losses = {"time_loss": torch.tensor(2.0), "loss_kl": torch.tensor(3.0), "accuracy": torch.tensor(7.0)}
    assert Line().parse_losses(losses) == (5.0, {**losses, "loss": 5.0})
