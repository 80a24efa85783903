"""Collectives through the CPU: the process group on a simulated card, the wrapper of older torch on the CPU."""

from __future__ import annotations

from tests import collectives
from tests.engine.conftest import ON_DEVICES
from tests.simulators import needs_current_card

TRAIN = """
from exp.engine.staged_ddp import StagedDataParallel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.unused = nn.BatchNorm1d(6), nn.Linear(3, 3)
        self.sides = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    def forward(self, x, side):
        return self.sides[side](self.norm(x)).square().mean()

def train(wrapper, **options):
    torch.manual_seed(rank)  # the wrapper must make them equal
    model = Net()
    ddp = wrapper(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        halves = torch.randn(2, 4, 6)
        with ddp.no_sync():
            ddp(halves[0], side=step % 2).backward()
        ddp(halves[1], side=step % 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())

join()
staged = train(StagedDataParallel, bucket_cap_mb=0)  # every parameter a bucket of its own
of_torch = train(nn.parallel.DistributedDataParallel, find_unused_parameters=True)
torch.testing.assert_close(staged, of_torch, rtol=1e-6, atol=1e-6)
end(True)
"""


def test_the_wrapper_trains_as_torch_ddp_does(ranks):
    assert ranks(ON_DEVICES + TRAIN, world_size=2) == [True, True]


JOIN = """
from exp.engine.staged import StagedCollectives, staged_bytes
store = dist.FileStore(folder + "/store", world_size)
backend.collectives = StagedCollectives()
how = {"store": store, "rank": rank, "world_size": world_size, "timeout": timedelta(seconds=240)}
backend.collectives.init("staged", backend.device_type, **how)
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
