"""The vendor's DistributedDataParallel: trains as torch's does over gloo, and refuses what the vendor's refuses."""

from __future__ import annotations

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


def test_trains_as_on_the_cpu_bit_for_bit(job):
    job(TRAIN, 2, BUCKET="0.05")


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
