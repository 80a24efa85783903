from __future__ import annotations

import pytest
import torch

from exp.engine.placement import check_optimizer, check_placement, placement_report
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


def test_what_is_all_here_passes():
    check_placement(torch.nn.BatchNorm1d(3), torch.device("cpu"), rank=0)


def test_an_optimizer_of_other_parameters_is_refused():
    model = torch.nn.Linear(2, 2)
    stale = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1)
    check_optimizer(model, torch.optim.SGD(model.parameters(), lr=1), rank=0)
    with pytest.raises(PlacementError, match="rank 1: 2 tensors of the optimizer are not parameters of the model"):
        check_optimizer(model, stale, rank=1)


def test_the_report_counts_and_shows_the_first_parameters():
    report = placement_report(torch.nn.Linear(2, 3), torch.device("cpu"), 3, 1, 8, "gloo")
    assert "rank 3  local_rank 1  world_size 8  device cpu  gloo" in report
    assert "9 values in 2 parameters; tensors by device: cpu 2" in report
    assert "weight: cpu, shape (3, 2), torch.float32" in report
