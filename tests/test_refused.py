"""Exit codes 2 and 3: whoever finds out, and whenever, the folder is as it was."""

from __future__ import annotations

import json
import socket

import pytest

from tests.conftest import TINY

pytestmark = pytest.mark.slow  # nothing here depends on the version of torch


def everything(folder) -> dict:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def taken_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optim.type=Nope"], ["optim.type=Nope is not known"]),
        (["data.lookback=100"], ["not a multiple of period=24"]),
        (["data.horizon=5000"], ["data.horizon=5000"]),
        (["init_from=empty"], ["init_from=", "empty holds no checkpoint"]),
        (["resume=empty"], ["resume=", "empty is neither"]),
        (["optim.options.nonesuch=1"], ["optim"]),
        (["task=parity", "backend=cpu", "reference=cpu", "optim.type=Nope"], ["optim.type=Nope is not known"]),
        (["launcher=torchrun", "launcher.rdzv_endpoint=127.0.0.1:{port}"], ["port {port} is taken"]),
        (["launcher=submitit", "launcher.cluster=local", "launcher.poll_s=0.2", "optim.type=Nope"], ["is not known"]),
        (["output_dir=empty/deep/er", "optim.type=Nope"], ["is not known"]),
        (["output_dir=empty", "optim.type=Nope"], ["is not known"]),
        (["precision=fp8"], ["precision=fp8"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_refused_run_leaves_no_folder(exp, taken_port, arguments, words):
    exp.path("empty").mkdir()
    filled = [text.replace("{port}", str(taken_port)) for text in arguments]
    done = exp(*TINY, *filled)
    assert done.returncode == 2, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("error: ")
    assert all(word.replace("{port}", str(taken_port)) in first for word in words), first
    assert "log:" not in done.stderr, "what it names is gone"
    assert everything(exp.folder) == {"empty": None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experiment=dinov3_dubai", "task=predict", "task.intervals=[0.8]"], ["task.intervals=[0.8] is for forecast"]),
        (["task=predict", "task.max_images=3"], ["task.max_images=3 is for", "the data are for forecasting"]),
    ],
)
def test_what_is_for_another_family_is_not_silently_ignored(exp, arguments, words):
    done = exp(*arguments, "init_from=empty")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["optim.type=Nope", "seed=1,2"],  # by the workers
        ["precision=fp8", "seed=1,2"],
        ["launcher=submitit,local"],
        ["output_dir=other", "seed=1", "sweep.resume=true", "optim.type=Nope"],
    ],
    ids=lambda value: " ".join(value),
)
def test_a_refused_sweep_leaves_no_folder(exp, arguments):
    exp.path("outputs").mkdir()
    done = exp("-m", *TINY, *arguments)
    assert done.returncode == 2, done.stderr
    assert everything(exp.folder) == {"outputs": None}


def test_a_sweep_that_is_refused_as_a_whole_leaves_what_others_have_made(exp):
    exp.path("sweep").mkdir()
    (exp.path("sweep") / "notes.txt").write_text("mine")
    done = exp("-m", *TINY, "optim.type=Nope", "seed=1", "output_dir=sweep")
    assert done.returncode == 2
    assert set(everything(exp.path("sweep"))) - {"sweep.csv", "sweep.json"} == {"notes.txt"}


def test_a_folder_that_holds_a_run_is_as_it_was(exp):
    exp.train("run", "checkpoint.every_steps=2")
    before = everything(exp.path("run"))
    for wrong in (["optim.type=Nope"], ["data.lookback=100"], ["nproc=2", "optim.type=Nope"]):
        done = exp(*TINY, "output_dir=run", "resume=auto", *wrong)
        assert done.returncode == 2, done.stderr
        after = everything(exp.path("run"))
        assert after.keys() == before.keys()
        assert [name for name in before if before[name] != after[name]] == []
    assert exp.result("run")["status"] == "completed"


def test_what_has_been_computed_is_kept(exp):
    """A file that turns out to be unusable after the first steps costs none of them."""
    (exp.folder / "late.py").write_text(
        "from exp.errors import DataError\nfrom exp.forecasting.timebridge import TimeBridge\n\n\n"
        "class Late(TimeBridge):\n    steps = 0\n\n    def losses(self, *batch):\n        self.steps += 1\n"
        "        if self.steps > 3:\n            raise DataError('row 7 of plant.csv: no number')\n"
        "        return super().losses(*batch)\n"
    )
    done = exp(*TINY, "model._target_=late.Late", "output_dir=run", "log_every=1")
    assert done.returncode == 2, done.stderr
    assert "row 7 of plant.csv" in done.stderr.splitlines()[0]
    assert "run folder: run" in done.stderr
    lines = [json.loads(line) for line in (exp.path("run") / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) >= 2
    assert exp.result("run")["error"]["type"] == "DataError"


def test_the_traceback_can_still_be_had(exp):
    done = exp(*TINY, "optim.type=Nope", HYDRA_FULL_ERROR="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "build_optimizer" in done.stderr
    assert everything(exp.folder) == {}


def test_a_module_that_does_not_import_leaves_no_folder(exp):
    (exp.folder / "needs.py").write_text("import nonesuch\n\n\nclass Model: pass\n")
    before = everything(exp.folder)
    done = exp(*TINY, "model._target_=needs.Model")
    assert done.returncode == 3
    assert "No module named 'nonesuch'" in done.stderr.splitlines()[0]
    assert {name for name in everything(exp.folder) if "__pycache__" not in name} == set(before)
