from __future__ import annotations

import subprocess
import sys

import pytest
from exp.backends import _probe

from exp.backends_registry import choose, create_backend, installed
from exp.errors import ConfigError, UnavailableError
from tests.conftest import clean_environment


@pytest.mark.parametrize(
    ("value", "total", "visible"),
    [(None, 8, 8), ("", 8, 0), ("-1", 8, 0), ("0,1", 8, 2), ("0,9,1", 8, 1), ("GPU-1a,GPU-2b", 8, 2), ("0,1,2", 2, 2)],
)
def test_visible_device_variables_are_read_as_the_drivers_read_them(monkeypatch, value, total, visible):
    monkeypatch.delenv("SOME_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_VISIBLE_DEVICES", value)
    assert _probe.count_visible(total, "SOME_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("build", "name", "words"),
    [
        ({"version": "2.5.0", "cuda": None, "hip": "6.1"}, "cuda", "use backend=rocm"),
        ({"version": "2.5.0", "cuda": "12.4", "hip": None}, "rocm", "use backend=cuda"),
        ({"version": "2.5.0+cpu", "cuda": None, "hip": None}, "cuda", "built without CUDA"),
        ({"version": "2.5.0+cpu", "cuda": None, "hip": None}, "rocm", "built without ROCm"),
    ],
)
def test_a_wrong_build_of_torch_is_told_from_a_missing_card(monkeypatch, build, name, words):
    monkeypatch.setattr(_probe, "torch_build", lambda: build)
    reason = create_backend({"_target_": name, "name": name}).why_unavailable()
    assert reason is not None
    assert words in reason


def test_torchs_build_is_read_without_importing_it():
    script = (
        "import sys\nfrom exp.backends import _probe\nbuild = _probe.torch_build()\nassert 'torch' not in sys.modules\n"
        "import torch\nassert build['version'] == torch.__version__\nassert build['cuda'] == torch.version.cuda\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=clean_environment())


def test_every_backend_answers_without_torch():
    script = (
        "import sys\nfrom exp.backends_registry import create_backend, installed\n"
        "for name in installed():\n"
        "    backend = create_backend({'_target_': name, 'name': name})\n"
        "    backend.why_unavailable(), backend.worker_env(0, 2, True)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=clean_environment())


def test_the_built_in_backends_are_installed():
    assert {"cpu", "cuda", "gcu", "rocm"} <= set(installed())


def test_auto_takes_the_first_that_is_available():
    assert choose(["gcu", "rocm", "cpu"]) == "cpu"
    with pytest.raises(UnavailableError, match="found no device"):
        choose(["gcu", "rocm"])


@pytest.mark.parametrize("target", ["nonesuch", "nonesuch.module.Class", "exp.backends.cpu.Nonesuch", "os.path.join"])
def test_a_wrong_target_is_named(target):
    with pytest.raises(ConfigError, match=target):
        create_backend({"_target_": target, "name": "x"})


def test_rocm_carries_its_environment_and_the_users_exports_win(exp):
    shown = exp("--cfg", "job", "backend=rocm").stdout
    assert "MIOPEN_DISABLE_CACHE: '1'" in shown
    assert "MIOPEN_SYSTEM_DB_PATH: ''" in shown
