"""Collectives through the CPU: the process group on a simulated card, the wrapper of older torch on the CPU."""

from __future__ import annotations

import pytest

from tests import collectives
from tests.simulators import needs_current_card

TRAIN = """
import os, torch, torch.distributed as dist
from torch import nn
from exp.engine.staged import StagedProcessGroup, staged_bytes
from exp.engine.staged_ddp import StagedDataParallel
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.left, self.right, self.unused = nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(3, 3)

    def forward(self, x, side):
        return (self.left if side else self.right)(self.body(x))

def train(wrap, device="cpu", steps=4):
    torch.manual_seed(rank)  # the wrapper must make them equal
    model = Net().to(device)
    ddp = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        halves = torch.randn(2, 4, 6).to(device)
        with ddp.no_sync():
            ddp(halves[0], side=step % 2).square().mean().backward()
        ddp(halves[1], side=step % 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.flatten().tolist() for name, value in model.cpu().state_dict().items()}

def finish(found):
    print(json.dumps(found), flush=True)
    os._exit(0)  # as exp's workers: torch 2.13 may abort while the interpreter is taken down after a backward pass

def torch_ddp(model):
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

def staged_ddp(model):
    return StagedDataParallel(model, bucket_cap_mb=0)  # every parameter a bucket of its own
"""

GROUP = (
    TRAIN
    + """
backend.simulate = True
device = backend.set_device(rank)
store = dist.FileStore(folder + "/store", world_size)
backend.init_staged_process_group(store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240))
"""
    + collectives.SCRIPT
    + """
before = staged_bytes()
dist.all_reduce(torch.ones(1000, device=device))
found["bytes"] = staged_bytes() - before
found["weights"] = train(torch_ddp, device)
backend.destroy_process_group()
finish(found)
"""
)


def nearly(first, second):
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values == pytest.approx(second[name], abs=1e-6), name


def test_the_wrapper_trains_as_torch_ddp_does(ranks):
    script = TRAIN + "join()\nfinish([train(torch_ddp), train(staged_ddp)])"
    for ddp, staged in ranks(script, world_size=2):
        nearly(staged, ddp)


@needs_current_card
def test_the_group_carries_tensors_of_a_card_and_of_the_cpu(ranks):
    first, second = ranks(GROUP, world_size=2, backend="gcu")
    collectives.check(first, second)
    assert first["bytes"] == second["bytes"] == 2 * 4 * 1000  # there and back
    on_cpu = TRAIN + "join()\nfinish(train(torch_ddp))"
    for found, expected in zip((first, second), ranks(on_cpu, world_size=2)):
        nearly(found["weights"], expected)
