"""The gcu backend against a stand-in of the vendor's legacy plug-in that records what is called; the current one is
simulated (tests/simulators). No card was at hand.
"""

from __future__ import annotations

import sys

import pytest
import torch
from exp.backends import _gcu_cards, _gcu_environment

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
    """Writes the stand-in of torch_gcu, and a torch of its generation where only the version is asked for."""
    package = tmp_path / "lib" / "torch_gcu"

    def write():
        (package / "nn" / "parallel").mkdir(parents=True)
        (package / "__init__.py").write_text(RECORD + LEGACY)
        (package / "nn" / "__init__.py").write_text("")
        (package / "nn" / "parallel" / "__init__.py").write_text("class DistributedDataParallel: pass\n")
        (package / "distributed.py").write_text(LEGACY_DISTRIBUTED)
        before = (
            "from exp.backends import _probe\n"
            "_probe.torch_build = lambda: {'version': '1.10.0', 'cuda': None, 'hip': None}\n"
        )

        def run(script: str, world_size: int = 1, **environment: str) -> list:
            return ranks(script, world_size, "gcu", before, PYTHONPATH=str(tmp_path / "lib"), **environment)

        return run

    return write


def test_cards_are_counted_once_and_in_another_process(plugin, tmp_path):
    script = """
        from exp.backends_registry import choose
        answers = [backend.why_unavailable(), backend.device_count(), choose(["gcu", "cpu"])]
        assert not {"torch", "torch_gcu"} & set(sys.modules)
        print(json.dumps(answers))
    """
    loads = tmp_path / "loads"
    assert plugin()(script, LOADS=str(loads)) == [[None, 8, "gcu"]]
    assert loads.read_text() == "."


def test_it_says_where_the_plug_in_may_be(monkeypatch, tmp_path):
    backend = create_backend({"_target_": "gcu", "name": "gcu"})
    assert sys.executable in backend.why_unavailable()
    monkeypatch.setattr(_gcu_cards, "_TOPS", tmp_path)
    packages = tmp_path / "lib" / "python3.8" / "site-packages"
    (packages / "torch_gcu").mkdir(parents=True)
    assert str(packages) in backend.why_unavailable()


def test_a_variable_that_nothing_reads_is_told(monkeypatch):
    monkeypatch.delenv("GCU_VISIBLE_DEVICES", raising=False)
    assert _gcu_environment.cautions() == []
    monkeypatch.setenv("GCU_VISIBLE_DEVICES", "0,1")
    (said,) = _gcu_environment.cautions()
    assert "GCU_VISIBLE_DEVICES=0,1" in said
    assert "TOPS_VISIBLE_DEVICES" in said


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


def test_the_legacy_generation(plugin):
    script = """
        import os, torch
        from exp.errors import ConfigError, UnavailableError
        def refused(action, kind, named):
            try:
                action()
            except kind as error:
                assert named in str(error), error
                return
            raise AssertionError(named)
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
        assert backend.collectives_missing() is None
        os.environ["NO_ECCL"] = "1"
        assert backend.collectives_missing()
        del os.environ["NO_ECCL"]
        refused(lambda: backend.set_device(8), UnavailableError, "local_rank 8")
        os.environ["TORCH_DISTRIBUTED_BACKEND"] = "mpi"
        refused(join, ConfigError, "mpi")
        assert backend.precision_env("efp") == {"ENFLAME_ENABLE_EFP": "true"} and backend.precision_env("fp32") == {}
        os.environ["ENFLAME_ENABLE_EFP"] = "true"
        assert backend.supports("efp") and not backend.supports("fp32") and "efp" in backend.precisions
        refused(lambda: backend.precision_env("fp32"), ConfigError, "ENFLAME_ENABLE_EFP=true")
        print("0")
    """
    plugin()(script)


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
        for key, value in (("step", "all"), ("mode", "sync")):
            try:
                made(**{key: value})
            except ConfigError as error:
                assert f"backend.options.{key}={value}" in str(error)
            else:
                raise AssertionError(key)
        print("0")
    """
    plugin()(script)


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
    assert plugin()(script, CLEANED=str(mark)) == [[False, "x"]]
    assert mark.read_text() == "x"  # the interpreter's own end has added nothing


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
    first, second = plugin()(script, world_size=2)
    assert first[0] == "eccl"
    assert first[1] == {"rank": 0, "world_size": 2}
    assert second[1] == {"rank": 1, "world_size": 2}
    assert first[2] == {**second[2], "RANK": "0"}  # one meeting point for both
    assert first[2]["MASTER_ADDR"] == "127.0.0.1"
    assert first[4] == second[4] == "yes"  # rank 0 serves the port, so that nobody else can take it
    assert first[3] == second[3] == 3.0
