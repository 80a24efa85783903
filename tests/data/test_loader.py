from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from exp.data.loader import EvalBatchSampler, TrainBatchSampler, make_loader, tensors_of, to_device
from exp.forecasting.data.dataset import WindowDataset


@pytest.fixture
def dataset():
    return WindowDataset({"x": torch.randn(5, 60).t(), "marks": torch.randn(4, 60).t()}, range(60), 7, 3)


def assert_equal_batches(these, those):
    these, those = list(these), list(those)
    assert len(these) > 0
    torch.testing.assert_close(these, those, rtol=0, atol=0, check_stride=True)


def test_workers_change_nothing(dataset):
    loaders = [make_loader(dataset, TrainBatchSampler(51, 4, 1, 2, seed=3), workers, 3) for workers in (0, 2)]
    assert_equal_batches(*loaders)
    loaders = [make_loader(dataset, EvalBatchSampler(51, 8, 0, 2), workers) for workers in (0, 2)]
    assert_equal_batches(*loaders)


Pair = namedtuple("Pair", ["left", "right"])
META = torch.device("meta")  # stands for a card


def test_tensors_are_moved_wherever_they_stand():
    one = torch.ones(2)
    parts = (one, [one, {"deep": one, "size": 12}], "name", None)
    batch = {"parts": parts, "pair": Pair(one, [3, one]), "ordered": OrderedDict(a=one), "box": SimpleNamespace(x=one)}
    moved = to_device(batch, META)
    assert [tensor.device.type for tensor in tensors_of(moved)] == ["meta"] * 6
    assert [tensor.device.type for tensor in tensors_of(batch)] == ["cpu"] * 6  # what came is as it was
    assert [type(moved[key]) for key in ("parts", "pair", "ordered")] == [tuple, Pair, OrderedDict]
    others = moved["parts"][1][1]["size"], *moved["parts"][2:], moved["pair"].right[0], moved["box"]
    assert others == (12, "name", None, 3, batch["box"])
    assert to_device(batch, torch.device("cpu")) is batch
    packed = to_device({"x": pack_sequence([torch.ones(3), torch.ones(2)])}, META)["x"]
    assert (packed.data.device.type, packed.batch_sizes.device.type) == ("meta", "cpu")  # lengths stay
