"""What a card refuses, narrows or sends back to the CPU, the simulated one does, too."""

from __future__ import annotations

from tests.simulators import needs_current_card

pytestmark = needs_current_card


def test_what_a_card_cannot_do_is_refused(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.scripts import refused
        x, y, z = torch.ones(2), torch.ones(2, device="gcu:0"), torch.ones(2, device="gcu:1")
        mixed = "Expected all tensors to be on the same device"
        refused(lambda: x + y, RuntimeError, mixed, "gcu:0 and cpu")
        refused(lambda: y + z, RuntimeError, mixed, "gcu:0 and gcu:1")
        refused(lambda: torch.nn.Linear(2, 2).to("gcu")(x), RuntimeError, mixed)
        assert (y + 1).sum().item() == (y + torch.tensor(1.0)).sum().item() == 4  # numbers may come from the CPU
        refused(lambda: y.numpy(), TypeError, "can't convert gcu:0 device type tensor to numpy")
        x = torch.eye(3, device="gcu")
        refused(lambda: x.to_sparse(), NotImplementedError, "Sparse tensors are not supported")
        refused(lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), NotImplementedError, "not supported")
        lstm = torch.nn.LSTM(3, 4).to("gcu")
        refused(lambda: lstm(x), NotImplementedError, "GCU has no kernel for aten::_thnn_fused_lstm_cell")
        refused(lambda: torch.batch_norm_stats(x, 1e-5), NotImplementedError, "batch_norm_stats")
        """
    )


def test_64_bit_numbers_are_narrowed_with_one_warning(card):
    script = """
    import os, warnings, torch, torch_gcu
    wide = os.environ.get("TORCH_GCU_ENABLE_INT64_AND_UINT64") == "true"
    with warnings.catch_warnings(record=True) as caught:
        expected = torch.tensor([1.1, 1 / 3]).double()
        x = torch.tensor([1.1, 1 / 3], dtype=torch.float64).to("gcu")
        assert x.dtype == torch.float64 and torch.equal(x.cpu(), expected)
        assert torch.equal((x * 3).cpu(), (expected * 3).float().double())
        assert torch.equal(x.mul_(1 / 7).cpu(), x.cpu().float().double())
        assert torch.equal(torch.full((1,), 0.1, dtype=torch.float64, device="gcu").cpu(), torch.tensor([0.1]).double())
        assert torch.tensor([2**40 + 5, 7]).to("gcu").tolist() == ([2**40 + 5, 7] if wide else [5, 7])
        product = torch.tensor([2**20], device="gcu") * 2**20
        assert product.dtype == torch.int64 and product.item() == (2**40 if wide else 0)
    said = [str(warning.message) for warning in caught]
    assert [sum(text in each for each in said) for text in ("no float64", "no int64")] == [1, 0 if wide else 1], said
    """
    card(script)
    card(script, TORCH_GCU_ENABLE_INT64_AND_UINT64="true")


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
        refused(lambda: torch.cuda.set_device(0), (AttributeError, RuntimeError, AssertionError))
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0 and not torch.cuda.is_initialized()
        torch.manual_seed(1)
        import mmengine.runner
        """
    )
