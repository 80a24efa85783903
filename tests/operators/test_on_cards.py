"""Portable operators on simulated cards that refuse what the vendor's plug-in would send to the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from exp.plugins import installed
from tests.conftest import clean_environment
from tests.simulators import needs_current_card

pytestmark = needs_current_card

TRAIN = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from exp.backends.gcu import GcuBackend
from exp.engine.kernels import settle_kernels

backend = GcuBackend(name="gcu", simulate=True)
backend.prepare()
card = backend.set_device(0)
assert backend.lacking_operators()
if sys.argv[1] == "portable":
    settle_kernels(backend, card, "fp32")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.norm = nn.LayerNorm(16)
        self.heads = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mix = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 2, 2, 2, 2, dilation=3), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.GroupNorm(2, 8), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(8, 5, 1)
        )

    def forward(self, image, label):
        tokens = self.norm(self.embed(image).flatten(2).transpose(1, 2))
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (tokens, tokens, tokens))
        tokens = tokens + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        scores = self.mix(tokens.transpose(1, 2).unflatten(2, (4, 4)))
        scores = F.interpolate(scores, size=(16, 16), mode="bilinear")
        whole = F.cross_entropy(scores.mean((2, 3)), label[:, 0, 0], label_smoothing=0.1)
        return whole + F.cross_entropy(scores, label, ignore_index=0) + F.softplus(scores).mean()


losses = []
for device in ("cpu", card):
    torch.manual_seed(0)
    model = Model().to(device)
    image, label = torch.randn(2, 3, 16, 16).to(device), torch.randint(0, 5, (2, 16, 16)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(image, label)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
assert not backend.fallbacks(), backend.fallbacks()
assert all(abs(a - b) < 1e-5 * abs(a) for a, b in zip(losses[:4], losses[4:])), losses
assert losses[3] < losses[0]
"""


def train(profile: str, kernels: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TRAIN, kernels],
        env=clean_environment(SIM_GCU_PROFILE=profile, SIM_GCU_STRICT="1"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("profile", ["s60", "l600"])
def test_no_training_step_leaves_the_card(profile):
    done = train(profile, "portable")
    assert done.returncode == 0, done.stderr


def test_without_them_the_card_refuses():
    assert "_backward" in train("s60", "none").stderr.splitlines()[-1]


THEIRS = """
import logging
import torch
from exp.backends.gcu import GcuBackend
from exp.engine.kernels import settle_kernels

logging.basicConfig(level=logging.INFO)
backend = GcuBackend(name="gcu", simulate=True, options={"native": ["tanh_backward"]})
card = backend.set_device(0)
theirs = torch.library.Library("aten", "IMPL")
theirs.impl("silu_backward", lambda grad, self: grad * 3, "PrivateUse1")
portable = settle_kernels(backend, card, "fp32")
assert "gelu_backward" in portable and not portable & {"silu_backward", "tanh_backward"}, portable
x = torch.ones(4, device=card, requires_grad=True)
torch.nn.functional.silu(x).sum().backward()
assert x.grad.tolist() == [3.0] * 4, x.grad
torch.nn.functional.gelu(x).sum().backward()
assert backend.fallbacks() == {}
torch.tanh(x).sum().backward()
assert list(backend.fallbacks()) == ["tanh_backward"]
"""


def test_what_others_have_registered_and_what_the_plugin_is_to_run_is_theirs():
    done = subprocess.run(
        [sys.executable, "-c", THEIRS],
        env=clean_environment(SIM_GCU_PROFILE="s60"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "aten::silu_backward on gcu is another library's" in done.stderr
    assert "(simulated torch_gcu " in done.stderr


def test_the_prior_does_not_leave_the_card(exp):
    """The other experiments: tests/behaviour/test_simulated.py."""
    (family,) = (plugin.families["forecasting"] for plugin in installed().values() if "forecasting" in plugin.families)
    few = ["max_epochs=1", "max_steps=2", "debug.val_batches=1", "debug.test_batches=1", "plots=false"]
    cards = ["backend=gcu", "backend.simulate=true", "output_dir=run", "model.attention_dropout=0.15"]
    done = exp("experiment=timebridge_prior_etth1", *family.small, *few, *cards, SIM_GCU_STRICT="1")
    assert done.returncode == 0, done.stderr
    nothing = {"rank": 0, "calls_per_step": 0, "bytes_per_step": 0, "operators": {}}
    assert exp.result("run")["left_device"] == nothing
