"""What cards of either generation refuse and narrow."""

from __future__ import annotations

import pytest

from tests.simulators import needs_card

pytestmark = [pytest.mark.legacy, needs_card]

BEGIN = """
import os, warnings, torch, torch_gcu
from tests.simulators.scripts import refused
kind = "xla" if torch.__version__.startswith("1.") else "gcu"
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
