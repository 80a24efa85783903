"""Collectives through the CPU: the process group on a simulated card, the wrapper of older torch on the CPU."""

from __future__ import annotations

import pytest

from tests.simulators import needs_current_card

TRAIN = """
import os, torch, torch.distributed as dist
from torch import nn
from exp.engine.staged import StagedDataParallel, StagedProcessGroup, staged_bytes
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
backend.init_staged_process_group(store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
here = lambda *values: torch.tensor(values, device=device)
mine = rank + 1.0
found = {}

x = here(mine, 2 * mine)
dist.all_reduce(x)
found["sum"] = x.tolist()
x = here(mine)
dist.all_reduce(x, op=dist.ReduceOp.AVG)
found["average"] = x.tolist()
x = here(mine)
dist.all_reduce(x, op=dist.ReduceOp.MAX)
found["max"] = x.tolist()
x = torch.tensor([mine])
dist.all_reduce(x)
found["cpu"] = x.tolist()
x = here(mine)
dist.broadcast(x, 1)
found["broadcast"] = x.tolist()
x = here(mine)
dist.reduce(x, 0)
found["reduce"] = x.tolist() if rank == 0 else None
parts = [here(0.0) for _ in range(2)]
dist.all_gather(parts, here(mine))
found["all_gather"] = torch.cat(parts).tolist()
x = here(0.0, 0.0)
dist.all_gather_into_tensor(x, here(mine))
found["all_gather_into_tensor"] = x.tolist()
parts = [here(0.0) for _ in range(2)] if rank == 0 else None
dist.gather(here(mine), parts, 0)
found["gather"] = torch.cat(parts).tolist() if rank == 0 else None
x = here(0.0)
dist.scatter(x, [here(7.0), here(8.0)] if rank == 0 else None, 0)
found["scatter"] = x.tolist()
x = here(0.0)
dist.reduce_scatter(x, [here(mine), here(10 * mine)])
found["reduce_scatter"] = x.tolist()
x = here(0.0)
dist.reduce_scatter_tensor(x, here(mine, 10 * mine))
found["reduce_scatter_tensor"] = x.tolist()
x = here(0.0, 0.0)
dist.all_to_all_single(x, here(mine, 10 * mine))
found["all_to_all_single"] = x.tolist()
x = here(mine)
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
found["send"] = x.tolist()
gathered = [None, None]
dist.all_gather_object(gathered, {"rank": rank})
found["objects"] = gathered
dist.barrier()
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
    for found in (first, second):
        assert found["sum"] == [3.0, 6.0]
        assert found["average"] == [1.5]
        assert found["max"] == found["broadcast"] == [2.0]
        assert found["cpu"] == [3.0]
        assert found["all_gather"] == found["all_gather_into_tensor"] == [1.0, 2.0]
        assert found["send"] == [1.0]
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert found["bytes"] == 2 * 4 * 1000  # there and back
    assert (first["reduce"], first["gather"]) == ([3.0], [1.0, 2.0])
    assert (first["scatter"], second["scatter"]) == ([7.0], [8.0])
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([3.0], [30.0])
    assert (first["reduce_scatter_tensor"], second["reduce_scatter_tensor"]) == ([3.0], [30.0])
    assert (first["all_to_all_single"], second["all_to_all_single"]) == ([1.0, 2.0], [10.0, 20.0])
    on_cpu = TRAIN + "join()\nfinish(train(torch_ddp))"
    for found, expected in zip((first, second), ranks(on_cpu, world_size=2)):
        nearly(found["weights"], expected)
