"""What is not as before when a training goes on takes effect and is listed, or is refused with both values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from exp.engine import checkpoint
from tests.conftest import TINY
from tests.tasks.test_kept_checkpoints import MINE

ROWS = (Path(__file__).parents[2] / "data" / "ett" / "ETTh1.csv").read_text().splitlines(keepends=True)[:1501]
SETTINGS = [*TINY, "model._target_=mine.Constant", "data.split=ratio", "data.lookback=24", "data.horizon=24",
            "max_epochs=2", "schedule=cosine", "output_dir=run"]  # fmt: skip


@pytest.fixture
def first(exp):
    """A training of four steps on a file of its own, in the folder ``here``."""
    (exp.folder / "mine.py").write_text(MINE)
    (exp.folder / "here").mkdir()
    (exp.folder / "here" / "ETTh1.csv").write_text("".join(ROWS))
    exp.train("run", *SETTINGS, "data.root=here")
    return exp


def newest(exp):
    return checkpoint.read(checkpoint.list_checkpoints(exp.path("run") / "checkpoints")[0])


@pytest.mark.slow
def test_what_may_change_takes_effect_and_is_listed(first):
    begun = newest(first)
    assert begun["config"]["optim"]["lr"] == 5e-4
    assert begun["config"]["model"]["_target_"] == "mine.Constant"
    assert "output_dir" not in begun["config"]
    (first.folder / "here").rename(first.folder / "there")
    changes = {"optim.lr": 1e-2, "optim.weight_decay": 0.1, "max_steps": 6, "patience": 5, "log_every": 1,
               "precision": "bf16", "max_epochs": 4}  # fmt: skip
    done = first(*SETTINGS, "data.root=there", "resume=auto", *(f"{key}={value}" for key, value in changes.items()))
    assert done.returncode == 0, done.stderr
    content = newest(first)
    (group,) = content["optimizer"]["param_groups"]
    assert group["weight_decay"] == 0.1
    # The schedule is that of the new rate and length, from the step on at which the training went on.
    steps = 4 * (len(ROWS) * 7 // 10 - 48) // 32
    total = content["param_schedulers"][0]["T_max"]
    assert total == pytest.approx(steps, abs=8)
    assert group["lr"] == pytest.approx(0.5e-2 * (1 + math.cos(math.pi * 6 / total)), rel=1e-6)
    assert content["optimizer"]["state"][0]["step"] == 6  # with the moments of all steps
    listed = first.result("run")["changed_on_resume"]
    before = {"optim.lr": 5e-4, "optim.weight_decay": 0.0, "max_steps": 4, "patience": None, "log_every": 2,
              "precision": "fp32", "max_epochs": 2}  # fmt: skip
    for key, value in changes.items():
        assert listed.pop(key) == {"old": before[key], "new": value}
        assert f"changed: {key}=" in done.stdout
    assert set(listed) == {"data.root", "schedule.param_scheduler"}


@pytest.mark.slow
def test_what_may_not_is_refused_and_so_are_other_data_until_they_are_asked_for(first):
    before = (first.path("run") / "result.json").read_bytes()
    there = ["data.root=here", "resume=auto", "max_steps=6"]
    done = first(*SETTINGS, *there, "optim=sgd")
    assert done.returncode == 2
    head = done.stderr.splitlines()[0]
    assert "was trained with optim.type=Adam, this run has SGD; set optim.type=Adam" in head
    assert "init_from=" in head

    file = first.folder / "here" / "ETTh1.csv"
    file.write_text("".join(ROWS).replace("5.827", "5.828", 1))
    done = first(*SETTINGS, *there)
    assert done.returncode == 2
    head = done.stderr.splitlines()[0]
    assert "step_00000004.pth was trained on other data: ETTh1.csv has other contents" in head
    assert "resume_changed_data=true" in head
    assert (first.path("run") / "result.json").read_bytes() == before

    file.write_text("".join(ROWS[:1400]))
    done = first(*SETTINGS, *there, "resume_changed_data=true")
    assert done.returncode == 0, done.stderr
    said = first.result("run")["changed_on_resume"]["contents of data"]["new"]
    assert said.startswith("ETTh1.csv has ")
    assert f"changed: contents of data={said}"[:40] in done.stdout


def before_the_end(steps):
    """The rate of the last step but one of a half cosine: MMEngine leaves the last value out."""
    return 5e-4 / 2 * (1 - math.cos(math.pi / steps))


@pytest.mark.parametrize(
    ("rows", "settings", "steps", "rate"),
    [
        (700, ["schedule=cosine", "max_epochs=3"], 14 + 13, before_the_end(3 * 13)),
        (700, ["schedule=halving", "max_epochs=4"], 14 + 2 * 13, 5e-4 / 4),
        pytest.param(
            250, ["schedule=cosine", "max_epochs=5"], 14 + 3 * 4, before_the_end(5 * 4), marks=pytest.mark.slow
        ),
        pytest.param(
            700, ["schedule=cosine", "max_epochs=null", "max_steps=20"], 20, before_the_end(20), marks=pytest.mark.slow
        ),
    ],
)
def test_files_with_more_or_fewer_rows_take_the_epochs_that_are_left(exp, rows, settings, steps, rate):
    """Two epochs of 7 steps each; those of the new file have 13 or 4."""
    (exp.folder / "mine.py").write_text(MINE)
    (exp.folder / "ETTh1.csv").write_text("".join(ROWS[:401]))
    command = [*SETTINGS, "data.root=.", "max_steps=null"]
    exp.train("run", *command, settings[0])
    (exp.folder / "ETTh1.csv").write_text("".join(ROWS[: rows + 1]))
    done = exp(*command, *settings, "resume=auto", "resume_changed_data=true")
    assert done.returncode == 0, done.stderr
    result = exp.result("run")
    assert result["steps"] == steps
    content = newest(exp)
    assert content["optimizer"]["param_groups"][0]["lr"] == pytest.approx(rate, rel=1e-6)
    if "max_epochs=null" not in settings:
        last = int(settings[1].partition("=")[2])
        assert result["epochs"] == last
        assert f"epoch {last}/{last}  " in done.stdout
        assert f"epoch {last - 1}/{last}  " in done.stdout or last == 3


@pytest.mark.slow
def test_a_checkpoint_of_an_older_version_goes_on_and_that_is_said(first):
    (path,) = checkpoint.list_checkpoints(first.path("run") / "checkpoints")
    content = checkpoint.read(path)
    del content["config"], content["data_files"]
    checkpoint.write(path, content)
    done = first(*SETTINGS, "data.root=here", "resume=auto", "max_steps=6")
    assert done.returncode == 0, done.stderr
    assert "is of an older version of exp" in done.stdout
    assert first.result("run")["changed_on_resume"] == {}
