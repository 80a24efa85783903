"""The gcu backend against stand-ins of the vendor's plug-in that record what is called. No card was at hand."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from tests.conftest import clean_environment

LEGACY = torch.__version__.startswith("1.")

CURRENT_PLUGIN = """
import types, torch
calls = []
def record(name, result=None):
    def call(*args, **kwargs):
        calls.append((name, args))
        return result
    return call
torch.gcu = types.SimpleNamespace(
    device_count=record("device_count", 8), set_device=record("set_device"), synchronize=record("synchronize"),
    manual_seed_all=record("manual_seed_all"), is_bf16_supported=record("is_bf16_supported", True),
    get_device_name=record("get_device_name", "S60"), memory_allocated=record("m", 1),
    max_memory_allocated=record("m", 2),
    mem_get_info=record("m", (3, 4)), amp=types.SimpleNamespace(GradScaler=record("GradScaler", "scaler")))
"""
LEGACY_PLUGIN = """
calls = []
def record(name, result=None):
    def call(*args, **kwargs):
        calls.append((name, args))
        return result
    return call
device_count, set_device = record("device_count", 8), record("set_device")
optimizer_step, sync_lived_tensor = record("optimizer_step"), record("sync_lived_tensor")
"""


@pytest.fixture
def with_plugin(tmp_path):
    """Runs a script in a process that finds a stand-in of torch_gcu."""
    package = tmp_path / "torch_gcu"
    (package / "nn" / "parallel").mkdir(parents=True)
    (package / "__init__.py").write_text(LEGACY_PLUGIN if LEGACY else CURRENT_PLUGIN)
    (package / "nn" / "__init__.py").write_text("")
    (package / "nn" / "parallel" / "__init__.py").write_text("class DistributedDataParallel: pass\n")

    def run(script: str) -> None:
        begin = (
            "from exp.backends_registry import create_backend\n"
            "backend = create_backend({'_target_': 'exp.backends.gcu.GcuBackend', 'name': 'gcu'})\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", begin + textwrap.dedent(script)],
            env=clean_environment(PYTHONPATH=str(tmp_path)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return run


def test_cards_are_counted_in_another_process(with_plugin):
    with_plugin(
        """
        import sys
        assert backend.why_unavailable() is None
        assert backend.device_count() == 8
        assert "torch" not in sys.modules and "torch_gcu" not in sys.modules
        """
    )


@pytest.mark.skipif(LEGACY, reason="the current generation goes with torch >= 2.0")
def test_the_current_generation(with_plugin):
    with_plugin(
        """
        import torch
        real = torch.device
        torch.device = lambda *args: args  # this torch knows no such device type
        assert backend.process_group == "cpu:gloo,gcu:eccl"
        assert backend.set_device(3) == ("gcu", 3)
        import torch_gcu
        assert ("set_device", (3,)) in torch_gcu.calls
        assert backend.supports("bf16") and backend.supports("fp16")
        assert backend.grad_scaler("fp16") == "scaler" and backend.grad_scaler("bf16") is None
        assert backend.memory() == {"allocated": 1, "max_allocated": 2, "total": 4}
        import types
        assert backend.ddp_kwargs(types.SimpleNamespace(index=3)) == {"device_ids": [3], "output_device": 3}
        backend.seed(1), backend.synchronize()
        from exp.errors import UnavailableError
        try:
            backend.set_device(8)
        except UnavailableError as error:
            assert "torch_gcu sees 8" in str(error)
        else:
            raise AssertionError
        """
    )


@pytest.mark.skipif(not LEGACY, reason="the legacy generation goes with torch 1.10")
def test_the_legacy_generation(with_plugin):
    with_plugin(
        """
        import types
        assert backend.device_type == "xla" and backend.process_group == "eccl"
        assert str(backend.set_device(3)) == "xla:3"
        import torch_gcu
        assert ("set_device", (3,)) in torch_gcu.calls
        assert backend.ddp_class is torch_gcu.nn.parallel.DistributedDataParallel
        # None would mean ALL cards to the vendor's class
        assert backend.ddp_kwargs(types.SimpleNamespace(index=3))["device_ids"] == [3]
        backend.end_step("optimizer")
        assert ("optimizer_step", ("optimizer",)) in torch_gcu.calls
        assert backend.supports("fp32") and not backend.supports("bf16")
        """
    )
