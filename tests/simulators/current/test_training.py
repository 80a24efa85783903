"""Training on a simulated card is the CPU's training, bit for bit; on several: tests/behaviour/test_simulated.py."""

from __future__ import annotations

from tests.simulators import needs_current_card


@needs_current_card
def test_one_card(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.network import train
        for options in ({}, {"foreach": True}, {"fused": True}):
            torch.testing.assert_close(train("gcu:1", **options), train("cpu", **options), rtol=0, atol=0)
        assert torch_gcu.simulator.fallbacks()["aten::native_layer_norm_backward"]  # with the CPU's numbers, too
        """
    )
