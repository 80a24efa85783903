from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from exp.config.targets import check_target
from exp.errors import ConfigError, UnavailableError
from tests.conftest import TINY, clean_environment

MODEL = """
from exp.forecasting.timebridge import TimeBridge


class Mine(TimeBridge):
    pass
"""
EXP = [str(Path(sys.executable).with_name("exp"))]
M_EXP = [sys.executable, "-m", "exp"]


@pytest.mark.parametrize(
    "target",
    [
        "exp.vision.dinov3.Segmenter",  # comes through __init__
        "exp.forecasting.timebridge.TimeBridge",
        "exp.forecasting.data.dataset.ForecastingData",
        "exp.backends.cpu.CpuBackend",  # lies in another folder
        "torch.nn.Linear",  # by import *
        "mmengine.model.BaseModel",
        "math.sqrt",  # no source
        "os.path.join",  # not where it seems to lie
        "collections.OrderedDict.fromkeys",
        "pandas.DataFrame.from_dict",
    ],
)
def test_what_is_there_is_never_refused(target):
    check_target("model._target_", target)


SOURCES = {
    "made": "globals()['Made'] = int\n",
    "lazy": "def __getattr__(name):\n    return int\n",
    "tried": "try:\n    from nonesuch import Made\nexcept ImportError:\n    Made = int\n",
    "assigned": "if True:\n    Other, (Made, *rest) = int, [float, 1]\n",
    "function": "def fill():\n    global Made\n    Made = int\nfill()\n",
    "package/__init__": "from package.inner import Made as Made\n",
    "package/inner": "class Made: pass\n",
    "space/inner": "class Made: pass\n",
}


@pytest.mark.parametrize(
    "name", ["made", "lazy", "tried", "assigned", "function", "package", "package.inner", "space.inner"]
)
def test_names_are_found_however_they_come_about(tmp_path, monkeypatch, name):
    for file, text in SOURCES.items():
        path = tmp_path / f"{file}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_target("model._target_", f"{name}.Made")
    if name in ("tried", "package.inner", "space.inner"):
        with pytest.raises(ConfigError, match="did you mean 'Made'"):
            check_target("model._target_", f"{name}.Maid")


def test_a_module_that_is_no_python_is_told_as_such(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("class Model(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnavailableError, match=r"broken does not import \(SyntaxError"):
        check_target("model._target_", "broken.Model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("model._target_=nonesuch.Model", 2, ["there is no module nonesuch", "PYTHONPATH"]),
        ("model._target_=exp.forecasting.timebrige.TimeBridge", 2, ["no module exp.forecasting.timeb", "'timebridge'"]),
        ("model._target_=exp.forecasting.timebridge.TimeBrige", 2, ["has no TimeBrige", "did you mean 'TimeBridge'"]),
        ("model._target_=exp.forecasting.timebridge", 2, ["is a module"]),
        ("model._target_=TimeBridge", 2, ["no path of a class"]),
        ("data._target_=exp.forecasting.data.dataset.Forecasting", 2, ["has no Forecasting", "'ForecastingData'"]),
        ("data._target_=nonesuch.sets.Data", 2, ["there is no module nonesuch"]),
        ("launcher._target_=exp.launcher.local.LocalLauncer", 2, ["has no LocalLauncer", "'LocalLauncher'"]),
        ("launcher._target_=nonesuch.Launcher", 2, ["there is no module nonesuch"]),
        ("launcher._target_=exp.launcher.local.Outcome", 2, ["no subclass of exp.launcher.Launcher"]),
        ("model._target_=lacks_a_package.Model", 3, ["lacks_a_package does not import", "No module named 'nonesuch'"]),
    ],
)
def test_a_wrong_target_is_one_clear_line_and_leaves_no_folder(exp, override, code, words):
    (exp.folder / "lacks_a_package.py").write_text("import nonesuch\n\n\nclass Model: pass\n")
    done = exp(*TINY, override)
    first = done.stderr.splitlines()[0]
    assert done.returncode == code, done.stderr
    assert first.startswith("error: ")
    assert override in first
    assert all(word in first for word in words), first
    assert "HYDRA_FULL_ERROR" not in done.stderr
    assert not exp.path("outputs").exists()


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False, timeout=280
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [["nproc=2"], ["-m", "seed=1"]],
)
def test_the_command_finds_modules_of_the_current_folder(tmp_path, settings):
    (tmp_path / "mine.py").write_text(MODEL)
    done = start([*EXP, *settings, *TINY, "model._target_=mine.Mine", "output_dir=run"], tmp_path)
    assert done.returncode == 0, done.stderr
    forked = start([*EXP, *TINY, "model._target_=mine.Nine", "output_dir=other"], tmp_path)
    assert "mine has no Nine; did you mean 'Mine'?" in forked.stderr


def test_it_tells_its_own_version(tmp_path):
    from exp import __version__

    for command in (EXP, M_EXP):
        done = start([*command, "--version"], tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"exp {__version__}\n", "")
    assert not list(tmp_path.iterdir())
