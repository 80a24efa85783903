"""A training step of each backbone on simulated cards that refuse what the vendor's plug-in would send to the CPU."""

from __future__ import annotations

import pytest

from tests.simulators import needs_current_card, needs_legacy_card

STEP = """
def step(kind, size, device):
    torch.manual_seed(0)
    backbone = kind(size=size, drop_path_rate=0.0).train()
    for parameter in backbone.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    image = torch.randn(2, 3, 64, 64).to(device)
    features = backbone.to(device)(image, [0, 1, 2, 3])
    loss = sum(x.square().mean() for x in features.maps)
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in backbone.parameters())]

for kind, size in ((ConvNext, "atto"), (MixTransformer, "b0")):
    torch.testing.assert_close(step(kind, size, device), step(kind, size, "cpu"), rtol=1e-3, atol=1e-5)
"""
IMPORTS = """
import torch
from exp.vision.backbones.convnext import ConvNext
from exp.vision.backbones.segformer import MixTransformer
"""


@needs_current_card
@pytest.mark.parametrize("profile", ["s60", "l600"])
def test_no_step_leaves_the_card(card, profile):
    begin = """
from exp.backends.gcu import GcuBackend
from exp.distributed import Kernels
backend = GcuBackend(name="gcu", simulate=True)
device = backend.set_device(0)
kernels = Kernels(backend, device, "fp32")
"""
    end = "assert not backend.fallbacks(), backend.fallbacks()"
    card(IMPORTS + begin + STEP + end, SIM_GCU_PROFILE=profile, SIM_GCU_STRICT="1")


@needs_legacy_card
def test_no_step_leaves_the_older_card(card):
    begin = """
import torch_gcu
device = "xla"
"""
    end = "assert torch_gcu.simulator.fallbacks() == {}, torch_gcu.simulator.fallbacks()"
    card(IMPORTS + begin + STEP + end, SIM_GCU_STRICT="1")
