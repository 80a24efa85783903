"""The vendor's DistributedDataParallel: trains as torch's does over gloo, and refuses what the vendor's refuses."""

from __future__ import annotations

import pytest

from tests.simulators import needs_legacy_card
from tests.simulators.legacy.test_collectives import BEGIN

pytestmark = needs_legacy_card

# find_unused_parameters: without it, torch's own class rebuilds its buckets after the first step, and gloo then adds up
# in another order; the vendor's class never rebuilds.
TRAIN = (
    BEGIN
    + """
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("eccl")
store = torch_dist.FileStore(os.environ["STORE"], size)
torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

def train(device, wrap):
    torch.manual_seed(rank)  # other weights on each rank: construction must bring them together
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(512, 32),
                          nn.LayerNorm(32), nn.Linear(32, 10)).to(device)
    ddp = wrap(model, bucket_cap_mb=float(os.environ["BUCKET"]), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(torch.randn(4, 3, 8, 8).to(device)).square().mean().backward()
        inputs, labels = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
        loss = nn.functional.cross_entropy(ddp(inputs.to(device)), labels.to(device))
        loss.backward()
        torch_gcu.optimizer_step(optimizer) if device.type == "xla" else optimizer.step()
        losses.append(loss.item())
    numbers = {name: value.cpu() for name, value in model.state_dict().items()}
    return losses, numbers

losses, numbers = train(device, lambda model, **options: torch_gcu.nn.parallel.DistributedDataParallel(
    model, device_ids=[rank], **options))
expected, reference = train(torch.device("cpu"), nn.parallel.DistributedDataParallel)
assert losses == expected
for name, value in numbers.items():
    assert torch.equal(value, reference[name]), name
seen = [None] * size
torch_dist.all_gather_object(seen, (losses, numbers["4.weight"].double().sum().item()))
assert len({tuple(losses) for losses, _ in seen}) == size  # each rank has its own data
assert len({weights for _, weights in seen}) == 1  # all ranks have the same parameters
torch_dist.destroy_process_group()
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(("world_size", "bucket"), [(2, "0.05"), (8, "25")])
def test_trains_as_on_the_cpu_bit_for_bit(job, world_size, bucket):
    job(TRAIN, world_size, BUCKET=bucket)


def test_unused_parameters_buffers_and_inputs_from_the_cpu(job):
    job(
        BEGIN
        + """
from torch import nn
dist.init_process_group("eccl")
class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("mark", torch.full((1,), float(rank)))
        self.register_buffer("later", torch.full((1,), float(rank)), persistent=False)
    def forward(self, x, scale=None):
        return {"y": self.used(x["a"]) * scale}
model = Half().to(device)
ddp = torch_gcu.nn.parallel.DistributedDataParallel(model, device_ids=[device], find_unused_parameters=True)
assert model.mark.item() == 0 and model.later.item() == rank  # only the state dict is brought together
for step in range(2):
    ddp({"a": torch.ones(3, 2)}, scale=torch.full((1,), 1.0 + rank))["y"].sum().backward()  # moved to the card
assert model.later.item() == 0
assert model.used.bias.grad.tolist() == [9, 9]  # two passes, 3 rows, mean of 1 and 2
assert model.unused.bias.grad is None or not model.unused.bias.grad.any()
dist.destroy_process_group()
""",
        world_size=2,
    )


def test_what_is_refused(job):
    job(
        BEGIN
        + """
from torch import nn
dist.init_process_group("eccl")
DDP = torch_gcu.nn.parallel.DistributedDataParallel
cpu, card = nn.Linear(2, 2), nn.Linear(2, 2).to(device)
refuses(AssertionError, "device_ids and output_device arguments only work with single-device GPU modules, but got "
        "device_ids [0], output_device None, and module parameters {device(type='cpu')}", DDP, cpu, device_ids=[0])
refuses(RuntimeError, "eccl: tensors must lie on a card", DDP, cpu)
refuses(RuntimeError, "can only be None or contain a single element", DDP, card, device_ids=[0, 1])
refuses(RuntimeError, "not support `gradient_as_bucket_view`", DDP, card, device_ids=[0], gradient_as_bucket_view=True)
refuses(AssertionError, "the same type of devices", DDP, nn.Sequential(nn.Linear(2, 2), card), device_ids=[0])
refuses(AssertionError, "doesn't have any parameter", DDP, nn.ReLU(), device_ids=[0])
other = nn.Linear(2, 2).to("xla:1")
refuses(RuntimeError, "communicates from xla:0, got a tensor on xla:1", DDP, other, device_ids=[1])
refuses(TypeError, "static_graph", DDP, card, device_ids=[0], static_graph=True)
dist.destroy_process_group()
refuses(RuntimeError, "Default process group has not been initialized", DDP, card, device_ids=[0])
"""
    )


def test_no_device_ids_means_all_cards(job):
    """The trap of the vendor's class: the batch is spread over every card, and only the first one's copy learns."""
    (printed,) = job(
        BEGIN
        + """
import warnings
from torch import nn
from torch_gcu.simulator import memory_allocated
dist.init_process_group("eccl")
model = nn.Linear(2, 1, bias=False).to(device)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    ddp = torch_gcu.nn.parallel.DistributedDataParallel(model)
assert "Single-Process Multi-GPU" in str(warned[0].message)
assert all(memory_allocated(card) > 0 for card in range(4)), "a copy on every card"
out = ddp(torch.ones(8, 2))
assert out.shape == (8, 1) and out.device == device
out.sum().backward()
assert model.weight.grad.tolist() == [[2, 2]]  # of 8 rows, this card had 2
print("spread")
""",
        SIM_GCU_COUNT="4",
    )
    assert "spread" in printed
