"""What is not as before when a training goes on takes effect and is listed, or is refused by its key."""

from __future__ import annotations

import math

import pytest
import torch

from tests.behaviour.conftest import FORECAST, ROOT

ROWS = (ROOT / "data" / "ett" / "ETTh1.csv").read_text().splitlines(keepends=True)[:1501]
SETTINGS = [*FORECAST, "data.split=ratio", "data.lookback=24", "data.horizon=24", "max_epochs=2", "schedule=cosine",
            "checkpoint.every_steps=0", "output_dir=run"]  # fmt: skip


@pytest.fixture
def here(exp):
    (exp.folder / "here").mkdir()
    return exp.folder / "here" / "ETTh1.csv"


def newest(exp):
    return torch.load(str(max((exp.path("run") / "checkpoints").glob("step_*.pth"))), map_location="cpu")


def test_what_may_change_takes_effect_and_is_listed_and_the_rest_is_refused(exp, here):
    here.write_text("".join(ROWS))
    assert exp(*SETTINGS, "data.root=here", "max_steps=3").returncode == 0
    before = (exp.path("run") / "result.json").read_bytes()
    here.write_text("".join(ROWS).replace("5.827", "5.828", 1))
    for words, named in ((["optim=sgd"], "optim.type"), ([], "ETTh1.csv")):
        done = exp(*SETTINGS, "data.root=here", "resume=auto", *words)
        assert done.returncode == 2
        assert named in done.stderr.splitlines()[0]
    assert (exp.path("run") / "result.json").read_bytes() == before
    here.parent.rename(exp.folder / "there")
    changes = {"optim.lr": 1e-2, "optim.weight_decay": 0.1, "max_steps": 6, "patience": 5, "precision": "bf16",
               "max_epochs": 4}  # fmt: skip
    done = exp(*SETTINGS, "data.root=there", "resume=auto", "resume_changed_data=true",
               *(f"{key}={value}" for key, value in changes.items()))  # fmt: skip
    assert done.returncode == 0, done.stderr
    (group,) = newest(exp)["optimizer"]["param_groups"]
    assert group["weight_decay"] == 0.1
    # The schedule is that of the new rate and length, from the step on at which the training went on.
    assert group["lr"] == pytest.approx(0.5e-2 * (1 + math.cos(math.pi * 5 / 6)), rel=1e-6)
    assert newest(exp)["optimizer"]["state"][0]["step"] == 6  # with the moments of all steps
    listed = exp.result("run")["changed_on_resume"]
    old = {"optim.lr": 5e-4, "optim.weight_decay": 0.0, "max_steps": 3, "patience": None, "precision": "fp32",
           "max_epochs": 2}  # fmt: skip
    assert {key: listed[key] for key in changes} == {key: {"old": old[key], "new": changes[key]} for key in changes}
    assert set(listed) - set(changes) == {"data.root", "contents of data"}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("settings", "steps", "rate"),
    [
        # MMEngine leaves the last value of a half cosine out.
        (["schedule=cosine", "max_epochs=3"], 14 + 13, 5e-4 / 2 * (1 - math.cos(math.pi / (3 * 13)))),
        (["schedule=halving", "max_epochs=4"], 14 + 2 * 13, 5e-4 / 4),
    ],
)
def test_files_with_more_rows_take_the_epochs_that_are_left(exp, here, settings, steps, rate):
    """Two epochs of 7 steps each; those of the new file have 13."""
    here.write_text("".join(ROWS[:401]))
    command = [*SETTINGS, "data.root=here", "max_steps=null"]
    assert exp(*command, settings[0]).returncode == 0
    here.write_text("".join(ROWS[:701]))
    done = exp(*command, *settings, "resume=auto", "resume_changed_data=true")
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["steps"] == steps
    assert exp.result("run")["epochs"] == int(settings[1].partition("=")[2])
    assert newest(exp)["optimizer"]["param_groups"][0]["lr"] == pytest.approx(rate, rel=1e-6)
