"""Seeds of simulated cards, and what a card refuses."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card


def test_seeds_reach_every_card_and_what_crashes_the_vendors_is_refused(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.scripts import refused
        torch_gcu.manual_seed_all(1)
        first = torch.rand(4, device="xla:1").cpu()
        torch_gcu.manual_seed_all(1)
        assert torch.equal(first, torch.rand(4, device="xla:1").cpu())
        for crash in (torch_gcu.amp.autocast().__enter__, torch_gcu.amp.GradScaler):
            refused(crash, RuntimeError, "free(): invalid pointer")
        """
    )


def test_operators_that_fall_back_are_counted_and_logged_once_or_refused(card):
    script = """
    import torch, torch_gcu
    x = torch.randn(8, device="xla")
    torch.nn.functional.softmax(x, 0)
    for _ in range(2):
        assert torch.allclose(torch.fft.irfft(torch.fft.rfft(x)).cpu(), x.cpu(), atol=1e-6)
    assert torch_gcu.simulator.fallbacks() == {"aten::_fft_r2c": 2, "aten::_fft_c2r": 2}
    """
    (printed,) = card(script)
    assert printed.count("[TORCH_GCU/FALLBACK] aten::_fft_r2c falls back to the CPU") == 1
    strict = """
    import torch, torch_gcu
    from tests.simulators.scripts import refused
    x = torch.randn(8, device="xla")
    refused(lambda: torch.fft.rfft(x), NotImplementedError, "no kernel for aten::_fft_r2c", "SIM_GCU_STRICT=1")
    """
    card(strict, SIM_GCU_STRICT="1")
