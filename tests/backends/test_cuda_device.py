"""The cuda and rocm backends on a real card: skipped, with the backend's own reason, where there is none."""

from __future__ import annotations

import pytest
import torch

from exp.engine.distributed import device_state
from exp.engine.optim import grad_scaler
from exp.errors import UnavailableError
from tests.backends import made

REASONS = {name: made(name).why_unavailable() for name in ("cuda", "rocm")}
HERE = next((name for name, reason in REASONS.items() if reason is None), None)
pytestmark = pytest.mark.skipif(
    HERE is None, reason="needs a card: " + "; ".join(f"{name}: {reason}" for name, reason in REASONS.items())
)


@pytest.fixture
def card():
    """The backend with its first card selected, and the card."""
    backend = made(HERE)
    return backend, backend.set_device(0)


def test_the_card_is_counted_selected_described_and_its_state_comes_back(card):
    backend, device = card
    assert backend.device_count() == torch.cuda.device_count()
    assert (device, torch.cuda.current_device()) == (torch.device("cuda", 0), 0)
    with pytest.raises(UnavailableError):
        backend.set_device(torch.cuda.device_count())
    described, before = backend.describe(device), backend.usage()
    assert (described["name"], described["memory"]) == (torch.cuda.get_device_name(0), before["total"])
    block = torch.zeros(2**20, dtype=torch.float32, device=device)
    backend.synchronize()
    assert backend.usage()["allocated"] - before["allocated"] == block.numel() * 4
    torch.cuda.manual_seed_all(5)
    state = device_state(backend)
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    first = torch.rand(16, device=device)
    backend.module.set_rng_state(state)
    assert torch.equal(torch.rand(16, device=device), first)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "tf32"])
def test_a_step_in_each_precision(card, precision):
    backend, device = card
    if not backend.supports(precision):
        pytest.skip(f"this card has no {precision}")
    backend.set_precision(precision)
    model = torch.nn.Linear(8, 8).to(device)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backend.autocast(precision):
        out = model(torch.ones(4, 8, device=device))
    assert out.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    assert (grad_scaler(backend, precision) is not None) == (precision == "fp16")
    out.float().square().mean().backward()
    backend.end_step(optimizer)
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("kind", ["matmul", "conv"])
def test_fp32_is_full_and_tf32_is_asked_for(card, kind):
    backend, device = card
    if not backend.supports("tf32") or (HERE == "rocm" and kind == "conv"):
        pytest.skip("this card has no tf32 for it")
    torch.manual_seed(0)
    x, w = torch.randn(1, 256, 64, 64), torch.randn(256, 256, 3, 3)

    def product(x, w):
        if kind == "conv":
            return torch.nn.functional.conv2d(x, w, padding=1)
        return w.reshape(256, -1) @ w.reshape(256, -1).t()

    exact, error = product(x.double(), w.double()), {}
    for precision in ("tf32", "fp32"):
        backend.set_precision(precision)
        off = product(x.to(device), w.to(device)).cpu().double() - exact
        error[precision] = float(off.abs().max() / exact.abs().max())
    assert error["fp32"] < 3e-6 < 3e-5 < error["tf32"] < 3e-3
