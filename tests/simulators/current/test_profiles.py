"""SIM_GCU_PROFILE: what the vendor's lists send to the CPU goes there on that card, counted; strict refuses it."""

from __future__ import annotations

import json

import pytest

from tests.simulators import needs_current_card

pytestmark = needs_current_card


def test_each_card_sends_its_own_list_with_the_cpus_numbers_and_counts_it(card):
    script = """
    import json, torch, torch_gcu
    import torch.nn.functional as F
    def gradient(function, device):
        y = torch.linspace(-2, 2, 32).view(4, 8).to(device).requires_grad_()
        function(y).sum().backward()
        return y.grad.cpu()
    for function in (F.gelu, F.silu, F.relu, torch.sinh, lambda y: y.roll(1).softmax(0)):
        assert torch.equal(gradient(function, "gcu"), gradient(function, "cpu"))
    sizes = torch_gcu.simulator.fallback_bytes()
    print(json.dumps({name: [calls, sizes[name] // 128] for name, calls in torch_gcu.simulator.fallbacks().items()}))
    """
    # Calls and tensors: two are read and one is written, where it is not one and one.
    s60 = {f"aten::{name}": [1, 3] for name in ("gelu_backward", "silu_backward", "_softmax_backward_data")}
    l600 = {"aten::sinh": [1, 2]}
    everywhere = {"aten::threshold_backward": [1, 3]}  # which alone writes to out=
    for profile, lacking in (("s60", s60), ("l600", l600), ("", {**s60, **l600})):
        (printed,) = card(script, SIM_GCU_PROFILE=profile)
        assert json.loads(printed.splitlines()[-1]) == {**lacking, **everywhere}, profile


@pytest.mark.parametrize("profile", ["s60", "l600"])
def test_strict_refuses_what_would_leave_that_card_and_nothing_else(card, profile):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.scripts import refused
        major = torch.gcu.get_device_capability()[0]
        x = torch.ones(4, 8, device="gcu", requires_grad=True)
        lacks = ("aten::threshold_backward", "SIM_GCU_STRICT=1")
        refused(lambda: torch.relu(x).sum().backward(), NotImplementedError, *lacks)
        attend = lambda: torch.nn.functional.scaled_dot_product_attention(*[x[None, None].detach()] * 3)
        if major == 4:
            refused(attend, NotImplementedError, "fused attention in float32 ends the process")
            torch.backends.cuda.enable_mem_efficient_sdp(False)  # the switch is not one vendor's alone
        attend()
        torch.fft.rfft(x.detach())
        refused(lambda: torch.ones(2, dtype=torch.complex64).to("gcu") * 2, NotImplementedError, "of complex numbers")
        """,
        SIM_GCU_PROFILE=profile,
        SIM_GCU_STRICT="1",
    )


def test_overloads_without_a_kernel_leave_the_card_and_others_of_the_same_name_do_not(card):
    """The vendor's list has ``random_.from`` and not ``random_``, ``median.dim_values`` and not ``median``."""
    script = """
    import os, torch, torch_gcu
    from exp.backends.gcu import GcuBackend
    x = torch.ones(2, 3, device="gcu")
    ids = torch.ones(3, dtype=torch.long, device="gcu")
    x.median(1), x.random_(0, 9), x.normal_(), x.round(), x.add_(x)
    torch.bucketize(x, x[0]), x.index_fill_(0, ids[:1], 2.0), ids.repeat_interleave(ids)
    assert torch_gcu.simulator.fallbacks() == {}, torch_gcu.simulator.fallbacks()
    torch.repeat_interleave(ids), x.median(), x.random_(), torch.angle(x)
    torch.normal(x, 1.0), torch.normal(x, x.abs())
    x.round(decimals=1), torch.bucketize(0.5, x[0]), x.index_fill_(0, ids[:1], x[0, 0]), torch._add_relu(x, x)
    torch._native_batch_norm_legit(x, None, None, True, 0.1, 1e-5)
    left = torch_gcu.simulator.fallbacks()
    names = "repeat_interleave median random_ angle round bucketize index_fill_ _add_relu _native_batch_norm_legit"
    assert left == {"aten::normal": 2, **{f"aten::{name}": 1 for name in names.split()}}, left
    backend = GcuBackend(name="gcu", simulate=True)
    backend.set_device(0)
    lacks = {name.partition(".")[0] for name in backend.capabilities.lacking_operators}
    assert lacks >= {name.partition("::")[2] for name in left} | {"threshold_backward"}
    real = GcuBackend(name="gcu")
    compiles = real.capabilities.uncompiled is None
    del os.environ["TORCHGCU_INDUCTOR_ENABLE"]
    assert real.capabilities.uncompiled
    can = backend.capabilities
    fused = [name in can.fused_attention for name in ("fp32", "tf32", "bf16")]
    print(len(can.lacking_operators), compiles, *fused)
    """
    compiles = {"TORCHGCU_INDUCTOR_ENABLE": "1"}  # the vendor's switch, which is of no use on an S60
    s60, l600 = (card(script, SIM_GCU_PROFILE=name, **compiles)[0].split()[-5:] for name in ("s60", "l600"))
    assert (s60[1:], l600[1:]) == (["False", "True", "True", "True"], ["True", "False", "False", "True"])
    assert int(s60[0]) > int(l600[0])


@pytest.mark.parametrize(
    ("words", "counted"),
    [
        ("", None),
        ("op_sync_mode=true OP_Statistics=True", {"gelu_backward": [2, 0]}),
        ("op_statistics=true,op_sync_mode=true", None),  # one word, which the vendor does not know
    ],
)
def test_the_vendors_statistics_give_the_backend_of_real_cards_its_calls(card, words, counted):
    script = """
    import json, torch
    from exp.backends.gcu import GcuBackend
    backend = GcuBackend(name="gcu")
    x = torch.ones(4, device=backend.set_device(0), requires_grad=True)
    for _ in range(2):
        torch.nn.functional.gelu(x).sum().backward()
    print(json.dumps(backend.fallbacks()))
    torch.gcu.debug.clear_op_statistics_info()
    assert "no data" in torch.gcu.debug.get_op_statistics_info() and backend.fallbacks() is None
    """
    (printed,) = card(script, ENFLAME_PT_OP_DEBUG_CONFIG=words)
    assert json.loads(printed.splitlines()[-1]) == counted


@pytest.mark.parametrize("letters", [4, 50, 51, 52, 60])
def test_names_of_any_length_are_counted(letters):
    """The vendor pads ``Op name: <name>`` to 60 columns; a name of 51 letters and more touches what follows."""
    from exp.backends._gcu_operators import operator_counts

    name = "a" * letters
    text = "".join(f"{'Op name: ' + each:<60}Use count: {uses}\n" for each, uses in ((name, 3), (name + ".out", 4)))
    assert operator_counts(text, frozenset({name, f"{name}.out"})) == {name: (7, 0)}
