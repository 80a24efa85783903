"""What a card refuses, narrows or sends back to the CPU, the simulated one does, too."""

from __future__ import annotations

from tests.simulators import needs_current_card

pytestmark = needs_current_card


def test_fused_cells_and_synchronised_batch_norm_are_refused(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.scripts import refused
        x, lstm = torch.eye(3, device="gcu"), torch.nn.LSTM(3, 4).to("gcu")
        refused(lambda: lstm(x), NotImplementedError, "GCU has no kernel for aten::_thnn_fused_lstm_cell")
        refused(lambda: torch.batch_norm_stats(x, 1e-5), NotImplementedError, "batch_norm_stats")
        """
    )


def test_torch_cuda_is_refused_but_probes_are_not(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.scripts import refused
        for name in ("memory_allocated", "empty_cache", "reset_peak_memory_stats", "memory_stats"):
            refused(getattr(torch.cuda, name), RuntimeError, f"torch.cuda.{name} was called on a GCU machine")
        refused(lambda: torch.cuda.manual_seed(1), RuntimeError, "which has no CUDA device")
        for call in (torch.cuda.current_device, torch.cuda.synchronize, lambda: torch.ones(1, device="cuda")):
            refused(call, (AssertionError, RuntimeError), "NVIDIA" if torch.backends.cuda.is_built() else "CUDA")
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0 and not torch.cuda.is_initialized()
        torch.manual_seed(1)
        import mmengine.runner
        """
    )
