"""Configurations and run folders of strangers run no code, and what a run records gives no secret away."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import exp as api
from tests.behaviour.conftest import FORECAST, TILES, one_by_one, result
from tests.conftest import clean_environment

EVIL = """
open("executed", "w").close()
class Evil:
    keys = None
    def __init__(self, *_, **__):
        open("executed", "w").close()
"""


class Payload:
    def __reduce__(self):
        return open, ("executed", "w")


PICKLED = base64.b64encode(pickle.dumps(Payload())).decode()


@pytest.fixture
def refused(exp):
    """Runs a command that is to be refused before any code of the stranger's runs; gives the first line of why."""
    (exp.folder / "evil.py").write_text(EVIL)

    def run(*arguments: str, says: str, code: int = 2) -> str:
        done = exp(*arguments)
        first = done.stderr.splitlines()[0]
        assert done.returncode == code, done.stdout + done.stderr
        assert first.startswith("error: ")
        assert says in first, first
        assert "Traceback" not in done.stderr
        assert not exp.path("executed").exists()
        return first

    return run


@pytest.fixture
def stranger(trained, exp):
    """A run folder whose configuration a stranger has changed: ``stranger("metrics: []", "metrics: [...]")``."""

    def make(old: str, new: str, name: str = "run") -> str:
        folder = exp.folder / name
        shutil.rmtree(str(folder), ignore_errors=True)
        shutil.copytree(trained("forecast"), folder)
        text = (folder / "config.yaml").read_text()
        assert text.count(old) == 1, text
        (folder / "config.yaml").write_text(text.replace(old, new))
        return f"init_from={name}"

    return make


MODEL = "_target_: exp.forecasting.timebridge.model.TimeBridge\n"
DATA = "_target_: exp.forecasting.data.dataset.ForecastingData\n"
LAUNCHER = "launcher:\n  _target_: auto\n"


METRICS = [
    (f"{{_target_: exp.config.text._block, pickled: !!binary {PICKLED}}}", "metrics[0]._target_"),
    ("{_target_: exp.cli.os.system, command: touch executed}", "metrics[0]._target_"),
    ("{_target_: exp.forecasting.metrics.ForecastMetrics, _args_: [{_target_: os.system}]}", "metrics[0]"),
]
FUNCTION = "exp.config.command_line.nearest"
KEYS = [
    (f"hooks=[{{type: {FUNCTION}}}]", "hooks[0].type"),
    (f"hooks=[{{type: EMAHook, ema_type: {FUNCTION}}}]", "hooks[0].ema_type"),
    ("hooks=[{type: ProfilerHook, on_trace_ready: {type: tb_trace, dir_name: /tmp}}]", "hooks[0].on_trace_ready"),
    (f"optim.type={FUNCTION}", "optim.type"),
    (f"schedule.param_scheduler=[{{type: {FUNCTION}}}]", "schedule"),
    *(
        (f"{part}._target_={FUNCTION}", f"{part}._target_")
        for part in ("model", "task", "backend", "launcher", "wrapper")
    ),
    (f"+logger.trackers.x={{_target_: {FUNCTION}}}", "logger.trackers.x._target_"),
    (f"metrics=[{{_target_: {FUNCTION}, _partial_: true}}]", "metrics[0]._target_"),
]
TRANSFORMS = [
    (f"{{type: {FUNCTION}}}", "pipeline[0].type"),
    (f"{{type: RandomChoice, transforms: [[{{type: {FUNCTION}}}]]}}", "transforms[0][0].type"),
    ("{type: RandomFlip, _scope_: evil}", "_scope_"),
]


def test_a_class_has_the_interface_of_its_key_also_in_a_strangers_run(exp, stranger):
    runs = [stranger("metrics: []\n", f"metrics: [{METRICS[n][0]}]\n", f"run{n}") for n in range(len(METRICS))]
    rows = [(["task=eval", run, "backend=cpu"], key) for run, (_, key) in zip(runs, METRICS)]
    rows += [([*FORECAST, "nproc=2", override], key) for override, key in KEYS]
    rows += [([*TILES, f"data.eval_pipeline=[{transform}]"], key) for transform, key in TRANSFORMS]
    before = sorted(exp.folder.iterdir())
    for (line, key), (code, said, _) in zip(rows, one_by_one(exp.folder, [line for line, _ in rows])):
        first = (said.splitlines() or [""])[0]
        assert (code, first[:7], key in first, "Traceback" in said) == (2, "error: ", True, False), (line, said)
    assert sorted(exp.folder.iterdir()) == before  # nothing was executed, and no run begun


def test_modules_of_the_current_folder_are_no_strangers_to_name(stranger, refused, exp):
    """The folder may have come with the run; the user names what he trusts, by ``plugins`` or in files of his own."""
    ways = [
        (MODEL, "_target_: evil.Evil\n", "model._target_=evil.Evil", ["task=predict"]),
        (DATA, "_target_: evil.Evil\n", "data._target_=evil.Evil", ["task=eval"]),
        (MODEL, f"{MODEL}  extra: {{_target_: evil.Evil}}\n", "model.extra", ["task=eval"]),
    ]
    for old, new, key, arguments in ways:
        refused(*arguments, stranger(old, new), "backend=cpu", says=key)
    # A folder is opened, compared, gone on with and reported, whatever it names.
    shown = stranger(LAUNCHER, "launcher:\n  _target_: evil.Evil\n").partition("=")[2]
    assert exp("task=report", f"run={shown}").returncode == 0
    assert exp(*FORECAST, "resume=run", "max_steps=5", "output_dir=further").returncode == 0
    sweep = exp("-m", *FORECAST, "seed=2023", "sweep.resume=true", "output_dir=.")
    assert sweep.returncode == 0, sweep.stderr
    stranger("task:\n  _target_: exp.tasks.train.Train\n", "task:\n  _target_: evil.Evil\n")
    exp.path("run/logs/job.json").write_text(json.dumps({"job": "1", "cluster": "", "logs": "logs"}))
    refused("task=attach", "run=run", says="task._target_")
    assert not exp.path("executed").exists()


def test_opening_a_strangers_run_in_python_imports_nothing(stranger, exp, monkeypatch):
    monkeypatch.syspath_prepend(str(exp.folder))
    monkeypatch.chdir(exp.folder)
    (exp.folder / "evil_twin.py").write_text(EVIL)
    stranger(MODEL, "_target_: evil_twin.Evil\n")
    text = Path("run/config.yaml").read_text().replace("plugins: []\n", "plugins: [evil_twin]\n")
    Path("run/config.yaml").write_text(text)
    run = api.open_run("run")
    assert run.config.seed == 2023
    with pytest.raises(Exception, match=r"model\._target_"):
        run.model()
    assert not exp.path("executed").exists()


@pytest.mark.parametrize(("command", "umask"), [("-m", 0), pytest.param("exp", 0o077, marks=pytest.mark.extended)])
def test_the_current_folder_gives_what_is_named_and_others_of_the_group_may_read_the_run(tmp_path, command, umask):
    """And it stands in for nothing."""
    for name in ("mmengine", "pandas", "typing", "sqlite3", "rasterio", "random"):
        (tmp_path / f"{name}.py").write_text(EVIL)
    (tmp_path / "neighbour.py").write_text("from exp.forecasting.timebridge.model import TimeBridge\n")
    (tmp_path / "mine.py").write_text("import neighbour\nclass Mine(neighbour.TimeBridge):\n    pass\n")
    start = [sys.executable, "-m", "exp"] if command == "-m" else [str(Path(sys.executable).with_name("exp"))]
    settings = [*FORECAST, "model._target_=mine.Mine", "nproc=2", "output_dir=run"]
    done = subprocess.run(
        [*start, *settings],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.umask(umask),
    )
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["status"] == "completed"
    modes = {path: path.stat().st_mode & 0o777 for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]}
    assert {path: oct(mode) for path, mode in modes.items() if mode != (0o750 if path.is_dir() else 0o640)} == {}
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "override",
    [
        "backend.env={https_proxy: 'http://me:PASSWORD@host:80'}",
        pytest.param("init_from=hf:owner/name", marks=pytest.mark.extended),
    ],
)
def test_passwords_in_addresses_are_not_recorded(exp, override):
    done = exp(*FORECAST, override, "output_dir=run", HF_ENDPOINT="http://me:PASSWORD@127.0.0.1:9")
    assert done.returncode in (2, 3), done.stderr
    assert "PASSWORD" not in done.stdout + done.stderr
    assert not exp.path("run").exists()


def _pickle(path: Path) -> None:
    torch.save({"state_dict": Payload()}, str(path))


def _script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))


def _tar(path: Path) -> None:
    """The oldest form of torch's, which is unpacked wherever its names lead."""
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle", "../../executed"):
            archive.addfile(tarfile.TarInfo(name))


@pytest.mark.legacy
@pytest.mark.parametrize(
    ("write", "code"),
    [(_pickle, 1), *(pytest.param(*each, marks=pytest.mark.extended) for each in ((_script, 1), (_tar, 2)))],
)
def test_weights_are_plain_data(refused, exp, write, code):
    write(exp.path("weights.pth"))
    refused(*FORECAST, "init_from=weights.pth", says="weights.pth", code=code)
