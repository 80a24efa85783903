"""The vendor's DistributedDataParallel: trains as torch's does on the CPU, and refuses what the vendor's refuses."""

from __future__ import annotations

from tests.simulators import needs_legacy_card
from tests.simulators.legacy.test_collectives import BEGIN

pytestmark = needs_legacy_card


def test_ddp_trains_as_torchs_over_gloo_bit_for_bit_and_refuses_other_devices(card):
    card(
        BEGIN
        + """
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("eccl")
join("gloo")

# find_unused_parameters: without it, torch's own class rebuilds its buckets after the first step, and gloo then adds up
# in another order; the vendor's class never rebuilds.
def train(device, wrap, **options):
    torch.manual_seed(rank)  # other weights on each rank: construction must bring them together
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 8, 2, 2),
        nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(2), nn.UpsamplingBilinear2d(scale_factor=2), nn.Flatten(),
        nn.Linear(128, 32), nn.LayerNorm(32), nn.Linear(32, 10),
    ).to(device)
    ddp = wrap(model, bucket_cap_mb=0.05, find_unused_parameters=True, **options)
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
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}

here = train(device, torch_gcu.nn.parallel.DistributedDataParallel, device_ids=[rank])
there = train(torch.device("cpu"), nn.parallel.DistributedDataParallel)
torch.testing.assert_close(here, there, rtol=0, atol=0)
seen = [None] * size
torch_dist.all_gather_object(seen, (here[0], here[1]["9.weight"].double().sum().item()))
assert seen[0][0] != seen[1][0] and seen[0][1] == seen[1][1]  # data of their own, the same parameters

def wrap(model, *ids, **options):
    return lambda: torch_gcu.nn.parallel.DistributedDataParallel(model, device_ids=list(ids) or None, **options)
cpu, card, other = nn.Linear(2, 2), nn.Linear(2, 2).to(device), nn.Linear(2, 2).to("xla:2")
refused(wrap(cpu, 0), AssertionError, "only work with single-device GPU modules", "{device(type='cpu')}")
refused(wrap(cpu), RuntimeError, "eccl: tensors must lie on a card")
refused(wrap(card, 0, 1), RuntimeError, "can only be None or contain a single element")
refused(wrap(card, rank, gradient_as_bucket_view=True), RuntimeError, "not support `gradient_as_bucket_view`")
refused(wrap(other, 2), RuntimeError, f"communicates from xla:{rank}, got a tensor on xla:2")
torch_dist.destroy_process_group()
dist.destroy_process_group()
""",
        world_size=2,
    )
