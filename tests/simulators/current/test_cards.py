"""The API of torch.gcu: cards, memory, random states, streams, saving."""

from __future__ import annotations

from tests.simulators import needs_current_card

pytestmark = needs_current_card


def test_cards_and_their_selection(card):
    card(
        """
        import io, torch, torch_gcu, torch_gcu as again
        assert torch.gcu.is_available() and torch.gcu.device_count() == 8 and not torch.gcu.is_initialized()
        assert torch.gcu.current_device() == 0
        torch.gcu.set_device("gcu:3")
        assert torch.ones(1, device="gcu").device == torch.device("gcu", 3) == torch.ones(1).gcu().device
        with torch.gcu.device(5):
            assert torch.ones(1).gcu().device.index == 5
        assert torch.gcu.current_device() == 3
        assert torch.nn.Linear(2, 2).gcu().weight.is_gcu
        assert "simulated" in torch.gcu.get_device_name(0)
        saved, file = torch.randn(3, device="gcu:2"), io.BytesIO()
        torch.save({"tensor": saved}, file)
        for location, device in ((None, "gcu:2"), ("cpu", "cpu"), ({"gcu:2": "gcu:5"}, "gcu:5")):
            file.seek(0)
            loaded = torch.load(file, map_location=location, weights_only=True)["tensor"]
            assert loaded.device == torch.device(device) and torch.equal(loaded.cpu(), saved.cpu())
        told = torch.gcu.get_device_properties(2)
        assert not hasattr(told, "uuid") and (told.major, told.sip_count) == (0, 24)
        torch.gcu.synchronize()
        try:
            torch.gcu.set_device(8)
        except RuntimeError as error:
            assert "invalid device ordinal 8" in str(error)
        else:
            raise AssertionError
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
    card(script.format(module="torch", left=None))
    card(script.format(module="torch_gcu", left="'0'"))


def test_the_backend_knows_what_its_card_can_do(card):
    card(
        """
        import torch
        from exp.backends.gcu import GcuBackend
        from exp.errors import UnavailableError
        backend = GcuBackend(name="gcu", simulate=True)
        device = backend.set_device(3)
        assert str(device) == "gcu:3" and backend.process_group == "cpu:gloo,gcu:eccl" and not backend.reduces_means
        assert backend.collectives_missing() is None and backend.ddp_class is torch.nn.parallel.DistributedDataParallel
        assert backend.ddp_kwargs(device) == {"device_ids": [3], "output_device": 3}
        assert backend.supports("bf16") and backend.grad_scaler("fp16") and backend.grad_scaler("bf16") is None
        with backend.autocast("bf16"):
            assert (torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)).dtype == torch.bfloat16
        described = backend.describe(device)
        assert (described["index"], described["memory"]) == (3, backend.memory()["total"])
        backend.seed(1)
        state = backend.rng_state()
        first = torch.rand(3, device=device)
        backend.set_rng_state(state)
        assert torch.equal(torch.rand(3, device=device), first)
        try:
            backend.set_device(8)
        except UnavailableError as error:
            assert "local_rank 8" in str(error)
        else:
            raise AssertionError
        """
    )


def test_memory_is_counted_and_ends(card):
    card(
        """
        import torch, torch_gcu
        before = torch.gcu.memory_allocated()
        x = torch.empty(1024, 1024, device="gcu")
        assert torch.gcu.memory_allocated() - before == 4 * 2**20
        y = x.view(-1)[10:]  # no memory of its own
        z = x * 2
        assert torch.gcu.memory_allocated() - before == 8 * 2**20 and torch.gcu.memory_allocated(1) == 0
        del z
        assert torch.gcu.memory_allocated() - before == 4 * 2**20
        assert torch.gcu.max_memory_allocated() - before == 8 * 2**20
        torch.gcu.reset_peak_memory_stats()
        assert torch.gcu.max_memory_allocated() - before == 4 * 2**20
        free, total = torch.gcu.mem_get_info()
        assert total == 16 * 2**20 and total - free == torch.gcu.memory_allocated()
        try:
            torch.empty(4, 1024, 1024, device="gcu")
        except torch.OutOfMemoryError as error:
            assert "GCU out of memory. Tried to allocate 16 MiB. GCU 0 has a total capacity of 16 MiB" in str(error)
        else:
            raise AssertionError
        torch.empty(3, 1024, 1024, device="gcu:1")  # has its own
        torch.gcu.empty_cache()
        """,
        SIM_GCU_MEMORY="16MiB",
    )


def test_random_states_streams_and_events(card):
    card(
        """
        import torch, torch_gcu
        torch.manual_seed(1)  # seeds every card, too
        first = torch.rand(3, device="gcu")
        state = torch.gcu.get_rng_state()
        second = torch.rand(3, device="gcu")
        cpu = torch.get_rng_state()
        torch.gcu.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="gcu"), second) and not torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), cpu)
        torch.gcu.manual_seed_all(1)
        assert torch.equal(torch.rand(3, device="gcu:4").cpu(), first.cpu())
        dropped = torch.nn.functional.dropout(torch.ones(1000, device="gcu"))
        assert torch.equal(torch.get_rng_state(), cpu) and 300 < (dropped == 0).sum().item() < 700
        stream = torch.gcu.Stream(device="gcu")
        start, end = torch.Event("gcu", enable_timing=True), torch.Event("gcu", enable_timing=True)
        start.record()
        with torch.gcu.stream(stream):
            assert torch.gcu.current_stream() == stream
            x = torch.ones(3, device="gcu") * 2
        stream.synchronize()
        end.record()
        assert x.sum().item() == 6 and start.elapsed_time(end) >= 0
        assert torch.gcu.current_stream() != stream
        """
    )


def test_a_forked_child_of_a_process_with_a_card_is_refused(card):
    card(
        """
        import os, torch, torch_gcu
        torch.ones(1, device="gcu")
        child = os.fork()
        if child == 0:
            try:
                torch.ones(1, device="gcu")
            except RuntimeError as error:
                os._exit(0 if "Cannot re-initialize GCU in forked subprocess" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )
