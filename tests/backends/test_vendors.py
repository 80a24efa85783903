"""Vendors whose cards no one here has: their files on the simulated card under their device types, and their wheels."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from exp.hardware.cards import visible_devices_env
from tests.backends import made
from tests.conftest import TINY, clean_environment
from tests.simulators import needs_current_card, plugin_on_path

VENDORS = ("npu", "mlu", "musa", "xpu", "mps")
WHEELS = Path(sys.prefix) / "vendors"  # what `make test-vendors` fetches
FILES = Path(__file__).parents[2] / "backends"
PLUGIN = """
import torch, torch_gcu
torch_gcu.gcu.BoolTensor = torch_gcu.gcu.LongTensor = torch.Tensor  # MMEngine looks for these of some vendors
def __getattr__(name):  # one vendor's package is also torch's module of the device
    return getattr(torch_gcu.gcu, name)
"""
HAL = """
#include <stdlib.h>
int drvGetDevNum(int *count) { *count = 4; return getenv("NO_DRIVER") != NULL; }
"""


@pytest.mark.parametrize("vendor", VENDORS)
def test_without_their_package_there_is_no_card_and_the_reason_says_what_to_install(monkeypatch, vendor):
    backend = made(vendor)
    reason = backend.unavailable_reason()
    assert reason is not None
    assert {"xpu": "XPU build", "mps": "Mac"}.get(vendor, f"torch_{vendor}") in reason or "torch 1.10" in reason
    assert backend.device_count() == 0
    for variable in backend.visible_variables:
        monkeypatch.setenv(variable, "4,5,6,7")
        assert visible_devices_env(backend, [3, 1]) == {variable: "5,7"}


@pytest.mark.extended
@needs_current_card
@pytest.mark.parametrize(("vendor", "chosen"), [("npu", "npu"), ("mlu", "accelerator"), ("musa", "auto")])
def test_their_files_train_two_ranks_on_a_simulated_card_of_their_type(exp, vendor, chosen):
    """The plug-in's name and device type are the vendor's; what is behind them is the simulated card."""
    (exp.folder / f"torch_{vendor}.py").write_text(PLUGIN)
    path = {"PYTHONPATH": f"{exp.folder}:{plugin_on_path()['PYTHONPATH']}", "SIM_GCU_DEVICE": vendor}
    settings = [*TINY[1:], "model.attention_dropout=0"]
    done = exp(*settings, f"backend={chosen}", "nproc=2", "output_dir=run", fresh=True, **path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [device["name"] for device in exp.result("run")["devices"]] == ["Enflame GCU (simulated)"] * 2
    assert f"{vendor}:1" in exp.path("run/logs/rank1.log").read_text()
    assert exp(*settings, "backend=cpu", "output_dir=cpu").returncode == 0
    assert exp.losses("run") == pytest.approx(exp.losses("cpu"), rel=1e-5)


@pytest.mark.extended
@needs_current_card
def test_ascend_counts_by_its_driver_and_sees_no_card_in_a_list_that_does_not_ascend(tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('not asked')")
    compiler = [shutil.which("cc") or "c++", "-x", "c", "-shared", "-fPIC", "-o", str(tmp_path / "libascend_hal.so")]
    subprocess.run([*compiler, "-"], input=HAL, text=True, check=True)
    script = (
        "import json, os\nfrom exp.hardware.registry import create_backend\n"
        "backend = create_backend({'_target_': 'npu', 'name': 'npu'})\n"
        "def counted(value):\n    os.environ['ASCEND_RT_VISIBLE_DEVICES'] = value\n    return backend.device_count()\n"
        "print(json.dumps([counted(value) for value in ('0,2', '2,0', '1,1', '2,3,4', '', '1,x,2', '3')]))\n"
    )
    environment = clean_environment(LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout) == [2, 0, 0, 2, 0, 1, 1]


# -- Their wheels, which `make test-vendors` fetches ------------------------------------------------------------------

needs_wheels = pytest.mark.skipif(not WHEELS.is_dir(), reason="the vendors' wheels are not here (make test-vendors)")


def defined(source: str) -> set[str]:
    """Names that a module of a wheel defines or imports at its top."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


@needs_wheels
@pytest.mark.parametrize(("vendor", "module"), [("musa", "pymtml.py"), ("xpu", "pyzes/__init__.py")])
def test_every_name_of_their_bindings_exists_and_is_called_with_as_many_arguments(vendor, module):
    source = (WHEELS / module).read_text(encoding="utf-8")
    signatures = {
        node.name: len(node.args.args) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
    }
    tree = ast.parse((FILES / f"{vendor}.py").read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "library"
    }
    assert len(used) > 8
    assert used <= defined(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in signatures:
            assert len(node.args) == signatures[node.func.attr], node.func.attr


@needs_wheels
def test_ascends_plug_in_has_what_its_file_and_the_interface_of_cards_rely_on():
    package = WHEELS / "torch_npu"
    points = ConfigParser()
    points.read(next(WHEELS.glob("torch_npu-*.dist-info")) / "entry_points.txt")
    assert points["torch.backends"]["torch_npu"].startswith("torch_npu:")
    sources = {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    module = sources["npu/__init__.py"]
    listed = re.search(r"__all__ = \[(.*?)\]", module, re.DOTALL)[1]
    for name in (
        "device_count", "set_device", "synchronize", "manual_seed_all", "get_rng_state", "set_rng_state",
        "memory_allocated", "max_memory_allocated", "mem_get_info", "get_device_properties", "Event",
        "is_bf16_supported",
    ):  # fmt: skip
        assert f'"{name}"' in listed, name
    assert "GradScaler" in defined(sources["npu/amp/__init__.py"])
    for text in ("ASCEND_RT_VISIBLE_DEVICES", "libascend_hal.so", "drvGetDevNum", "val <= visible_devices[idx - 1]"):
        assert text in module, text
    assert 'rename_privateuse1_backend("npu")' in sources["_init/registry/backend.py"]
    assert '"hccl"' in sources["_init/registry/distributed.py"]
    assert "_npu_shutdown" in defined(sources["_init/core/runtime_lifecycle.py"])
