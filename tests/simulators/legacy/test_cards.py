"""Counting, choosing and filling simulated cards; what a card refuses."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card


def test_functions_of_the_package(job):
    job("""
import torch, torch_gcu
assert torch_gcu.is_available() and torch_gcu.device_count() == 8
assert torch_gcu.current_device() == 0 and torch_gcu.gcu_device() == torch.device("xla:0")
torch_gcu.set_device("xla:3")
assert torch_gcu.current_device() == 3 and torch.ones(1, device="xla").device == torch.device("xla:3")
torch_gcu.set_device(99)  # ignored, as by the vendor's package
assert torch_gcu.current_device() == 3
before = torch_gcu.get_hbm_alloc_size(0)
held = torch.empty(2**20, device="xla:0")
assert torch_gcu.get_hbm_alloc_size(0) - before == 4 * 2**20 and torch_gcu.get_device_name(1) == "T20 (simulated)"
assert (held[:2].fill_(1) * torch.tensor(2.0))[torch.tensor([0, 1])].tolist() == [2, 2]  # numbers, indices of the CPU
with torch_gcu.device(5):
    assert torch_gcu.gcu_device().index == 5
assert torch_gcu.current_device() == 3 and torch_gcu.gcu_device(torch.device("xla:1")).index == 1
assert torch.ones(1, device="xla:2").is_gcu() and not torch.ones(1).is_gcu()
torch_gcu.synchronize()
torch_gcu.manual_seed_all(1)
first = torch.rand(4, device="xla:1").cpu()
torch_gcu.manual_seed_all(1)
assert torch.equal(first, torch.rand(4, device="xla:1").cpu())
assert "1.5000" in str(torch.tensor([1.5], device="xla:1"))
""")


def test_memory_of_a_card_ends(job):
    job(
        """
import torch, torch_gcu
a = torch.empty(5 << 20, dtype=torch.uint8, device="xla:0")
assert torch_gcu.simulator.memory_allocated(0) == 5 << 20
def needs(megabytes, device):
    return torch.empty(megabytes << 20, dtype=torch.uint8, device=device)
for ask in (lambda: needs(4, "xla:0"), lambda: a.float()):
    try:
        ask()
    except RuntimeError as error:
        assert "GCU out of memory: tried to allocate" in str(error) and "xla:0, which has 8 MiB" in str(error), error
    else:
        raise AssertionError("there was memory")
b = needs(4, "xla:1")  # another card's memory is its own
del a
c = needs(8, "xla:0")
assert torch_gcu.simulator.max_memory_allocated(0) == 8 << 20
""",
        SIM_GCU_MEMORY="8MiB",
    )


def test_devices_do_not_mix(refused):
    before = """
import torch, torch_gcu
cpu, one, two = torch.ones(2, 2), torch.ones(2, 2, device="xla:0"), torch.ones(2, 2, device="xla:1")
linear = torch.nn.Linear(2, 2).to("xla:0")
convolution = torch.nn.Conv1d(2, 2, 1)
"""
    said = refused(
        """
        cpu + one
        one + two
        one.mul_(cpu)
        torch.cat([one, two])
        linear(cpu)
        convolution(one[None])
        torch.cdist(one, cpu)
        one.numpy()
        torch.ones(1, device="cuda")
        """,
        before,
    )
    *mixtures, numpy, cuda = said.values()
    for text in mixtures:
        assert text.startswith("RuntimeError: Expected all tensors to be on the same device, but found at least two"), (
            text
        )
    assert numpy.startswith("TypeError: can't convert xla:0 device type tensor to numpy")
    assert cuda != "nothing"


def test_what_a_card_cannot_hold(refused):
    said = refused(
        """
        torch.eye(2, device="xla").to_sparse()
        torch.quantize_per_tensor(torch.ones(2, device="xla"), 1.0, 0, torch.qint8)
        torch_gcu.amp.autocast().__enter__()
        torch_gcu.amp.GradScaler()
        torch.Generator(device="xla")
        torch_gcu.synchronize(8)
        torch_gcu.gcu_device("cpu")
        torch_gcu.manual_seed_all(-1)
        """
    )
    sparse, quantised, autocast, scaler, generator, card, device, seed = said.values()
    assert "NotImplementedError: GCU has no sparse and no quantised tensors" in sparse
    assert "NotImplementedError: GCU has no sparse and no quantised tensors" in quantised
    assert autocast.startswith("RuntimeError: free(): invalid pointer")
    assert scaler.startswith("RuntimeError: free(): invalid pointer")
    assert "not supported" in generator
    assert card == "IndexError: Invalid device id, must in [0, 7], got 8"
    assert device == "ValueError: Expected a gcu device, but got: cpu"
    assert seed.startswith("ValueError: Seed must be")


def test_64_bits_are_narrowed_to_32(job):
    script = """
import os, warnings, torch, torch_gcu
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    small = torch.arange(5, device="xla")
    assert small.dtype == torch.int64 and small.tolist() == [0, 1, 2, 3, 4]
    x = torch.tensor([1 + 1e-10, 1 / 3], dtype=torch.float64).to("xla")
    y = (x * x).cpu()
    big = torch.tensor([2**40 + 5], device="xla")
assert x.dtype == y.dtype == torch.float64
assert torch.equal(y, y.float().double()) and y[0].item() == 1.0
assert big.dtype == torch.int64
print(big.item(), [str(item.message)[:16] for item in warned])
"""
    (narrow,), (wide,) = job(script), job(script, TORCH_GCU_ENABLE_INT64_AND_UINT64="true")
    assert "5 ['GCU has no float', 'GCU has no int64']" in narrow
    assert f"{2**40 + 5} ['GCU has no float']" in wide


def test_operators_that_fall_back_are_counted(job, refused):
    script = """
import torch, torch_gcu
from torch_gcu import simulator
x = torch.randn(8, device="xla")
assert not simulator.fallbacks()
again = torch.fft.irfft(torch.fft.rfft(x))
assert torch.allclose(again.cpu(), x.cpu(), atol=1e-6)
found = simulator.fallbacks()
assert found["aten::_fft_r2c"] == 1 and found["aten::_fft_c2r"] == 1, found
simulator.reset_fallbacks()
torch.nn.functional.softmax(x, 0)
assert not simulator.fallbacks()
"""
    (printed,) = job(script)
    assert printed.count("[TORCH_GCU/FALLBACK] aten::_fft_r2c falls back to the CPU") == 1
    said = refused("torch.fft.rfft(torch.ones(8, device='xla'))", SIM_GCU_STRICT="1")
    (text,) = said.values()
    assert "NotImplementedError: GCU has no kernel for aten::_fft_r2c" in text
    assert "SIM_GCU_STRICT=1" in text


def test_a_process_that_skips_the_vendors_clean_up_leaves_its_mark(job, tmp_path):
    script = """
import os, torch_gcu
if os.environ["HOW"] == "clean":
    torch_gcu._prepare_to_exit()
if os.environ["HOW"] != "atexit":
    os._exit(0)
"""
    for how, left in (("atexit", 0), ("clean", 0), ("skipped", 1)):
        job(script, HOW=how, SIM_GCU_EXIT_MARKS=str(tmp_path))
        assert len(list(tmp_path.glob("*.unclean"))) == left, how


def test_without_the_collectives_the_import_warns_and_a_group_raises(job):
    job(
        """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch_gcu.distributed as vendor
assert any("libeccl.so is not there" in str(said.message) for said in caught)
assert not vendor.is_eccl_available()
try:
    vendor.init_process_group("eccl", rank=0, world_size=1)
except RuntimeError as error:
    assert "have ECCL" in str(error)
else:
    raise AssertionError
""",
        SIM_GCU_ECCL="0",
    )
    job("import torch_gcu.distributed as vendor; assert vendor.is_eccl_available()")
