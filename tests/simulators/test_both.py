"""What cards of either generation refuse, narrow and count."""

from __future__ import annotations

import pytest

from tests.simulators import needs_card

pytestmark = [pytest.mark.legacy, needs_card]

BEGIN = """
import os, warnings, torch, torch_gcu
from tests.simulators.scripts import refused
kind = "xla" if torch.__version__.startswith("1.") else "gcu"
told = torch_gcu.simulator if kind == "xla" else torch.gcu
"""


def test_devices_do_not_mix_and_some_kinds_of_tensors_have_no_card(card):
    card(
        BEGIN
        + """
cpu, one, two = torch.ones(2, 2), torch.ones(2, 2, device=f"{kind}:0"), torch.ones(2, 2, device=f"{kind}:1")
linear = torch.nn.Linear(2, 2).to(f"{kind}:0")
for mix in (
    lambda: cpu + one, lambda: one + two, lambda: one.mul_(cpu), lambda: torch.cat([one, two]), lambda: linear(cpu),
    lambda: torch.cdist(one, cpu),
):
    refused(mix, RuntimeError, "Expected all tensors to be on the same device", f"{kind}:0 and ")
assert (one * torch.tensor(2.0))[torch.tensor([0, 1])].sum().item() == 8  # numbers, indices of the CPU
refused(one.numpy, TypeError, f"can't convert {kind}:0 device type tensor to numpy")
refused(one.to_sparse, NotImplementedError, "parse")
refused(lambda: torch.quantize_per_tensor(one, 1.0, 0, torch.qint8), NotImplementedError)
"""
    )


def test_memory_is_counted_and_ends(card):
    card(
        BEGIN
        + """
def needs(megabytes, index=0):
    return torch.empty(megabytes << 20, dtype=torch.uint8, device=f"{kind}:{index}")
a = needs(5)
view = a.view(-1)[10:]  # no memory of its own
assert (told.memory_allocated(0), told.memory_allocated(1)) == (5 << 20, 0)
for ask in (lambda: needs(4), lambda: a.float()):
    refused(ask, RuntimeError, "GCU out of memory", "ried to allocate", "8 MiB")
b = needs(4, 1)  # another card's memory is its own
del a, view
c = needs(8)
del c
assert (told.memory_allocated(0), told.max_memory_allocated(0)) == (0, 8 << 20)
if kind == "gcu":
    told.reset_peak_memory_stats()
    assert told.max_memory_allocated(0) == 0 and told.mem_get_info(1) == (4 << 20, 8 << 20)
""",
        SIM_GCU_MEMORY="8MiB",
    )


@pytest.mark.parametrize("wide", ["false", "true"])
def test_64_bit_numbers_are_narrowed_with_one_warning(card, wide):
    script = """
wide = os.environ["TORCH_GCU_ENABLE_INT64_AND_UINT64"] == "true"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    expected = torch.tensor([1 + 1e-10, 1 / 3], dtype=torch.float64)
    x = expected.to(kind)
    product = (x * 3).cpu()
    big = torch.tensor([2**40 + 5], device=kind)
    shifted = torch.tensor([2**20], device=kind) * 2**20
assert x.dtype == product.dtype == torch.float64 and big.dtype == shifted.dtype == torch.int64
assert torch.equal(product, product.float().double()) and product[0].item() == 3.0
assert (big.item(), shifted.item()) == ((2**40 + 5, 2**40) if wide else (5, 0))
said = [str(warning.message) for warning in caught]
assert [sum(text in each for each in said) for text in ("no float64", "no int64")] == [1, 0 if wide else 1], said
"""
    card(BEGIN + script, TORCH_GCU_ENABLE_INT64_AND_UINT64=wide)
