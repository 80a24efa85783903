"""Portable operators on simulated cards that refuse what the vendor's plug-in would send to the CPU.

Those of experiments: tests/engine/test_step_counts.py, tests/behaviour/test_simulated.py.
"""

from __future__ import annotations

import pytest

from tests.conftest import write_files
from tests.docs.reader import ROOT
from tests.simulators import needs_current_card

BEGIN = """
import logging, torch
from torch import nn
from exp.backends.gcu import GcuBackend
from exp.distributed import Kernels
from tests.simulators.network import train
from tests.simulators.scripts import refused
logging.basicConfig(level=logging.INFO)
backend = GcuBackend(name="gcu", simulate=True)
device = backend.set_device(0)
"""


@needs_current_card
@pytest.mark.parametrize("profile", ["s60", "l600"])
def test_no_training_step_leaves_the_card(card, profile):
    script = """
kernels = Kernels(backend, device, "fp32")
torch.testing.assert_close(train(device), train("cpu"), rtol=1e-5, atol=0)
assert not backend.fallbacks(), backend.fallbacks()
"""
    card(BEGIN + script, SIM_GCU_PROFILE=profile, SIM_GCU_STRICT="1")


@needs_current_card
def test_what_others_have_registered_and_what_the_plugin_is_to_run_is_theirs(card):
    script = """
backend = GcuBackend(name="gcu", simulate=True, options={"native": ["tanh_backward"]})
theirs = torch.library.Library("aten", "IMPL")
theirs.impl("silu_backward", lambda grad, self: grad * 3, "PrivateUse1")
kernels = Kernels(backend, device, "fp32")
portable = kernels.portable
assert "gelu_backward" in portable and not portable & {"silu_backward", "tanh_backward"}, portable
x = torch.ones(4, device=device, requires_grad=True)
nn.functional.silu(x).sum().backward()
assert x.grad.tolist() == [3.0] * 4, x.grad
nn.functional.gelu(x).sum().backward()
assert backend.fallbacks() == {}
torch.tanh(x).sum().backward()
assert list(backend.fallbacks()) == ["tanh_backward"]
"""
    (printed,) = card(BEGIN + script, SIM_GCU_PROFILE="s60")
    assert "aten::silu_backward on gcu keeps the kernel of another library" in printed


@needs_current_card
def test_the_recurrent_layer_of_the_docs_has_torchs_numbers_and_stays_on_a_strict_card_where_torchs_own_raises(
    card, tmp_path
):
    write_files(ROOT / "docs" / "hardware" / "hardware.md", tmp_path, python=["layer.py"])
    script = """
exec(open("layer.py").read())
kernels = Kernels(backend, device, "fp32")
theirs, ours = nn.GRU(3, 5, batch_first=True), Gru(3, 5)
ours.of_input.load_state_dict({"weight": theirs.weight_ih_l0, "bias": theirs.bias_ih_l0})
ours.of_state.load_state_dict({"weight": theirs.weight_hh_l0, "bias": theirs.bias_hh_l0})
x = torch.randn(2, 7, 3)
found = ours.to(device)(x.to(device))
torch.testing.assert_close(found.cpu(), theirs(x)[0], atol=1e-6, rtol=0)
(found - 1).square().mean().backward()
assert not backend.fallbacks(), backend.fallbacks()
refused(lambda: theirs.to(device)(x.to(device)), NotImplementedError, "_thnn_fused_gru_cell")
"""
    card(BEGIN + script, SIM_GCU_PROFILE="s60", SIM_GCU_STRICT="1")
