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


def test_functions_and_views(job):
    job(
        COMPARE
        + """
def writes_through_views(x):
    y = x * 1
    y[0] = 5
    y[:, 1] += x[:, 0]
    y.t()[2].mul_(3)
    y.view(-1)[3:5] = 0
    return y

def attention(q, k, v):
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 2, -1), v)

def second_derivative(x):
    weight = torch.ones(2, 3, 3, device=x.device)
    return torch.autograd.grad(F.conv1d(x, weight).pow(2).sum(), x, create_graph=True)[0]

index = lambda x: torch.tensor([[0, 1], [2, 3], [1, 1]], device=x.device)
labels = lambda x: torch.tensor([1, 2, 0], device=x.device)
compare("views", writes_through_views, (3, 4))
compare("attention", attention, (2, 5, 4), (2, 6, 4), (2, 6, 4))
compare("second derivative", second_derivative, (1, 3, 6))
compare("einsum", lambda a, b: torch.einsum("bij,bkj->bik", a, b), (2, 3, 4), (2, 5, 4))
compare("indexing", lambda x: (x[[0, 1]], x[:, 1:], x[x > 0], x.gather(1, index(x))), (3, 4))
compare("writing", lambda x: ((x * 1).index_put((labels(x),), x), x.index_add(0, labels(x), x)), (3, 4))
compare("filling", lambda x: (x.scatter(1, index(x), 1.0), x.masked_fill(x > 0, 0.0)), (3, 4))
compare("order", lambda x: (x.sort()[0], x.topk(2)[0], x.cumsum(0), x.flip(0), x.median()), (3, 4))
compare("sums", lambda x: (x.std(), x.var(0), x.norm(), x.logsumexp(0), torch.cdist(x, x)), (3, 4))
compare("shapes", lambda x: (torch.cat([x, x]), torch.stack([x, x]), *x.unbind(1), x.expand(2, 3, 4),
        x.unfold(1, 2, 1), x.diagonal(), F.pad(x, (1, 1)), x.as_strided((2, 2), (1, 2)), torch.diff(x)), (3, 4))
compare("losses", lambda x: (F.mse_loss(x, x * 0), F.smooth_l1_loss(x, x * 0), F.cross_entropy(x, labels(x))), (3, 4))
compare("types", lambda x: (x.half().float(), x.bfloat16().float(), (x * 100).int(), x > 0), (3, 4))
compare("resampling", lambda x: F.interpolate(x, size=7, mode="linear"), (1, 2, 5))
compare("patches", lambda x: F.fold(F.unfold(x[:, :, None], (1, 2)), (1, 5), (1, 2)), (1, 2, 5))
x = torch.ones(2, device="xla:1")
assert x.resize_(5).device.index == 1
out = torch.empty(0, device="xla:1")
assert torch.add(x, x, out=out) is out and out.shape == (5,)
assert not torch_gcu.simulator.fallbacks()
"""
    )


def test_optimizers(job):
    job(
        COMPARE
        + """
for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "LBFGS"):
    found = []
    for device in ("cpu", "xla:0"):
        value = nn.Parameter(torch.linspace(-1, 1, 5).to(device))
        optimizer = getattr(torch.optim, name)([value], lr=0.1)
        def loss():
            optimizer.zero_grad()
            made = (value - 3).square().sum()
            made.backward()
            return made
        for _ in range(4):
            optimizer.step(loss)
        found.append(value.detach().cpu())
    assert torch.equal(*found), name
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


def test_loader_workers_feed_the_card(job):
    job("""
import torch, torch_gcu
from torch.utils.data import DataLoader, TensorDataset
torch_gcu.set_device(2)
kept = torch.ones(1, device="xla")  # the card is in use before the workers are forked
data = TensorDataset(torch.arange(20.0), torch.arange(20))
total = torch.zeros((), device="xla")
for values, labels in DataLoader(data, 4, num_workers=2):
    total += values.to("xla", non_blocking=True).sum() + labels.to("xla").sum()
assert total.item() == 380
""")
