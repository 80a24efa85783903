"""The recurrent layer of docs/hardware.md: the numbers of torch's, on cards that have no fused cells."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.conftest import clean_environment
from tests.docs.reader import ROOT, write_files
from tests.simulators import needs_current_card


@pytest.fixture
def layer(tmp_path):
    write_files(ROOT / "docs" / "hardware.md", tmp_path, python=["layer.py"])
    return tmp_path / "layer.py"


def test_its_numbers_are_those_of_torch(layer):
    names = {"torch": torch, "nn": nn}
    exec(layer.read_text(), names)
    theirs, ours = nn.GRU(3, 5, batch_first=True), names["Gru"](3, 5)
    ours.of_input.load_state_dict({"weight": theirs.weight_ih_l0, "bias": theirs.bias_ih_l0})
    ours.of_state.load_state_dict({"weight": theirs.weight_hh_l0, "bias": theirs.bias_hh_l0})
    x = torch.randn(2, 7, 3)
    assert torch.allclose(ours(x), theirs(x)[0], atol=1e-6)


@needs_current_card
def test_it_stays_on_a_strict_card(layer):
    """Where torch's own raises, for want of a fused cell."""
    script = """
import torch
from torch import nn
exec(open("layer.py").read())
from exp.backends.gcu import GcuBackend
from exp.engine.kernels import settle_kernels
backend = GcuBackend(name="gcu", simulate=True)
backend.prepare()
card = backend.set_device(0)
settle_kernels(backend, card, "fp32")
model = Gru(3, 5).to(card)
(model(torch.ones(2, 4, 3, device=card)) - 1).square().mean().backward()
assert not backend.fallbacks(), backend.fallbacks()
nn.GRU(3, 5).to(card)(torch.ones(2, 4, 3, device=card))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=layer.parent,
        env=clean_environment(SIM_GCU_PROFILE="s60", SIM_GCU_STRICT="1"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "_thnn_fused_gru_cell" in done.stderr.splitlines()[-1]
