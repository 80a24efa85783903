"""Batches on their way to a device; torch's meta device stands for a card."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pack_sequence

from exp.data.transfer import DeviceLoader, move, tensors_of

Pair = namedtuple("Pair", ["left", "right"])
META = torch.device("meta")


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


def nested():
    one = torch.ones(2)
    return {
        "x": one,
        "parts": (one, [one, {"deep": one, "size": 12}], "name", None),
        "pair": Pair(one, [3, one]),
        "ordered": OrderedDict(a=one, b="text"),
        "box": Box(one),
        "ids": ["a", "b"],
    }


def test_tensors_are_moved_wherever_they_stand():
    batch = nested()
    moved = move(batch, META)
    found = list(tensors_of(moved))
    assert len(found) == len(list(tensors_of(batch))) == 7
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert [type(moved[key]) for key in ("parts", "pair", "ordered")] == [tuple, Pair, OrderedDict]
    assert moved["parts"][1][1]["size"] == 12
    assert moved["parts"][2:] == ("name", None)
    assert moved["pair"].right[0] == 3
    assert moved["ordered"]["b"] == "text"
    assert moved["box"] is batch["box"]
    assert moved["ids"] == ["a", "b"]
    assert {tensor.device.type for tensor in tensors_of(batch)} == {"cpu"}  # what came is as it was
    assert move(batch, torch.device("cpu")) is batch


def test_a_packed_sequence_keeps_its_lengths_on_the_cpu():
    moved = move({"x": pack_sequence([torch.ones(3), torch.ones(2)])}, META)["x"]
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_all_that_crosses_beside_the_computation_is_kept_until_that_is_through(monkeypatch):
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(tensor))
    side = SimpleNamespace(wait_stream=lambda other: None)
    loader = DeviceLoader([nested()], None, META, pinned=False)
    monkeypatch.setattr(loader, "_streams", SimpleNamespace(current_stream=lambda device: side, stream=Nothing))
    (batch,) = loader
    assert [id(tensor) for tensor in kept] == [id(tensor) for tensor in tensors_of(batch)]


class Nothing:
    def __init__(self, stream):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *given):
        pass
