"""Which cards are there, asked without torch; and the environment that workers are given on them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from exp.backends import _probe, cuda, rocm

from exp.errors import ConfigError, UnavailableError
from exp.hardware.registry import choose_available
from tests.backends import made
from tests.conftest import clean_environment


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without cards and variables that hide them; what it gives sets the build of its torch."""

    def build(version: str, cuda: str | None = None, hip: str | None = None) -> None:
        monkeypatch.setattr(_probe, "torch_build", lambda: {"version": version, "cuda": cuda, "hip": hip})

    for family in ("ROCR", "HIP", "CUDA"):
        monkeypatch.delenv(f"{family}_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda, "_PROC", tmp_path / "gpus")
    monkeypatch.setattr(rocm, "_TOPOLOGY", tmp_path / "topology")
    _probe.cards_by_library.cache_clear()
    yield build
    _probe.cards_by_library.cache_clear()


@pytest.mark.parametrize(
    ("value", "total", "visible"),
    [
        (None, 8, 8),
        ("", 8, 0),
        (" 0, 1,9,2", 8, 2),
        ("0,-1,1", 8, 1),
        ("0,1,0", 8, 0),
        ("GPU-1a,GPU-2b", 8, 2),
        ("MIG-1a,MIG-2b", 1, 1),
    ],
)
def test_visible_device_variables_are_read_as_the_drivers_read_them(monkeypatch, value, total, visible):
    monkeypatch.delenv("SOME_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_VISIBLE_DEVICES", value)
    assert _probe.count_visible(total, "SOME_VISIBLE_DEVICES") == visible


def test_every_backend_answers_without_torch():
    script = (
        "import sys\nfrom exp.backends import _probe\nfrom exp.hardware.registry import create_backend, installed\n"
        "for name in installed():\n"
        "    backend = create_backend({'_target_': name, 'name': name})\n"
        "    backend.unavailable_reason(), backend.worker_env(0, 2, True)\n"
        "build = _probe.torch_build()\nassert 'torch' not in sys.modules\nimport torch\n"
        "assert (build['version'], build['cuda']) == (torch.__version__, torch.version.cuda)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=clean_environment())


def test_auto_takes_the_first_that_is_available_and_warns_of_one_that_does_not_exist(capsys):
    assert choose_available(["cuad", "gcu", "rocm", "cpu"]) == "cpu"
    assert "cuad" in capsys.readouterr().err
    with pytest.raises(UnavailableError, match=r"\n  gcu: .*\n  rocm: "):
        choose_available(["gcu", "rocm"])


def test_a_target_that_is_not_there_or_does_not_load_is_named_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unlinked.py").write_text("raise OSError('libacme.so')")
    (tmp_path / "garbled.py").write_text("no python")
    with pytest.raises(UnavailableError, match=r"unlinked .*libacme.so"):
        made("unlinked.Backend")
    with pytest.raises(UnavailableError, match=r"garbled .*Syntax"):
        made("garbled.Backend")
    with pytest.raises(ConfigError, match="nonesuch"):
        made("nonesuch")
    with pytest.raises(ConfigError, match="simulate=true"):
        made("cpu", simulate=True)


def nvml(answer: int) -> SimpleNamespace:
    """Stands in for NVIDIA's library; ``answer`` is that of its first function, 0 where the driver is loaded."""

    def count(number) -> int:
        number._obj.value = 4
        return 0

    return SimpleNamespace(nvmlInit_v2=lambda: answer, nvmlDeviceGetCount_v2=count)


@pytest.mark.parametrize(
    ("load", "cards"),
    [
        (lambda name: nvml(0), 4),
        (lambda name: nvml(9), 1),
        (lambda name: Path("/nowhere").stat(), 1),  # no library: an OSError
    ],
)
def test_cuda_cards_are_counted_by_the_management_library_else_in_proc(machine, monkeypatch, tmp_path, load, cards):
    machine("2.5.0", cuda="12.4")
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(cuda.CudaBackend, "_driver", tmp_path / "version")
    (tmp_path / "gpus" / "0000:3b:00.0").mkdir(parents=True)
    backend = made("cuda")
    assert (backend.unavailable_reason(), backend.device_count(), backend.driver_version()) == (None, cards, None)
    (tmp_path / "version").write_text("550.54.15\n")
    assert backend.driver_version() == "550.54.15"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in backend.unavailable_reason()


@pytest.fixture
def topology(machine, tmp_path):
    """Writes the kernel driver's list of nodes, given as SIMD units by number; a processor's has none."""

    def write(nodes: dict[int, int]) -> None:
        for node, units in nodes.items():
            (tmp_path / "topology" / str(node)).mkdir(parents=True)
            properties = f"cpu_cores_count 8\nsimd_count {units}\n\n"
            (tmp_path / "topology" / str(node) / "properties").write_text(properties)

    machine("2.5.0", hip="6.2")
    return write


def test_rocm_cards_are_counted_in_the_kernels_topology(topology, monkeypatch):
    backend = made("rocm")
    assert backend.unavailable_reason() is not None
    topology({0: 0, 1: 304, 2: 304, 3: 304})
    assert (backend.unavailable_reason(), backend.device_count()) == (None, 3)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,2")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")  # of the two that are left
    assert backend.device_count() == 1
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")
    assert "HIP_VISIBLE_DEVICES" in backend.unavailable_reason()


def test_each_rocm_card_has_a_kernel_cache_of_its_own(topology, monkeypatch, tmp_path):
    def cache(rank: int) -> str | None:
        return made("rocm").worker_env(rank, 2, True).get("MIOPEN_USER_DB_PATH")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    topology({0: 0, 2: 304, 3: 304, 11: 304})  # Slurm hides the others, and numbers these from 0
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,0")
    assert cache(0).startswith(f"{tmp_path}/home/")
    assert [Path(cache(rank)).name for rank in (0, 1)] == ["node11", "node2"]
    assert not (tmp_path / "home").exists()  # it is MIOpen that makes it
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert Path(cache(1)).name == "GPU-b"
    monkeypatch.setattr("os.access", lambda _path, _mode: False)  # the home cannot be written
    assert cache(0) is None


FOREIGN_TORCH = """
import os, types
cuda = types.SimpleNamespace(device_count=lambda: len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")))
with open(os.environ["LOADS"], "a") as loads:
    loads.write(os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"])
"""


def test_cards_of_others_are_counted_once_by_their_torch(machine, monkeypatch, tmp_path):
    """In a process of its own, without plug-ins; PyTorch's own builds are not asked."""
    (tmp_path / "torch.py").write_text(FOREIGN_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LOADS", str(tmp_path / "loads"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Path("/nowhere").stat())  # no library
    _probe.ask_torch.cache_clear()
    machine("2.6.0+cu124", cuda="12.4")
    assert made("cuda").unavailable_reason() is not None
    assert not (tmp_path / "loads").exists()
    for name, built in (("cuda", ("2.6.0+metax2.33", "11.6", None)), ("rocm", ("2.5.1+das.opt1.dtk2504", None, "6.3"))):
        machine(*built)
        assert (made(name).unavailable_reason(), made(name).device_count()) == (None, 4)
    assert (tmp_path / "loads").read_text() == "00"
    (tmp_path / "torch.py").write_text("raise OSError('libmcruntime.so: cannot open shared object file')")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # asks again
    assert "libmcruntime.so" in made("rocm").unavailable_reason()


@pytest.mark.parametrize(
    ("configured", "shell", "threads"),
    [({"OMP_NUM_THREADS": "7"}, None, "7"), ({"OMP_NUM_THREADS": "7"}, "5", "5"), ({"MKL_NUM_THREADS": "3"}, "5", "3")],
)
def test_mkl_gets_as_many_threads_as_openmp(monkeypatch, configured, shell, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if shell:
        monkeypatch.setenv("OMP_NUM_THREADS", shell)
    assert made("cpu", env=configured).worker_env(0, 1, True)["MKL_NUM_THREADS"] == threads
