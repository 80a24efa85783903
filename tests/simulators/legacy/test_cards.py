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
        cpu, one, two = torch.ones(2, 2), torch.ones(2, 2, device="xla:0"), torch.ones(2, 2, device="xla:1")
        assert (one * torch.tensor(2.0))[torch.tensor([0, 1])].sum().item() == 8  # numbers, indices of the CPU
        linear = torch.nn.Linear(2, 2).to("xla:0")
        for mix in (
            lambda: cpu + one, lambda: one + two, lambda: one.mul_(cpu), lambda: torch.cat([one, two]),
            lambda: linear(cpu), lambda: torch.cdist(one, cpu),
        ):
            refused(mix, RuntimeError, "Expected all tensors to be on the same device, but found at least two")
        refused(one.numpy, TypeError, "can't convert xla:0 device type tensor to numpy")
        kinds = "GCU has no sparse and no quantised tensors"
        refused(one.to_sparse, NotImplementedError, kinds)
        refused(lambda: torch.quantize_per_tensor(one, 1.0, 0, torch.qint8), NotImplementedError, kinds)
        for crash in (torch_gcu.amp.autocast().__enter__, torch_gcu.amp.GradScaler):
            refused(crash, RuntimeError, "free(): invalid pointer")
        refused(lambda: torch_gcu.synchronize(8), IndexError, "Invalid device id, must in [0, 7], got 8")
        refused(lambda: torch_gcu.gcu_device("cpu"), ValueError, "Expected a gcu device, but got: cpu")
        refused(lambda: torch_gcu.manual_seed_all(-1), ValueError, "Seed must be")
        """
    )


def test_memory_of_a_card_ends(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.scripts import refused
        def needs(megabytes, device):
            return torch.empty(megabytes << 20, dtype=torch.uint8, device=device)
        a = needs(5, "xla:0")
        assert torch_gcu.get_hbm_alloc_size(0) == torch_gcu.simulator.memory_allocated(0) == 5 << 20
        for ask in (lambda: needs(4, "xla:0"), lambda: a.float()):
            refused(ask, RuntimeError, "GCU out of memory: tried to allocate", "xla:0, which has 8 MiB")
        b = needs(4, "xla:1")  # another card's memory is its own
        del a
        c = needs(8, "xla:0")
        assert torch_gcu.simulator.max_memory_allocated(0) == 8 << 20
        """,
        SIM_GCU_MEMORY="8MiB",
    )


def test_64_bits_are_narrowed_to_32(card):
    script = """
    import warnings, torch, torch_gcu
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        x = torch.tensor([1 + 1e-10, 1 / 3], dtype=torch.float64).to("xla")
        y = (x * x).cpu()
        big = torch.tensor([2**40 + 5], device="xla")
    assert torch.equal(y, y.float().double()) and y[0].item() == 1.0 and y.dtype == torch.float64
    print(big.dtype, big.item(), [str(item.message)[:16] for item in warned])
    """
    (narrow,), (wide,) = card(script), card(script, TORCH_GCU_ENABLE_INT64_AND_UINT64="true")
    assert "torch.int64 5 ['GCU has no float', 'GCU has no int64']" in narrow
    assert f"torch.int64 {2**40 + 5} ['GCU has no float']" in wide


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


def test_a_process_that_skips_the_vendors_clean_up_leaves_its_mark(card, tmp_path):
    for end, left in (("", 0), ("torch_gcu._prepare_to_exit(); os._exit(0)", 0), ("os._exit(0)", 1)):
        card(f"import os, torch_gcu\n{end}", SIM_GCU_EXIT_MARKS=str(tmp_path))
        assert len(list(tmp_path.glob("*.unclean"))) == left, end


def test_saved_tensors_return_to_their_card_only_where_it_is_the_current_one(card):
    # Torch 1.10 never asks map_location of tensors on this device.
    card(
        """
        import io, torch, torch_gcu
        saved, file = torch.randn(3, device="xla:1"), io.BytesIO()
        torch.save(saved, file)
        for current, wanted, found in ((0, None, "cpu"), (0, "xla:0", "cpu"), (1, None, "xla:1"), (1, "cpu", "xla:1")):
            torch_gcu.set_device(current)
            file.seek(0)
            loaded = torch.load(file, map_location=wanted)
            assert str(loaded.device) == found and torch.equal(loaded.cpu(), saved.cpu()), (current, wanted)
        """
    )
