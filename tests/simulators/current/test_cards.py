"""The API of torch.gcu: cards, memory, random states, streams, saving."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import clean_environment
from tests.simulators import needs_current_card

pytestmark = needs_current_card


def test_cards_and_their_selection(card):
    card(
        """
        import torch, torch_gcu, torch_gcu as again
        assert torch.gcu.is_available() and torch.gcu.device_count() == 8 and not torch.gcu.is_initialized()
        assert torch.gcu.current_device() == 0
        torch.gcu.set_device("gcu:3")
        assert torch.ones(1, device="gcu").device == torch.device("gcu", 3) == torch.ones(1).gcu().device
        with torch.gcu.device(5):
            assert torch.ones(1).gcu().device.index == 5
        assert torch.gcu.current_device() == 3
        assert torch.nn.Linear(2, 2).gcu().weight.is_gcu
        assert "simulated" in torch.gcu.get_device_name(0)
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


def test_visible_cards_keep_their_identity(card):
    card(
        """
        import torch, torch_gcu, simulated_gcu
        assert torch.gcu.device_count() == 2 == simulated_gcu.device_count()
        assert [torch_gcu._C.physical_index(i) for i in range(2)] == [6, 1]
        """,
        TOPS_VISIBLE_DEVICES="6,1,9,2",  # the list ends at 9, which is no card
    )
    card("import torch, torch_gcu; assert torch.gcu.device_count() == 3", SIM_GCU_COUNT="3")
    card("import torch, torch_gcu; assert not torch.gcu.is_available()", TOPS_VISIBLE_DEVICES="")


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


def test_the_management_library_answers_without_torch_and_sees_other_processes(card, tmp_path):
    card(
        """
        import ctypes, os, subprocess, sys
        held = "import torch, torch_gcu; x = torch.empty(2**20, device='gcu'); print(1, flush=True); input()"
        holder = subprocess.Popen(
            [sys.executable, "-c", held],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "TOPS_VISIBLE_DEVICES": "2"},
        )
        holder.stdout.readline()
        import simulated_gcu
        simulated_gcu.activate()
        assert "torch" not in sys.modules
        efml, handle, text = ctypes.CDLL("libefml.so.1"), ctypes.c_void_p(), ctypes.create_string_buffer(96)
        count = ctypes.c_uint()
        assert efml.efmlDeviceGetCount_v2(ctypes.byref(count)) != 0  # not before this:
        assert efml.efmlInitV2() == 0 == efml.efmlDeviceGetCount_v2(ctypes.byref(count)) and count.value == 3
        assert efml.efmlDeviceGetHandleByIndex_v2(3, ctypes.byref(handle)) != 0
        found = []
        for card in range(3):
            assert efml.efmlDeviceGetHandleByIndex_v2(card, ctypes.byref(handle)) == 0
            assert efml.efmlDeviceGetUUID(handle, text, 96) == 0
            memory, rates = (ctypes.c_ulonglong * 3)(), (ctypes.c_uint * 2)()
            assert efml.efmlDeviceGetMemoryInfo(handle, memory) == 0
            assert efml.efmlDeviceGetUtilizationRates(handle, rates) == 0
            found.append((text.value.decode(), memory[0], memory[2] >= 4 * 2**20, rates[0]))
        assert found == [(f"GCU-simulated-{i}", 2**29, i == 2, 100 * (i == 2)) for i in range(3)], found
        assert efml.efmlDeviceGetName(handle, text, 96) == 0 and text.value == b"Enflame L600 (simulated)"
        holder.communicate(b"\\n")
        assert efml.efmlDeviceGetUtilizationRates(handle, rates) == 0 and rates[0] == 0
        """,
        SIM_GCU_COUNT="3",
        SIM_GCU_MEMORY="512MiB",
        SIM_GCU_PROFILE="l600",
        SIM_GCU_STATE=str(tmp_path / "state"),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_the_monitor_prints_tables_of_the_kind_that_real_ones_print(card):
    script = """
    import subprocess, sys
    from exp.backends._monitor import parse_efsmi
    for option in ([], ["-q"]):
        command = [sys.executable, "-m", "simulated_gcu", "efsmi", *option]
        printed = subprocess.run(command, capture_output=True, text=True)
        cards = parse_efsmi(printed.stdout)
        told = [(card["index"], card["name"], card["memory_total"]) for card in cards]
        assert told == [(i, "Enflame " + {name!r}, 2**29) for i in range(2)], (printed, cards)
    """
    for profile, name in (("s60", "S60"), ("l600", "L600")):
        card(
            script.replace("{name!r}", repr(name)), SIM_GCU_PROFILE=profile, SIM_GCU_COUNT="2", SIM_GCU_MEMORY="512MiB"
        )


@pytest.mark.parametrize(
    ("variable", "value"), [("SIM_GCU_COUNT", "two"), ("SIM_GCU_MEMORY", "much"), ("SIM_GCU_PROFILE", "s61")]
)
def test_the_monitor_says_in_one_line_what_it_cannot_read(variable, value):
    done = subprocess.run(
        [sys.executable, "-m", "simulated_gcu", "efsmi"],
        env=clean_environment(**{variable: value}),
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert f"{variable}={value} is no " in line
    assert done.returncode == 3


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


def test_saving_and_loading_between_devices(card):
    card(
        """
        import copy, io, torch, torch_gcu
        saved = torch.randn(3, device="gcu:2")
        file = io.BytesIO()
        torch.save({"tensor": saved, "model": torch.nn.Linear(2, 2).to("gcu:2").state_dict()}, file)
        for location, device in ((None, "gcu:2"), ("cpu", "cpu"), ("gcu:1", "gcu:1"), ({"gcu:2": "gcu:5"}, "gcu:5")):
            file.seek(0)
            loaded = torch.load(file, map_location=location, weights_only=True)
            assert loaded["tensor"].device == torch.device(device) == loaded["model"]["weight"].device
            assert torch.equal(loaded["tensor"].cpu(), saved.cpu())
        assert copy.deepcopy(saved).device == saved.device
        """
    )


def test_loaders_with_workers_and_pinned_memory(card):
    card(
        """
        import torch, torch_gcu
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(20.0))
        for workers in (0, 2):
            batches = [x for x, in DataLoader(data, 5, pin_memory=True, num_workers=workers)]
            assert all(x.is_pinned() for x in batches)
            assert sum(x.to("gcu", non_blocking=True).sum().item() for x in batches) == 190
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
