from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
from exp.backends import _probe, cuda, rocm

from exp.backends_registry import choose, create_backend
from exp.errors import ConfigError, UnavailableError
from tests.conftest import clean_environment


@pytest.mark.parametrize(
    ("value", "total", "visible"),
    [
        (None, 8, 8),
        ("", 8, 0),
        ("-1", 8, 0),
        ("0,1", 8, 2),
        (" 0, 1", 8, 2),
        ("0,9,1", 8, 1),
        ("0,-1,1", 8, 1),
        ("0,1,0", 8, 0),
        ("GPU-1a,GPU-2b", 8, 2),
        ("MIG-1a,MIG-2b", 1, 1),
        ("0,1,2", 2, 2),
    ],
)
def test_visible_device_variables_are_read_as_the_drivers_read_them(monkeypatch, value, total, visible):
    monkeypatch.delenv("SOME_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_VISIBLE_DEVICES", value)
    assert _probe.count_visible(total, "SOME_VISIBLE_DEVICES") == visible


def test_every_backend_answers_without_torch():
    script = (
        "import sys\nfrom exp.backends import _probe\nfrom exp.backends_registry import create_backend, installed\n"
        "for name in installed():\n"
        "    backend = create_backend({'_target_': name, 'name': name})\n"
        "    backend.why_unavailable(), backend.worker_env(0, 2, True)\n"
        "build = _probe.torch_build()\nassert 'torch' not in sys.modules\nimport torch\n"
        "assert (build['version'], build['cuda']) == (torch.__version__, torch.version.cuda)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=clean_environment())


def test_auto_takes_the_first_that_is_available_and_warns_of_one_that_does_not_exist(capsys):
    assert choose(["cuad", "gcu", "rocm", "cpu"]) == "cpu"
    assert "cuad" in capsys.readouterr().err
    with pytest.raises(UnavailableError, match=r"\n  gcu: .*\n  rocm: "):
        choose(["gcu", "rocm"])


@pytest.mark.parametrize("target", ["nonesuch", "nonesuch.module.Class", "exp.backends.cpu.Nonesuch", "os.path.join"])
def test_a_wrong_target_is_named(target):
    with pytest.raises(ConfigError, match=target):
        create_backend({"_target_": target, "name": "x"})


def test_a_target_that_does_not_import_is_unavailable_and_says_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = {
        "nonesuch_driver": "import nonesuch_driver",
        "libacme": "raise OSError('libacme.so')",
        "Syntax": "no python",
    }
    for number, (named, line) in enumerate(lines.items()):
        (tmp_path / f"broken_vendor{number}.py").write_text(line)
        with pytest.raises(UnavailableError, match=f"broken_vendor{number} .*{named}"):
            create_backend({"_target_": f"broken_vendor{number}.Backend", "name": "x"})


class Nvml:
    """Stands in for NVIDIA's library; ``init`` is what its first function answers."""

    def __init__(self, init: int = 0) -> None:
        self.init = init
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += self.init == 0
        return self.init

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:  # noqa: N802
        count._obj.value = 4
        return 0

    def nvmlSystemGetDriverVersion(self, version, length) -> int:  # noqa: N802
        version.value = b"550.54.15"
        return 0


def cuda_backend(monkeypatch, library):
    def load(name):
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(_probe, "torch_build", lambda: {"version": "2.5.0", "cuda": "12.4", "hip": None})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return create_backend({"_target_": "cuda", "name": "cuda"})


@pytest.mark.parametrize("library", [Nvml(), None, Nvml(init=9)], ids=["answers", "missing", "driver not loaded"])
def test_cuda_cards_are_counted_by_the_management_library_else_in_proc(monkeypatch, tmp_path, library):
    monkeypatch.setattr(cuda, "_PROC", tmp_path / "gpus")
    backend = cuda_backend(monkeypatch, library)
    if library is None or library.init:
        assert backend.why_unavailable() is not None
        assert backend.driver_version() is None
        (tmp_path / "gpus" / "0000:3b:00.0").mkdir(parents=True)
        assert (backend.why_unavailable(), backend.device_count()) == (None, 1)
        return
    assert (backend.why_unavailable(), backend.device_count()) == (None, 4)
    assert backend.driver_version() == "550.54.15"
    assert library.open == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert backend.device_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in backend.why_unavailable()


def test_rocm_cards_are_counted_in_the_kernels_topology(monkeypatch, tmp_path):
    monkeypatch.setattr(rocm, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(_probe, "torch_build", lambda: {"version": "2.5.0", "cuda": None, "hip": "6.2"})
    for name in ("ROCR", "HIP", "CUDA"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    backend = create_backend({"_target_": "rocm", "name": "rocm"})
    assert backend.why_unavailable() is not None
    for node, units in enumerate((0, 304, 304, 304)):  # the first is a processor
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores_count 8\nsimd_count {units}\n\n")
    assert backend.why_unavailable() is None
    assert backend.device_count() == 3
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,2")
    assert backend.device_count() == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert backend.device_count() == 1
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")  # of the two that are left
    assert "HIP_VISIBLE_DEVICES" in backend.why_unavailable()


def test_each_rocm_card_has_a_kernel_cache_of_its_own(monkeypatch, tmp_path):
    backend = create_backend({"_target_": "rocm", "name": "rocm"})
    cache = tmp_path / "home" / "of" / "mine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(rocm, "_TOPOLOGY", tmp_path / "topology")
    for node, units in ((0, 0), (2, 304), (3, 304), (11, 304)):  # Slurm hides the others, and numbers these from 0
        (tmp_path / "topology" / str(node)).mkdir(parents=True)
        (tmp_path / "topology" / str(node) / "properties").write_text(f"simd_count {units}\n")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,0")
    first, second = (backend.worker_env(rank, 2, True) for rank in (0, 1))
    assert first["MIOPEN_USER_DB_PATH"] == first["MIOPEN_CUSTOM_CACHE_DIR"]
    assert first["MIOPEN_USER_DB_PATH"].startswith(f"{cache}/")
    assert first["MIOPEN_USER_DB_PATH"].endswith("node11")
    assert second["MIOPEN_USER_DB_PATH"].endswith("node2")
    assert "MIOPEN_DISABLE_CACHE" not in first
    assert not cache.exists()  # it is MIOpen that makes it
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert backend.worker_env(1, 2, True)["MIOPEN_USER_DB_PATH"].endswith("GPU-b")
    own = create_backend({"_target_": "rocm", "name": "rocm", "env": {"MIOPEN_USER_DB_PATH": "/mine"}})
    assert own.worker_env(0, 2, True)["MIOPEN_USER_DB_PATH"] == "/mine"
    monkeypatch.setattr("os.access", lambda path, _mode: str(path) == str(tmp_path / "scratch"))
    monkeypatch.setenv("EXP_SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    assert backend.worker_env(0, 2, True)["MIOPEN_USER_DB_PATH"].startswith(f"{tmp_path}/scratch/exp")
    monkeypatch.delenv("EXP_SCRATCH")
    assert backend.worker_env(0, 2, True)["MIOPEN_DISABLE_CACHE"] == "1"


FOREIGN_TORCH = """
import os, types
cuda = types.SimpleNamespace(device_count=lambda: len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")))
with open(os.environ["LOADS"], "a") as loads:
    loads.write(os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"])
print("loaded")
"""


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("cuda", {"version": "2.6.0+metax2.33", "cuda": "11.6", "hip": None}),
        ("rocm", {"version": "2.5.1+das.opt1.dtk2504", "cuda": None, "hip": "6.3"}),
    ],
)
def test_cards_of_others_are_counted_by_their_torch_in_a_process_of_its_own(monkeypatch, tmp_path, name, build):
    (tmp_path / "torch.py").write_text(FOREIGN_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LOADS", str(tmp_path / "loads"))
    monkeypatch.setattr(_probe, "torch_build", lambda: build)
    monkeypatch.setattr(_probe, "nvml_device_count", lambda: 0)
    for module, folder in ((cuda, "_PROC"), (rocm, "_TOPOLOGY")):
        monkeypatch.setattr(module, folder, tmp_path / "none")
    for variable in ("ROCR", "HIP", "CUDA"):
        monkeypatch.delenv(f"{variable}_VISIBLE_DEVICES", raising=False)
    _probe.count_by_torch.cache_clear()
    backend = create_backend({"_target_": name, "name": name})
    assert (backend.why_unavailable(), backend.device_count()) == (None, 4)
    assert (tmp_path / "loads").read_text() == "0"  # once, and without plug-ins
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert backend.device_count() == 2
    (tmp_path / "torch.py").write_text("raise OSError('libmcruntime.so: cannot open shared object file')")
    _probe.count_by_torch.cache_clear()
    assert "libmcruntime.so" in backend.why_unavailable()
    (tmp_path / "loads").unlink()
    monkeypatch.setattr(_probe, "torch_build", lambda: {**build, "version": "2.6.0+cu124"})
    assert backend.why_unavailable() is not None  # PyTorch's own builds are not asked
    assert not (tmp_path / "loads").exists()


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm", "gcu"])
def test_workers_of_every_backend_get_their_share_of_the_cores_and_no_plug_in(monkeypatch, name):
    monkeypatch.setattr("exp.backend.usable_cores", lambda: 21)
    backend = create_backend({"_target_": name, "name": name})
    environment = backend.worker_env(3, 8, True)
    assert (environment["OMP_NUM_THREADS"], environment["TORCH_DEVICE_BACKEND_AUTOLOAD"]) == ("2", "0")
    assert backend.worker_env(0, 32, True)["OMP_NUM_THREADS"] == "1"
    own = create_backend({"_target_": name, "name": name, "env": {"OMP_NUM_THREADS": "7"}})
    assert own.worker_env(0, 8, True)["OMP_NUM_THREADS"] == "7"
