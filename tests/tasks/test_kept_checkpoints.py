"""Checkpoints are never lost: what an attempt has written or read stays, what it does not continue is set aside."""

from __future__ import annotations

import json
import shlex

import pytest
import torch

from exp.engine import checkpoint
from tests.conftest import TINY

# Trains a constant; in the process that is to be told to end, it does that itself.
MINE = """
import os
import signal
import torch
from exp.models.base import Model

class Constant(Model):
    calls = 0

    def __init__(self, horizon, channels, begin=0.0, **_):
        super().__init__()
        self.level = torch.nn.Parameter(torch.full((horizon, channels), begin))

    def forward(self, x, y=None, mode="tensor", **_):
        if mode != "loss":
            return self.level.expand(x.shape[0], -1, -1)
        self.calls += 1
        if self.calls == int(os.environ.get("STOP_AFTER", 0)):
            os.kill(os.getpid(), signal.SIGUSR2)
        return {"loss": (self.level - y).square().mean()}
"""
SETTINGS = [*TINY, "model._target_=mine.Constant", "output_dir=run", "checkpoint.every_steps=2", "val_every=100"]


@pytest.fixture
def folder(exp):
    (exp.folder / "mine.py").write_text(MINE)
    folder = exp.path("run") / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def steps_in(folder):
    return sorted(int(path.stem[5:]) for path in folder.glob("step_*.pth"))


@pytest.mark.slow
def test_what_is_saved_stays_and_what_is_not_continued_is_set_aside(exp, folder):
    for step in (10, 12):
        (folder / f"step_{step:08d}.pth").write_bytes(b"cut short")
    done = exp(*SETTINGS, "resume=auto", "max_steps=20", STOP_AFTER="8")
    assert done.returncode == 75, done.stderr
    assert "preempted after step 8, which is saved" in done.stdout
    assert steps_in(folder) == [6, 8]
    assert checkpoint.read(folder / "step_00000008.pth")["meta"]["step"] == 8
    assert steps_in(folder / "set_aside") == [10, 12]
    assert done.stdout.count("checkpoints/set_aside") == 1

    # Files that open and hold something else.
    content = checkpoint.read(folder / "step_00000008.pth")
    torch.save(content["state_dict"], str(folder / "step_00000090.pth"))
    torch.save([1, "two"], str(folder / "step_00000091.pth"))
    torch.save({**content, "meta": {"epoch": 3, "iter": 92}}, str(folder / "step_00000092.pth"))
    done = exp(*SETTINGS, "resume=auto", "max_steps=10")
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["resumed_from"].endswith("step_00000008.pth")
    skipped = [line for line in done.stdout.splitlines() if "skipped" in line]
    assert len(skipped) == 3
    assert "step_00000091.pth is no training checkpoint of exp: it holds a list" in skipped[1]
    assert steps_in(folder) == [8, 10]
    assert steps_in(folder / "set_aside") == [10, 12, 90, 91, 92]

    # Back to an older one.
    done = exp(*SETTINGS, "resume=run/checkpoints/step_00000008.pth", "max_steps=9")
    assert done.returncode == 0, done.stderr
    assert steps_in(folder) == [8, 9]
    assert checkpoint.read(folder / "set_aside" / "step_00000010.pth")["meta"]["step"] == 10

    # One of something else, asked for by name.
    bare = folder / "set_aside" / "step_00000090.pth"
    done = exp(*SETTINGS, f"resume={bare}", "output_dir=other")
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert f"{bare} is no training checkpoint of exp" in first
    assert f"init_from={bare}" in first
    assert "Traceback" not in done.stderr
    assert not exp.path("other").exists()


@pytest.mark.slow
def test_weights_that_are_not_finite_are_never_saved_and_the_advice_goes_on_from_sound_ones(exp, folder):
    """Of gradient descent on a parabola: at this rate the error doubles with every step, at half of it it halves."""
    settings = ["optim=sgd", "optim.options.momentum=0", "+model.begin=1e12", "max_steps=60", "log_every=1000"]
    done = exp(*SETTINGS, *settings, "optim.lr=1000", "nproc=2")
    assert done.returncode == 1, done.stdout
    first, advice, *_ = done.stderr.splitlines()
    newest = checkpoint.list_checkpoints(folder)[0]
    assert f"not finite after step {checkpoint.step_of(newest) + 2}: the loss since the last reading" in first
    assert "on rank 0, 1; the weights are not saved; lower optim.lr" in first
    assert torch.isfinite(checkpoint.read(newest)["state_dict"]["level"]).all()
    assert not (folder / "best.pth").exists()
    # One of an older version, which did save them.
    spoilt = checkpoint.read(newest)
    spoilt["state_dict"]["level"][0, 0] = float("nan")
    checkpoint.write(folder / "step_00000058.pth", spoilt)

    # Copied as it stands (but for one process, which is quicker), it goes on from sound weights. Those of step 18 are,
    # but at the next step their loss is not: then the advice is to go back further.
    done = exp(*words_of(advice, "newest", "resume=auto", "optim.lr=500"), "nproc=1")
    assert done.returncode == 1, done.stdout
    assert "step_00000058.pth has weights that are not finite: level" in done.stdout
    assert f"resume: from {newest}" in done.stdout
    advice = done.stderr.splitlines()[1]
    older = "resume=run/checkpoints/step_00000016.pth"
    done = exp(*words_of(advice, "last but one", older, "optim.lr=250"))
    assert done.returncode == 0, done.stderr
    result = exp.result("run")
    assert result["steps"] == 60
    assert result["changed_on_resume"]["optim.lr"] == {"old": 1000, "new": 250}
    steps = [json.loads(line)["step"] for line in (exp.path("run") / "metrics.jsonl").read_text().splitlines()]
    assert steps == [60, 60, 60]


def words_of(advice, which, *last):
    begin, command = advice.split(": ", 1)
    assert begin == f"  to go on from the {which} checkpoint with half the rate"
    words = shlex.split(command)
    assert words[-3:] == ["output_dir=run", *last]
    return words[words.index("backend=cpu") :]
