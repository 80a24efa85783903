"""Collectives through the CPU: the process group on a simulated card, the wrapper of older torch on the CPU."""

from __future__ import annotations

from tests.engine.conftest import ON_DEVICES
from tests.simulators import needs_current_card

TRAIN = """
import contextlib
from exp.engine.staged import StagedDataParallel

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
    exchange = getattr(ddp, "exchange_gradients", lambda: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        halves = torch.randn(2, 4, 6)
        with ddp.no_sync() if wrapper is nn.parallel.DistributedDataParallel else contextlib.nullcontext():
            ddp(halves[0], side=step % 2).backward()
        ddp(halves[1], side=step % 2).backward()
        exchange()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())

join()
staged = train(StagedDataParallel)
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
CARRY = """
def here(*values):
    return torch.tensor(values, device=device)

mine, found = rank + 1.0, {}
for name, x in (("card", here(mine)), ("cpu", torch.tensor([mine])), ("bfloat16", here(mine).bfloat16())):
    dist.all_reduce(x)
    found[name] = x.tolist()
average, sent, whole, parts = here(mine), here(mine), here(0.0, 0.0), [here(0.0), here(0.0)]
dist.all_reduce(average, op=dist.ReduceOp.AVG)
dist.broadcast(sent, 1)
dist.all_gather_into_tensor(whole, here(mine))
dist.all_gather(parts, here(mine))
found.update(average=average.tolist(), broadcast=sent.tolist(), whole=whole.tolist(), parts=torch.cat(parts).tolist())
gathered = [None, None]
dist.all_gather_object(gathered, {"rank": rank})
dist.barrier()
before = staged_bytes()
dist.all_reduce(torch.ones(1000, device=device))
end({**found, "objects": gathered, "bytes": staged_bytes() - before})
"""


@needs_current_card
def test_the_group_carries_tensors_of_a_card_and_of_the_cpu(ranks):
    """Trainings over it: tests/behaviour/test_simulated.py."""
    there_and_back = 2 * 4 * 1000
    expected = {
        "card": [3.0], "cpu": [3.0], "bfloat16": [3.0], "average": [1.5], "broadcast": [2.0], "whole": [1.0, 2.0],
        "parts": [1.0, 2.0], "objects": [{"rank": 0}, {"rank": 1}], "bytes": there_and_back,
    }  # fmt: skip
    assert ranks(ON_DEVICES + JOIN + CARRY, world_size=2, backend="gcu") == [expected] * 2
