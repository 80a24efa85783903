"""Backbones, heads and losses on simulated cards that refuse what the vendor's plug-in would send to the CPU."""

from __future__ import annotations

import pytest

from tests.simulators import needs_current_card, needs_legacy_card
from tests.simulators.conftest import card

__all__ = ["card"]

STEPS = """
import torch
import torch.nn.functional as F
from exp.vision import heads, losses
from exp.vision.backbones.base import FeatureInfo
from exp.vision.backbones.convnext import ConvNext
from exp.vision.backbones.segformer import MixTransformer

def backbone_step(kind, size, device):
    torch.manual_seed(0)
    backbone = kind(size=size, drop_path_rate=0.0).train()
    for parameter in backbone.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    image = torch.randn(2, 3, 64, 64).to(device)
    features = backbone.to(device)(image, [0, 1, 2, 3])
    loss = sum(x.square().mean() for x in features.maps)
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in backbone.parameters())]

def head_step(name, info, sizes, device, **keys):
    torch.manual_seed(0)
    keys = {**keys, "channels": 16} if name != "Linear" else {}
    head = getattr(heads, name)(info, num_classes=3, **keys).train()
    maps = [torch.randn(2, width, *size) for width, size in zip(info.channels, sizes)]
    cls = [torch.randn(2, width).to(device) for width in info.channels] if info.has_cls else None
    maps = [x.to(device).requires_grad_() for x in maps]
    scores = head.to(device)(maps, cls)
    scores = F.interpolate(scores.float(), size=(64, 96), mode="bilinear", align_corners=False)
    loss = scores.square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(x.grad.cpu() for x in (*maps, *head.parameters()))]

def loss_step(name, logits, labels, device, **keys):
    logits = logits.clone().to(device).requires_grad_()
    loss = getattr(losses, name)(**keys).to(device)(logits, labels.to(device))
    loss.backward()
    return [loss.detach().cpu(), logits.grad.cpu()]

def compare(step, *arguments, **keys):
    name = arguments[0] if isinstance(arguments[0], str) else arguments[0].__name__
    try:
        found = step(*arguments, device=device, **keys)
    except Exception as error:
        failed.append((name, keys, repr(error)[:200]))
        return
    torch.testing.assert_close(found, step(*arguments, device="cpu", **keys), rtol=1e-3, atol=1e-5)
    for operator in fallbacks():
        if operator not in seen:
            seen.append(operator)
            failed.append((name, keys, operator))

failed, seen = [], []
for kind, size in ((ConvNext, "atto"), (MixTransformer, "b0")):
    compare(backbone_step, kind, size)
flat = FeatureInfo([16] * 4, [16] * 4, True), [(4, 6)] * 4
pyramid = FeatureInfo([8, 16, 24, 32], [4, 8, 16, 32]), [(16, 24), (8, 12), (4, 6), (2, 3)]
names = sorted(set(heads.__all__) - {"Head"})
assert len(names) == 7, names
for name in names:
    for info, sizes in (flat, pyramid):
        for keys in ({"norm": "batch"}, {"norm": "group"}) if name not in ("Linear", "MaskTransformer") else ({},):
            compare(head_step, name, info, sizes, **keys)
torch.manual_seed(0)
logits, labels = torch.randn(2, 4, 16, 24), torch.randint(0, 4, (2, 16, 24), dtype=torch.uint8)
labels[0, :3] = 255
scores, classes, shares = torch.randn(8, 4), torch.tensor([0, 1, 2, 3, -1, 0, 1, 2]), torch.rand(8, 4).softmax(1)
weights = {"class_weights": [1.0, 0.5, 2.0, 1.0]}
for name in sorted(set(losses.__all__) - {"Loss", "Losses"}):
    for keys in ({}, weights):
        compare(loss_step, name, logits, labels, **keys)
for name, keys, target in (("CrossEntropy", {}, classes), ("CrossEntropy", {"label_smoothing": 0.1}, classes),
                           ("CrossEntropy", {"label_smoothing": 0.1, **weights}, shares), ("Focal", weights, classes)):
    compare(loss_step, name, scores, target, ignore_index=-1, **keys)
assert not failed, "\\n".join(map(str, failed))
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
fallbacks = backend.fallbacks
"""
    card(begin + STEPS, SIM_GCU_PROFILE=profile, SIM_GCU_STRICT="1")


@needs_legacy_card
def test_no_step_leaves_the_older_card(card):
    begin = """
import torch_gcu
device, fallbacks = "xla", torch_gcu.simulator.fallbacks
"""
    card(begin + STEPS, SIM_GCU_STRICT="1")
