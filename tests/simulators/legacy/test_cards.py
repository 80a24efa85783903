"""Counting, choosing and filling simulated cards; what a card refuses."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card


def test_cards_their_selection_and_what_they_refuse(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.scripts import refused
        assert torch_gcu.is_available() and torch_gcu.device_count() == 8 and torch_gcu.current_device() == 0
        torch_gcu.set_device("xla:3")
        torch_gcu.set_device(99)  # ignored, as by the vendor's package
        with torch_gcu.device(5):
            assert torch_gcu.gcu_device().index == 5
        assert torch_gcu.current_device() == 3 and torch.ones(1, device="xla").device == torch.device("xla:3")
        torch_gcu.manual_seed_all(1)
        first = torch.rand(4, device="xla:1").cpu()
        torch_gcu.manual_seed_all(1)
        assert torch.equal(first, torch.rand(4, device="xla:1").cpu())
        for crash in (torch_gcu.amp.autocast().__enter__, torch_gcu.amp.GradScaler):
            refused(crash, RuntimeError, "free(): invalid pointer")
        refused(lambda: torch_gcu.synchronize(8), IndexError, "Invalid device id, must in [0, 7], got 8")
        refused(lambda: torch_gcu.gcu_device("cpu"), ValueError, "Expected a gcu device, but got: cpu")
        refused(lambda: torch_gcu.manual_seed_all(-1), ValueError, "Seed must be")
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
