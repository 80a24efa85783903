from __future__ import annotations

import pytest
import torch

from exp.engine.placement import check_optimizer, check_placement
from exp.errors import PlacementError


class Halfway(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.here = torch.nn.Linear(2, 3)
        self.there = torch.nn.Linear(4, 5, device="meta")


def test_what_is_elsewhere_is_named_with_device_and_shape():
    with pytest.raises(PlacementError) as caught:
        check_placement(Halfway(), torch.device("cpu"), rank=3)
    text = str(caught.value)
    assert text.startswith("rank 3: 2 of 4 parameters and buffers are not on cpu")
    assert "there.weight: meta, shape (5, 4)" in text


def test_an_optimizer_of_other_parameters_is_refused():
    model = torch.nn.Linear(2, 2)
    stale = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1)
    check_optimizer(model, torch.optim.SGD(model.parameters(), lr=1), rank=0)
    with pytest.raises(PlacementError, match="rank 1: 2 tensors of the optimizer are not parameters of the model"):
        check_optimizer(model, stale, rank=1)
