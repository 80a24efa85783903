"""Gradients through the CPU, here of tensors that are there; trainings on cards: tests/behaviour/test_simulated.py."""

from __future__ import annotations

from tests.engine.conftest import ON_DEVICES

TRAIN = """
import contextlib
from exp.distributed import AveragingDataParallel, StagedCollectives, StagedDataParallel

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
        with ddp.no_sync() if hasattr(ddp, "no_sync") else contextlib.nullcontext():
            ddp(halves[0], side=step % 2).backward()
        ddp(halves[1], side=step % 2).backward()
        exchange()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())

group = join().cpu_group or dist.new_group()
collectives = StagedCollectives()
staged = train(AveragingDataParallel, all_reduce=collectives.all_reduce)
if collectives.ddp_class is StagedDataParallel:
    starts = dict(all_reduce=collectives.all_reduce, start_all_reduce=collectives.start_all_reduce, group=group)
    overlapped = train(StagedDataParallel, **starts, bucket_cap_mb=1e-4)  # one or two parameters in each bucket
    torch.testing.assert_close(staged, overlapped, rtol=1e-6, atol=1e-6)
of_torch = train(nn.parallel.DistributedDataParallel, find_unused_parameters=True, broadcast_buffers=False)
torch.testing.assert_close(staged, of_torch, rtol=1e-6, atol=1e-6)
end(True)
"""


def test_the_wrapper_trains_as_torch_ddp_does(ranks):
    assert ranks(ON_DEVICES + TRAIN, world_size=2) == [True, True]
