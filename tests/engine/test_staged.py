"""Collectives through the CPU: the process group on a simulated card, the wrapper of older torch on the CPU."""

from __future__ import annotations

import pytest

from tests import collectives
from tests.engine.conftest import ON_DEVICES
from tests.simulators import needs_current_card

TRAIN = """
from exp.engine.staged_ddp import StagedDataParallel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.left, self.right, self.unused = nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(3, 3)

    def forward(self, x, side):
        return (self.left if side else self.right)(self.body(x))

def train(wrapper, **options):
    torch.manual_seed(rank)  # the wrapper must make them equal
    model = Net()
    ddp = wrapper(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        halves = torch.randn(2, 4, 6)
        with ddp.no_sync():
            ddp(halves[0], side=step % 2).square().mean().backward()
        ddp(halves[1], side=step % 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}

join()
of_torch = train(nn.parallel.DistributedDataParallel, find_unused_parameters=True)
end([of_torch, train(StagedDataParallel, bucket_cap_mb=0)])  # every parameter a bucket of its own
"""


def test_the_wrapper_trains_as_torch_ddp_does(ranks):
    for ddp, staged in ranks(ON_DEVICES + TRAIN, world_size=2):
        assert staged.keys() == ddp.keys()
        for name, values in staged.items():
            assert values == pytest.approx(ddp[name], abs=1e-6), name


JOIN = """
from exp.engine.staged import staged_bytes
store = dist.FileStore(folder + "/store", world_size)
backend.init_staged_process_group(store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240))
"""
COUNT = """
before = staged_bytes()
dist.all_reduce(torch.ones(1000, device=device))
found["bytes"] = staged_bytes() - before
end(found)
"""


@needs_current_card
def test_the_group_carries_tensors_of_a_card_and_of_the_cpu(ranks):
    """Trainings over it: tests/behaviour/test_simulated.py."""
    first, second = ranks(ON_DEVICES + JOIN + collectives.SCRIPT + COUNT, world_size=2, backend="gcu")
    collectives.check(first, second)
    assert first["bytes"] == second["bytes"] == 2 * 4 * 1000  # there and back
