"""Checkpoints are never lost, best weights are those that were judged, and what has diverged is never saved."""

from __future__ import annotations

import json
import shlex

import pytest
import torch

from tests.behaviour.conftest import FORECAST

# A constant that follows the data, or with a loss of its level drifts away from them with every step.
MINE = """
import os
import signal
import time
from pathlib import Path
import torch
from exp.models.base import Model

class Constant(Model):
    calls = 0

    def __init__(self, horizon, channels, begin=0.0, drifts=False, **_):
        super().__init__()
        self.level = torch.nn.Parameter(torch.full((horizon, channels), float(begin)))
        self.drifts = drifts

    def forward(self, x, y=None, mode="tensor", **_):
        if mode != "loss":
            return self.level.expand(x.shape[0], -1, -1)
        self.calls += 1
        if self.calls == int(os.environ.get("STOP_AFTER", 0)):
            guard = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(guard.rpartition(")")[2].split()[1]), signal.SIGUSR2)  # the command
            time.sleep(2.5)  # a notice is looked for once a second
        return {"loss": -self.level.mean() if self.drifts else (self.level - y).square().mean()}
"""
CONSTANT = [*FORECAST, "model._target_=mine.Constant", "checkpoint.keep_last=2", "val_every=100", "sanity_check=false"]
DRIFTS = [*FORECAST, "model._target_=mine.Constant", "+model.drifts=true", "optim=sgd", "optim.lr=100", "val_every=1",
          "max_epochs=2", "schedule=constant", "checkpoint.every_steps=1", "checkpoint.keep_last=10"]  # fmt: skip


@pytest.fixture
def folder(exp):
    (exp.folder / "mine.py").write_text(MINE)
    folder = exp.path("run") / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def steps_in(folder):
    return sorted(int(path.stem[5:]) for path in folder.glob("step_*.pth"))


def load(path):
    return torch.load(str(path), map_location="cpu")


@pytest.mark.extended
def test_what_is_saved_stays_and_what_is_not_continued_goes_to_quarantine(exp, folder):
    done = exp(*CONSTANT, "resume=auto", "max_steps=20", "output_dir=run", STOP_AFTER="8")
    assert done.returncode == 75, done.stderr
    assert steps_in(folder) == [6, 8]
    # Files that are cut short, and that open and hold something else.
    for step in (10, 12):
        (folder / f"step_{step:08d}.pth").write_bytes(b"cut short")
    content = load(folder / "step_00000008.pth")
    torch.save(content["state_dict"], str(folder / "step_00000090.pth"))
    torch.save([1, "two"], str(folder / "step_00000091.pth"))
    done = exp(*CONSTANT, "resume=auto", "max_steps=10", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["resumed_from"].endswith("step_00000008.pth")
    skipped = [line for line in done.stdout.splitlines() if "skipped" in line]
    assert len(skipped) == 4
    assert "step_00000091.pth" in skipped[0]
    assert steps_in(folder) == [8, 10]
    # Back to an older one; and one of something else, asked for by name.
    done = exp(*CONSTANT, "resume=run/checkpoints/step_00000008.pth", "max_steps=9", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert steps_in(folder) == [8, 9]
    assert steps_in(folder / "quarantine") == [10, 12, 90, 91]
    bare = folder / "quarantine" / "step_00000090.pth"
    done = exp(*CONSTANT, f"resume={bare}", "output_dir=other")
    assert done.returncode == 2
    assert f"init_from={bare}" in done.stderr.splitlines()[0]
    assert not exp.path("other").exists()


@pytest.mark.extended
def test_weights_that_are_not_finite_are_never_saved_and_the_advice_goes_on_from_sound_ones(exp, folder):
    """Of gradient descent on a parabola: at this rate the error doubles with every step, at a quarter it halves."""
    settings = ["optim=sgd", "optim.options.momentum=0", "+model.begin=1e12", "max_steps=60", "log_every=1000"]
    done = exp(*CONSTANT, *settings, "optim.lr=1000", "nproc=2", "output_dir=run")
    assert done.returncode == 1, done.stdout
    newest = max(folder.glob("step_*.pth"))
    assert torch.isfinite(load(newest)["state_dict"]["level"]).all()
    assert not (folder / "best.pth").exists()
    # Of an older version, which did save such weights, and no digest.
    spoilt = load(newest)
    spoilt["state_dict"]["level"][0, 0] = float("nan")
    torch.save(spoilt, str(folder / "step_00000058.pth"))
    # Copied as it stands (but for one process, which is quicker), the advice goes on from sound weights. At the next
    # step their loss is not finite: then the advice is to go back further.
    done = exp(*advised(done), "nproc=1")
    assert done.returncode == 1, done.stdout
    assert "step_00000058.pth" in done.stdout
    assert f"resume: from {newest}" in done.stdout
    done = exp(*advised(done))
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["steps"] == 60
    assert exp.result("run")["changed_on_resume"]["optim.lr"] == {"old": 1000, "new": 250}


def advised(done):
    """The words of the command that the second line of an error advises."""
    words = shlex.split(done.stderr.splitlines()[1].split(": ", 1)[1])
    return words[words.index("backend=cpu") :]


@pytest.mark.extended
def test_the_best_weights_come_with_a_resumed_run_or_no_longer_count(exp, folder):
    """The first step is the best one, and each further one worse."""

    def train(name, *arguments):
        done = exp(*DRIFTS, *arguments, f"output_dir={name}")
        assert done.returncode == 0, done.stderr
        return exp.result(name)

    def validation(name, step):
        records = [json.loads(line) for line in (exp.path(name) / "metrics.jsonl").read_text().splitlines()]
        return next(each["mse"] for each in records if (each["split"], each["step"]) == ("val", step))

    first = train("first", "max_steps=2")
    assert (first["tested_checkpoint"], first["tested_step"]) == ("checkpoints/best.pth", 1)
    second = train("second", "max_steps=4", "resume=first", "nproc=2")
    assert (second["tested_step"], second["validation"]) == (1, first["validation"])
    assert second["metric"] == pytest.approx(first["metric"], rel=1e-6)
    assert load(exp.path("second") / "checkpoints" / "best.pth")["meta"]["step"] == 1
    # Those of another attempt, as after a crash between two files of one step, and those that are lost.
    best = exp.path("first") / "checkpoints" / "best.pth"
    other = load(exp.path("first") / "checkpoints" / "step_00000002.pth")
    torch.save({key: other[key] for key in ("meta", "state_dict")}, str(best))
    further = ["max_steps=3", "resume=first/checkpoints/step_00000001.pth"]
    assert train("third", *further, "checkpoint.trusted=true")["tested_step"] == 2
    best.unlink()
    again = train("first", "max_steps=2", "resume=auto")  # nothing is left to train
    assert (again["tested_step"], again["validation"]) == (2, {"mse": validation("first", 2)})
    last = train("last", "max_steps=3", "checkpoint.keep_best=false")
    assert (last["tested_checkpoint"], last["validation"]) == ("last weights, step 3", {"mse": validation("last", 3)})
    assert not (exp.path("last") / "checkpoints" / "best.pth").exists()
