"""The gcu backend against stand-ins of the vendor's plug-in that record what is called. No card was at hand."""

from __future__ import annotations

import pytest
import torch
from exp.backends import _gcu_cards, _gcu_environment, gcu

from exp.backends_registry import create_backend

needs_torch_2 = pytest.mark.skipif(
    torch.__version__.startswith("1."), reason="the current generation goes with torch >= 2.0"
)

RECORD = """
import os
calls = []
def record(name, result=None):
    def call(*args, **kwargs):
        calls.append((name, *args, kwargs) if kwargs else (name, *args))
        return result
    return call
if "LOADS" in os.environ:  # one byte for each process that loads the plug-in
    with open(os.environ["LOADS"], "a") as loads:
        loads.write(".")
"""
# Takes the place in torch that the real one takes, with gloo for its collectives.
CURRENT = """
import types, torch
import torch.distributed as dist
torch.utils.rename_privateuse1_backend("gcu")
module = types.ModuleType("torch.gcu")
for name, result in {
    "device_count": 8, "set_device": None, "synchronize": None, "manual_seed_all": None, "set_rng_state": None,
    "is_bf16_supported": True, "memory_allocated": 1, "max_memory_allocated": 2, "mem_get_info": (3, 4),
    "get_rng_state": torch.zeros(2, dtype=torch.uint8), "is_available": True, "current_device": 3,
    "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
    "get_device_properties": types.SimpleNamespace(name="S60", total_memory=4),
}.items():
    setattr(module, name, record(name, result))
module.amp = types.SimpleNamespace(GradScaler=record("GradScaler", "scaler"))
torch._register_device_module("gcu", module)
def gloo(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("eccl", gloo, devices=["gcu"])
"""
LEGACY = """
import atexit, enum
device_count, set_device = record("device_count", 8), record("set_device")
optimizer_step, synchronize = record("optimizer_step"), record("synchronize")
sync_lived_tensor, unlazy = record("sync_lived_tensor"), record("unlazy")
get_device_name, get_hbm_alloc_size = record("get_device_name", "T20"), record("get_hbm_alloc_size", 4096)
JitRunMode = enum.Enum("JitRunMode", "SYNC ASYNC SAFEASYNC")
def _prepare_to_exit():
    with open(os.environ.get("CLEANED", os.devnull), "a") as mark:
        mark.write("x")
atexit.register(_prepare_to_exit)
"""
LEGACY_DISTRIBUTED = """
import os
from torch_gcu import record
def init_process_group(name, **kwargs):
    place = {key: os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    record("init_process_group")(name, kwargs, place)
destroy_process_group = record("destroy_process_group")
def is_eccl_available():
    return "NO_ECCL" not in os.environ
"""


@pytest.fixture
def plugin(tmp_path, ranks):
    """Writes a stand-in of torch_gcu, and a torch of its generation where only the version is asked for."""
    package = tmp_path / "lib" / "torch_gcu"

    def write(generation: str):
        (package / "nn" / "parallel").mkdir(parents=True)
        (package / "__init__.py").write_text(RECORD + generation)
        (package / "nn" / "__init__.py").write_text("")
        (package / "nn" / "parallel" / "__init__.py").write_text("class DistributedDataParallel: pass\n")
        (package / "distributed.py").write_text(LEGACY_DISTRIBUTED)
        version = "1.10.0" if generation is LEGACY else "2.10.0"
        before = (
            "from exp.backends import _probe\n"
            f"_probe.torch_build = lambda: {{'version': '{version}', 'cuda': None, 'hip': None}}\n"
        )

        def run(script: str, world_size: int = 1, **environment: str) -> list:
            return ranks(script, world_size, "gcu", before, PYTHONPATH=str(tmp_path / "lib"), **environment)

        return run

    return write


@pytest.mark.parametrize("generation", [pytest.param(CURRENT, marks=needs_torch_2), LEGACY], ids=["current", "legacy"])
def test_cards_are_counted_once_and_in_another_process(plugin, tmp_path, generation):
    script = """
        from exp.backends_registry import choose
        answers = [backend.why_unavailable(), backend.device_count(), choose(["gcu", "cpu"])]
        assert not {"torch", "torch_gcu"} & set(sys.modules)
        print(json.dumps(answers))
    """
    loads = tmp_path / "loads"
    assert plugin(generation)(script, LOADS=str(loads)) == [[None, 8, "gcu"]]
    assert loads.read_text() == "."


def test_why_the_cards_cannot_be_counted_is_told(plugin):
    run = plugin("raise ImportError('libtopsrt.so: cannot open shared object file')\n")
    reason, count = run("print(json.dumps([backend.why_unavailable(), backend.device_count()]))")[0]
    assert "ImportError: libtopsrt.so: cannot open shared object file" in reason
    assert "LD_LIBRARY_PATH" in reason
    assert count == 0


def test_without_the_plugin_it_says_what_was_looked_for_and_where(ranks):
    script = "print(json.dumps([backend.why_unavailable(), backend.device_count(), sys.executable]))"
    reason, count, python = ranks(script, backend="gcu")[0]
    assert f"looked for the package torch_gcu in {python} and found none" in reason
    assert "TopsRider" in reason
    assert count == 0


def test_it_says_where_the_plug_in_may_be(monkeypatch, tmp_path):
    backend = create_backend({"_target_": "gcu", "name": "gcu"})
    monkeypatch.setattr(_gcu_cards, "_TOPS", tmp_path)
    assert "make setup SYSTEM=1" in backend.why_unavailable()
    packages = tmp_path / "lib" / "python3.8" / "site-packages"
    (packages / "torch_gcu").mkdir(parents=True)
    assert f"it is in {packages}: put that on PYTHONPATH" in backend.why_unavailable()


def test_a_plug_in_that_does_not_import_is_unavailable(plugin):
    script = """
        from exp.errors import UnavailableError
        try:
            backend.set_device(0)
        except UnavailableError as refused:
            print(json.dumps(str(refused)))
    """
    said = plugin("raise ImportError('libtopsrt.so: cannot open shared object file')\n")(script)[0]
    assert said.startswith("torch_gcu does not import (ImportError: libtopsrt.so: cannot open")
    assert "LD_LIBRARY_PATH" in said


def test_variables_that_do_nothing_or_harm_are_told(monkeypatch):
    for name in ("GCU_VISIBLE_DEVICES", "TORCH_GCU_ENABLE_INT64_AND_UINT64"):
        monkeypatch.delenv(name, raising=False)
        assert name in gcu.GcuBackend.variables
    assert _gcu_environment.cautions(3) == []
    monkeypatch.setenv("GCU_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("TORCH_GCU_ENABLE_INT64_AND_UINT64", "true")
    unread, harmful = _gcu_environment.cautions(3)
    assert unread.startswith("GCU_VISIBLE_DEVICES=0,1: nothing reads it; TOPS_VISIBLE_DEVICES")
    assert harmful.startswith("TORCH_GCU_ENABLE_INT64_AND_UINT64=true: this card has no kernels")
    assert _gcu_environment.cautions(4) == _gcu_environment.cautions(None) == [unread]


@needs_torch_2
def test_operators_are_counted_beside_what_the_user_asks_of_the_same_variable(monkeypatch):
    backend = create_backend({"_target_": "gcu", "name": "gcu"})
    name = "ENFLAME_PT_OP_DEBUG_CONFIG"
    for asked, wanted in {
        "": "op_statistics=true",
        "op_sync_mode=true": "op_sync_mode=true op_statistics=true",
        "op_statistics=true x=1": "op_statistics=true x=1",
    }.items():
        monkeypatch.setenv(name, asked)
        assert backend.counting_env() == {name: wanted}


@needs_torch_2
def test_the_current_generation(plugin):
    script = """
        import torch
        device = backend.set_device(3)
        assert str(device) == "gcu:3"
        import torch_gcu
        assert ("set_device", 3) in torch_gcu.calls
        assert backend.process_group == "cpu:gloo,gcu:eccl"
        assert backend.supports("bf16") and backend.supports("fp16")
        assert backend.grad_scaler("fp16") == "scaler" and backend.grad_scaler("bf16") is None
        with backend.autocast("bf16"):
            assert torch.is_autocast_enabled("gcu") and torch.get_autocast_dtype("gcu") == torch.bfloat16
        assert backend.memory() == {"allocated": 1, "max_allocated": 2, "total": 4}
        assert backend.describe(device) == {"name": "S60", "index": 3, "memory": 4, "card": 3}
        assert backend.ddp_kwargs(device) == {"device_ids": [3], "output_device": 3}
        assert backend.ddp_class is torch.nn.parallel.DistributedDataParallel
        backend.seed(1)
        backend.set_rng_state(backend.rng_state())
        backend.synchronize()
        assert ("manual_seed_all", 1) in torch_gcu.calls and ("synchronize",) in torch_gcu.calls
        print("0")
    """
    plugin(CURRENT)(script)


@needs_torch_2
def test_the_current_generation_joins_a_composite_group(plugin):
    script = """
        import torch
        backend.set_device(rank)
        distributed = join()
        total = distributed.sum(torch.tensor([rank + 1.0])).item()
        print(json.dumps([torch.distributed.get_backend_config(), total, distributed.cpu_group]))
        backend.destroy_process_group()
    """
    assert plugin(CURRENT)(script, world_size=2) == [["cpu:gloo,gcu:eccl", 3.0, None]] * 2


def test_the_legacy_generation(plugin):
    script = """
        import torch
        device = backend.set_device(3)
        assert str(device) == "xla:3" and backend.device_type == "xla" and backend.process_group == "eccl"
        import torch_gcu
        assert ("set_device", 3) in torch_gcu.calls
        assert backend.ddp_class is torch_gcu.nn.parallel.DistributedDataParallel
        # None would mean ALL cards to the vendor's class
        assert backend.ddp_kwargs(device) == {"device_ids": [3], "output_device": 3}
        backend.end_step("optimizer", closure=None)
        assert torch_gcu.calls[-1] == ("optimizer_step", "optimizer", {"optimizer_args": {"closure": None}})
        backend.synchronize()
        assert torch_gcu.calls[-2:] == [("sync_lived_tensor",), ("synchronize",)]
        assert [backend.supports(precision) for precision in ("fp32", "bf16", "fp16")] == [True, False, False]
        assert backend.rng_state() is None and backend.memory() == {"allocated": 4096}
        assert backend.describe(device) == {"name": "T20", "index": 3, "card": 3}
        backend.end_batch()
        assert torch_gcu.calls[-1] == ("sync_lived_tensor",)
        print("0")
    """
    plugin(LEGACY)(script)


def test_a_legacy_step_ends_with_the_model_alone_where_that_is_asked_for(plugin):
    script = """
        import types, torch_gcu
        from exp.errors import ConfigError
        def made(**options):
            return create_backend({"_target_": "gcu", "name": "gcu", "options": options})
        backend = made(step="model", mode="ASYNC")
        card, host = (types.SimpleNamespace(device=types.SimpleNamespace(type=kind)) for kind in ("xla", "cpu"))
        mode = torch_gcu.JitRunMode.ASYNC
        backend.end_step("optimizer", model="model", outputs=[card, host], closure=None)
        assert torch_gcu.calls[-1] == ("optimizer_step", "optimizer", {
            "optimizer_args": {"closure": None}, "model": "model", "extra_output": [card], "mode": mode})
        for _ in range(32):
            backend.end_batch({"logits": [card, host], "size": 3})
        ends = [call for call in torch_gcu.calls if call[0] != "optimizer_step"]
        assert ends == [("unlazy", [card], {"mode": mode})] * 31 + [("sync_lived_tensor", {"mode": mode})]
        refused = []
        for options in ({"step": "all"}, {"mode": "sync"}):
            try:
                made(**options)
            except ConfigError as error:
                refused.append(str(error))
        print(json.dumps(refused))
    """
    refused = plugin(LEGACY)(script)[0]
    assert refused == [
        "backend.options.step=all: use one of live, model",
        "backend.options.mode=sync: use one of SYNC, ASYNC, SAFEASYNC",
    ]


def test_the_legacy_plug_in_cleans_up_once(plugin, tmp_path):
    script = """
        import os
        mark = os.environ["CLEANED"]
        backend.close()  # nothing has been imported yet
        backend.set_device(0)
        before = os.path.exists(mark)
        backend.close()
        print(json.dumps([before, open(mark).read()]))
    """
    mark = tmp_path / "mark"
    assert plugin(LEGACY)(script, CLEANED=str(mark)) == [[False, "x"]]
    assert mark.read_text() == "x"  # the interpreter's own end has added nothing


def test_efp_is_the_environments(plugin):
    script = """
        import os
        from exp.errors import ConfigError
        assert backend.precision_env("efp") == {"ENFLAME_ENABLE_EFP": "true"} and backend.precision_env("fp32") == {}
        os.environ["ENFLAME_ENABLE_EFP"] = "true"
        assert backend.supports("efp") and not backend.supports("fp32") and "efp" in backend.precisions
        try:
            backend.precision_env("fp32")
        except ConfigError as refused:
            print(json.dumps(str(refused)))
    """
    assert plugin(LEGACY)(script) == ["ENFLAME_ENABLE_EFP=true overrules precision=fp32; unset it"]


def test_the_legacy_plug_in_may_lack_its_collectives(plugin):
    script = "print(json.dumps(backend.collectives_missing()))"
    run = plugin(LEGACY)
    assert run(script) == [None]
    assert "has no ECCL" in run(script, NO_ECCL="1")[0]


def test_the_legacy_generation_joins_the_vendors_group_and_gloo_beside_it(plugin):
    script = """
        import torch, torch_gcu
        distributed = join()
        total = distributed.sum(torch.tensor([rank + 1.0])).item()
        (_, name, arguments, place), = (call for call in torch_gcu.calls if call[0] == "init_process_group")
        from torch.distributed import TCPStore
        client = TCPStore(place["MASTER_ADDR"], int(place["MASTER_PORT"]), world_size, False)
        client.set("served", "yes")
        served = client.get("served").decode()
        distributed.barrier()
        backend.destroy_process_group()
        assert torch_gcu.calls[-1] == ("destroy_process_group",) and not torch.distributed.is_initialized()
        print(json.dumps([name, arguments, place, total, served]))
    """
    first, second = plugin(LEGACY)(script, world_size=2)
    assert first[0] == "eccl"
    assert first[1] == {"rank": 0, "world_size": 2}
    assert second[1] == {"rank": 1, "world_size": 2}
    assert first[2] == {**second[2], "RANK": "0"}  # one meeting point for both
    assert first[2]["MASTER_ADDR"] == "127.0.0.1"
    assert first[4] == second[4] == "yes"  # rank 0 serves the port, so that nobody else can take it
    assert first[3] == second[3] == 3.0


@pytest.mark.parametrize("generation", [pytest.param(CURRENT, marks=needs_torch_2), LEGACY], ids=["current", "legacy"])
def test_a_rank_without_a_card_is_refused(plugin, generation):
    script = """
        from exp.errors import UnavailableError
        try:
            backend.set_device(8)
        except UnavailableError as refused:
            print(json.dumps(str(refused)))
    """
    assert "local_rank 8 has no card: torch_gcu sees 8" in plugin(generation)(script)[0]


def test_a_group_that_the_legacy_plugin_does_not_know_is_refused(plugin):
    script = """
        from exp.errors import ConfigError
        try:
            join()
        except ConfigError as refused:
            print(json.dumps(str(refused)))
    """
    said = plugin(LEGACY)(script, TORCH_DISTRIBUTED_BACKEND="mpi")[0]
    assert "process group 'mpi' is not one that torch_gcu of this generation makes" in said


NO_ECCL = CURRENT.replace('dist.Backend.register_backend("eccl", gloo, devices=["gcu"])', "")


@needs_torch_2
def test_missing_collectives_are_an_error_on_every_rank_that_names_the_choices(plugin):
    script = """
        from exp.errors import UnavailableError
        backend.set_device(rank)
        try:
            join()
        except UnavailableError as refused:
            print(json.dumps(str(refused)))
    """
    for said in plugin(NO_ECCL)(script, world_size=2):
        assert "process group 'cpu:gloo,gcu:eccl' cannot be made: rank 0: torch_gcu has registered no process" in said
        assert "backend.allow_fallback=true" in said
        assert "backend.process_group=gloo" in said


@needs_torch_2
def test_missing_collectives_are_replaced_where_that_is_allowed(plugin):
    script = """
        import torch
        backend.allow_fallback = True
        backend.set_device(rank)
        distributed = join()
        total = distributed.sum(torch.tensor([rank + 1.0])).item()
        print(json.dumps([distributed.fallback, torch.distributed.get_backend(), total]))
        backend.destroy_process_group()
    """
    for fallback, name, total in plugin(NO_ECCL)(script, world_size=2):
        assert fallback["wanted"] == "cpu:gloo,gcu:eccl"
        assert fallback["used"] == "gloo, staged through the CPU"
        assert "rank 0: torch_gcu has registered no process group" in fallback["reason"]
        assert (name, total) == ("staged", 3.0)
