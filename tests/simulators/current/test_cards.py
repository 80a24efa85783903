"""The API of torch.gcu: saving, forking, streams; and what the current generation refuses."""

from __future__ import annotations

from tests.simulators import needs_current_card

pytestmark = needs_current_card


def test_saving_forking_streams_and_events(card):
    """How cards are chosen and seeded: tests/backends/test_accelerator.py."""
    card(
        """
        import io, os, torch, torch_gcu
        from tests.simulators.scripts import refused
        saved, file = torch.randn(3, device="gcu:2"), io.BytesIO()
        torch.save({"tensor": saved}, file)
        for location, device in ((None, "gcu:2"), ("cpu", "cpu"), ({"gcu:2": "gcu:5"}, "gcu:5")):
            file.seek(0)
            loaded = torch.load(file, map_location=location, weights_only=True)["tensor"]
            assert loaded.device == torch.device(device) and torch.equal(loaded.cpu(), saved.cpu())
        start, end = torch.Event("gcu", enable_timing=True), torch.Event("gcu", enable_timing=True)
        start.record()
        with torch.gcu.stream(torch.gcu.Stream(device="gcu")):
            x = torch.ones(3, device="gcu") * 2
        torch.gcu.synchronize()
        end.record()
        assert x.sum().item() == 6 and start.elapsed_time(end) >= 0
        child = os.fork()  # of a process with a card
        if child == 0:
            refused(lambda: torch.ones(1, device="gcu"), RuntimeError, "Cannot re-initialize GCU in forked subprocess")
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """
    )


def test_torch_finds_the_plugin_by_itself(card):
    # The entry point alone gives the variable back, and the plug-in's own folder is the first of sys.path.
    script = """
    import os, sys, {module}
    assert 'torch_gcu' in sys.modules and sys.modules["torch"].ones(1, device='gcu').item() == 1
    assert os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == {left}, os.environ
    import gcu
    assert gcu.__file__ == sys.modules["torch_gcu"].gcu.__file__
    """
    card(script.format(module="torch", left=None), fresh=True)
    card(script.format(module="torch_gcu", left="'0'"), fresh=True)


def test_fused_cells_synchronised_batch_norm_and_torch_cuda_are_refused_but_probes_are_not(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.scripts import refused
        x, lstm = torch.eye(3, device="gcu"), torch.nn.LSTM(3, 4).to("gcu")
        refused(lambda: lstm(x), NotImplementedError, "GCU has no kernel for aten::_thnn_fused_lstm_cell")
        refused(lambda: torch.batch_norm_stats(x, 1e-5), NotImplementedError, "batch_norm_stats")
        for name in ("memory_allocated", "empty_cache", "reset_peak_memory_stats", "memory_stats"):
            refused(getattr(torch.cuda, name), RuntimeError, f"torch.cuda.{name} was called on a GCU machine")
        refused(lambda: torch.cuda.manual_seed(1), RuntimeError, "which has no CUDA device")
        for call in (torch.cuda.current_device, torch.cuda.synchronize, lambda: torch.ones(1, device="cuda")):
            refused(call, (AssertionError, RuntimeError), "NVIDIA" if torch.backends.cuda.is_built() else "CUDA")
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0 and not torch.cuda.is_initialized()
        torch.manual_seed(1)
        import mmengine.runner
        """,
        fresh=True,
    )
