"""Batches on their way to a device; torch's meta device stands for a card."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pack_sequence

from exp.data.loader import move, tensors_of

Pair = namedtuple("Pair", ["left", "right"])
META = torch.device("meta")


def nested():
    one = torch.ones(2)
    parts = (one, [one, {"deep": one, "size": 12}], "name", None)
    return {"parts": parts, "pair": Pair(one, [3, one]), "ordered": OrderedDict(a=one), "box": SimpleNamespace(x=one)}


def test_tensors_are_moved_wherever_they_stand():
    batch = nested()
    moved = move(batch, META)
    assert [tensor.device.type for tensor in tensors_of(moved)] == ["meta"] * 6
    assert [tensor.device.type for tensor in tensors_of(batch)] == ["cpu"] * 6  # what came is as it was
    assert [type(moved[key]) for key in ("parts", "pair", "ordered")] == [tuple, Pair, OrderedDict]
    others = moved["parts"][1][1]["size"], *moved["parts"][2:], moved["pair"].right[0], moved["box"]
    assert others == (12, "name", None, 3, batch["box"])
    assert move(batch, torch.device("cpu")) is batch
    packed = move({"x": pack_sequence([torch.ones(3), torch.ones(2)])}, META)["x"]
    assert (packed.data.device.type, packed.batch_sizes.device.type) == ("meta", "cpu")  # lengths stay
