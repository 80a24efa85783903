"""Operators on a card give what the CPU gives, bit for bit, forward and backward."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card

COMPARE = """
import copy, warnings, torch, torch_gcu
import torch.nn.functional as F
from torch import nn
warnings.simplefilter("ignore")
torch.manual_seed(0)

def compare(name, function, *shapes):
    inputs = [torch.randn(shape) for shape in shapes]
    found = []
    for device in ("cpu", "xla:1"):
        leaves = [value.clone().to(device).requires_grad_() for value in inputs]
        outputs = function(*leaves)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        assert all(output.device == torch.device(device) for output in outputs), name
        total = sum(output.square().sum() for output in outputs if output.requires_grad)
        gradients = torch.autograd.grad(total, leaves, allow_unused=True) if total is not 0 else []
        found.append([value.detach().cpu() for value in (*outputs, *gradients) if value is not None])
    assert len(found[0]) == len(found[1]), name
    for mine, reference in zip(*found):
        assert torch.equal(mine, reference), (name, (mine - reference).abs().max())

def module(made):
    def call(value):
        output = copy.deepcopy(made).to(value.device)(value)
        return output[0] if isinstance(output, tuple) else output
    return call
"""


def test_modules(job):
    job(
        COMPARE
        + """
for made, shape in [
    (nn.Conv1d(3, 4, 3, stride=2), (2, 3, 9)),
    (nn.Conv2d(4, 4, 3, groups=2, padding=1, bias=False), (2, 4, 5, 5)),
    (nn.Conv2d(3, 4, 3, dilation=2, padding="same"), (2, 3, 8, 8)),
    (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (2, 3, 5, 5)),
    (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    (nn.LSTM(3, 4, 2, batch_first=True), (2, 5, 3)),
    (nn.GRU(3, 4), (5, 2, 3)),
    (nn.TransformerEncoderLayer(8, 2, 16, 0.0), (4, 2, 8)),
    (nn.BatchNorm1d(4), (3, 4)),
    (nn.GroupNorm(2, 4), (3, 4, 5)),
    (nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 5)),
    (nn.LayerNorm(5), (3, 4, 5)),
    (nn.MaxPool2d(2), (2, 3, 4, 4)),
    (nn.AdaptiveAvgPool2d(2), (2, 3, 5, 5)),
    (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 3, 3)),
    (nn.ReplicationPad2d(1), (1, 2, 5, 5)),
    (nn.GELU(), (3, 4)),
    (nn.Softmax(-1), (3, 4)),
]:
    compare(made, module(made), shape)
"""
    )


def test_saving_loading_and_copying(job):
    job("""
import copy, io, subprocess, sys, torch, torch_gcu
model = torch.nn.Linear(2, 2).to("xla:1")
assert copy.deepcopy(model).weight.device == torch.device("xla:1")
file = io.BytesIO()
torch.save(model.state_dict(), file)
# torch 1.10 never asks map_location of tensors on this device; the vendor's package puts them on their card if it is
# the current one, and leaves them on the CPU if it is not.
for current, expected in ((0, "cpu"), (1, "xla:1")):
    torch_gcu.set_device(current)
    for wanted in (None, "cpu", "xla:0"):
        file.seek(0)
        loaded = torch.load(file, map_location=wanted)
        assert str(loaded["weight"].device) == expected, (current, wanted)
assert torch.equal(loaded["weight"].cpu(), model.weight.cpu())
# What to do instead: CPU tensors, which load anywhere.
torch.save({name: value.cpu() for name, value in model.state_dict().items()}, "cpu.pt")
model.load_state_dict(torch.load("cpu.pt", map_location="cpu"))
assert model.weight.device == torch.device("xla:1")
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 2, device="xla:1")).sum().backward()
torch_gcu.optimizer_step(optimizer)
state = copy.deepcopy(optimizer.state_dict())
for entry in state["state"].values():
    entry["exp_avg"] = entry["exp_avg"].cpu()
optimizer.load_state_dict(state)
assert all(entry["exp_avg"].device == torch.device("xla:1") for entry in optimizer.state.values())
""")
