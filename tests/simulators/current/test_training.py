"""Training on a simulated card is the CPU's training, bit for bit, with one card and with several."""

from __future__ import annotations

from tests.simulators import needs_current_card

pytestmark = needs_current_card

MODELS = """
import os, sys, torch, torch_gcu
import torch.nn.functional as F
from torch import nn

class Attention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, 4, width))
        self.embed = nn.Embedding(10, width)
        perceptron = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.blocks = nn.Sequential(Attention(), perceptron, Attention())
        self.norm, self.up = nn.BatchNorm2d(width), nn.ConvTranspose2d(width, 8, 2, 2)
        self.classes = nn.Conv2d(8, 5, 1)

    def forward(self, image, word):
        x = self.patches(image)
        tokens = self.blocks(x.flatten(2).transpose(1, 2) + self.position + self.embed(word)[:, None])
        x = F.interpolate(self.up(self.norm(tokens.transpose(1, 2).reshape_as(x))), image.shape[-2:], mode="bilinear")
        # Contiguous, because torch's group norm keeps the channels-last format on the CPU only.
        return self.classes(F.group_norm(x.contiguous(), 2))

def train(device, steps=4, wrap=lambda model: model, rank=0, **options):
    torch.manual_seed(0)
    model = Net().to(device)
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * rank + step)
        image, word, truth = torch.randn(4, 3, 8, 8), torch.randint(10, (4,)), torch.randint(5, (4, 8, 8))
        loss = F.cross_entropy(wrapped(image.to(device), word.to(device)), truth.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}

def same(first, second):
    assert first[0] == second[0], (first[0], second[0])
    for name in first[1]:
        assert torch.equal(first[1][name], second[1][name]), name
"""


def test_one_card(card):
    card(
        MODELS
        + """
for options in ({}, {"foreach": True}, {"fused": True}, {"foreach": False}):
    same(train("gcu:1", **options), train("cpu", **options))
assert torch_gcu.simulator.fallbacks()["aten::native_layer_norm_backward"]  # with the CPU's numbers all the same
"""
    )


def test_several_cards(card):
    card(
        MODELS
        + """
import torch.distributed as dist
from datetime import timedelta
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def join(name):
    store = dist.FileStore(os.environ["STORE"] + name.replace(":", "").replace(",", ""), size)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=240))
torch.gcu.set_device(rank)
results = []
both = ({"device_ids": [rank]}, {})
for name, device, choices in (("cpu:gloo,gcu:eccl", f"gcu:{rank}", both), ("gloo", "cpu", ({},))):
    join(name)
    for choice in choices:
        results.append(train(device, 2, lambda model: nn.parallel.DistributedDataParallel(model, **choice), rank))
    dist.destroy_process_group()
same(results[0], results[2])
same(results[1], results[2])
sys.stdout.flush()
os._exit(0)  # torch 2.13 may abort while the interpreter is taken down after a backward pass
""",
        world_size=2,
    )
