"""The record of a run is changed by a run that has started, not by one that was refused."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.conftest import TINY, read_strictly, run_exp
from tests.test_refused import everything

pytestmark = pytest.mark.slow  # nothing here depends on the version of torch

MODEL = """
import os, shutil, signal
from exp.forecasting.timebridge import TimeBridge


class Model(TimeBridge):
    '''Does in its first steps what the environment says.'''

    steps = 0

    def losses(self, *batch):
        what = os.environ.get('WHAT')
        self.steps += 1
        if what == 'fail':
            raise RuntimeError('the card fell off the bus')
        if what == 'killed':
            os.kill(os.getpid(), signal.SIGKILL)
        if what == 'deleted' and self.steps == 3:
            shutil.rmtree('gone', ignore_errors=True)
        return super().losses(*batch)
"""
OURS = [*TINY, "model._target_=late.Model"]
RECORD = ("config.yaml", "overrides.yaml", "result.json", "env.json", "metrics.jsonl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a completed training in ``run``, and models that fail."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "late.py").write_text(MODEL)
    done = run_exp(folder, *OURS, "output_dir=run", "checkpoint.every_steps=2")
    assert done.returncode == 0, done.stderr
    return folder


def record(run) -> dict:
    return {name: (run / name).read_bytes() for name in RECORD}


@pytest.mark.parametrize(
    ("arguments", "what", "code"),
    [
        (["resume=auto", "model.d_model=32"], "", 2),
        (["resume=auto", "max_steps=8", "nproc=2"], "fail", 1),
        (["overwrite=true"], "killed", -9),
        ([], "", 2),
        (["launcher=torchrun", "launcher.nnodes=2", "launcher.rdzv_endpoint=127.0.0.1:29871"], "", 2),
        (["task=env"], "", 2),
        (["overwrite=true", "resume=auto"], "", 2),
    ],
)  # fmt: skip
def test_a_run_that_has_not_started_leaves_the_record_of_the_one_before(trained, arguments, what, code):
    before, names = record(trained / "run"), everything(trained / "run").keys()
    done = run_exp(trained, *OURS, "output_dir=run", *arguments, WHAT=what)
    assert done.returncode == code, done.stdout + done.stderr
    assert record(trained / "run") == before
    checkpoints = {path.name for path in (trained / "run" / "checkpoints").glob("step_*")}
    assert checkpoints == {"step_00000002.pth", "step_00000004.pth"}
    if code == 2:
        assert done.stderr.startswith("error: ")
        assert everything(trained / "run").keys() == names


def test_a_run_that_starts_takes_the_place_of_the_one_before(trained):
    shutil.copytree(trained / "run", trained / "again")
    (trained / "again" / "notes.txt").write_text("mine")
    done = run_exp(trained, *OURS, "output_dir=again", "resume=auto", "max_steps=6", "checkpoint.every_steps=2")
    assert done.returncode == 0, done.stderr
    assert "max_steps: 6" in (trained / "again" / "config.yaml").read_text()
    assert read_strictly((trained / "again" / "result.json").read_text())["steps"] == 6

    done = run_exp(trained, *OURS, "output_dir=again", "overwrite=true", "max_steps=2")
    assert done.returncode == 0, done.stderr
    result = read_strictly((trained / "again" / "result.json").read_text())
    assert (result["steps"], result["resumed_from"]) == (2, None)
    steps = [json.loads(line)["step"] for line in (trained / "again" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2
    left = {path.name for path in (trained / "again" / "checkpoints").iterdir()}
    assert left == {"step_00000002.pth", "best.pth"}
    assert {path.name for path in (trained / "again").iterdir() if path.name[0] == "."} == set()
    assert (trained / "again" / "notes.txt").read_text() == "mine"


def test_a_run_whose_folder_is_deleted_says_so(trained):
    done = run_exp(trained, *OURS, "output_dir=gone", "nproc=2", WHAT="deleted")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gone was deleted or moved" in done.stderr.splitlines()[0], done.stderr
