"""The weights that are tested are those that the reported validation belongs to, and the result names them."""

from __future__ import annotations

import json

import pytest

from exp.engine import checkpoint
from tests.conftest import TINY

# It gets worse with every step: the forecast is a constant that grows.
MINE = """
import torch
from exp.models.base import Model

class Drifts(Model):
    def __init__(self, horizon, channels, **_):
        super().__init__()
        self.level = torch.nn.Parameter(torch.zeros(horizon, channels))

    def forward(self, x, y=None, mode="tensor", **_):
        return {"loss": -self.level.mean()} if mode == "loss" else self.level.expand(x.shape[0], -1, -1)
"""
DRIFTS = ["model._target_=mine.Drifts", "optim=sgd", "optim.lr=100", "val_every=1", "max_epochs=2", "schedule=constant",
          "patience=null"]  # fmt: skip


@pytest.fixture
def first(exp):
    """A run of two steps, of which the first was the better one."""
    (exp.folder / "mine.py").write_text(MINE)
    exp.train("first", *DRIFTS, "max_steps=2", "checkpoint.every_steps=1", "checkpoint.keep_last=10")
    return exp


def validations(exp, name):
    records = [json.loads(line) for line in (exp.path(name) / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["mse"] for record in records if record["split"] == "val"}


def named(result):
    return [result[key] for key in ("tested_checkpoint", "tested_step", "tested_epoch", "best_epoch")]


@pytest.mark.slow
def test_a_resumed_run_that_finds_nothing_better_tests_the_other_runs_best(first):
    before = first.result("first")
    assert named(before) == ["checkpoints/best.pth", 1, 0, 0]
    after = first.train("second", *DRIFTS, "max_steps=4", "resume=first", "nproc=2")
    assert named(after) == ["checkpoints/best.pth", 1, 0, 0]
    assert after["validation"] == before["validation"]
    assert after["metric"] == pytest.approx(before["metric"], rel=1e-6)
    assert checkpoint.read(first.path("second") / "checkpoints" / "best.pth")["meta"]["step"] == 1
    # One checkpoint on its own is as good as its folder.
    third = first.train("third", *DRIFTS, "max_steps=2", "resume=second/checkpoints/step_00000004.pth", "nproc=1")
    assert (third["tested_step"], third["validation"]) == (1, before["validation"])


@pytest.mark.slow
def test_best_weights_that_are_lost_no_longer_count(first):
    best = first.path("first") / "checkpoints" / "best.pth"
    content = best.read_bytes()
    best.unlink()
    after = first.train("second", *DRIFTS, "max_steps=4", "resume=first")
    assert named(after) == ["checkpoints/best.pth", 3, 0, 0]
    assert after["validation"] == {"mse": validations(first, "second")[3]}
    best.write_bytes(content[:100])
    done = first(*TINY, *DRIFTS, "max_steps=2", "resume=auto", "output_dir=first")
    assert done.returncode == 1
    assert str(best) in done.stderr.splitlines()[0]
    best.unlink()
    done = first(*TINY, *DRIFTS, "max_steps=2", "resume=auto", "output_dir=first")  # nothing is left to train
    assert done.returncode == 0, done.stderr
    assert "the best weights so far (mse" in done.stdout
    assert f"no checkpoint at {best}" in done.stdout
    assert named(first.result("first")) == ["checkpoints/best.pth", 2, 0, 0]
    assert first.result("first")["validation"] == {"mse": validations(first, "first")[2]}
    done = first(*TINY, *DRIFTS, "task=eval", "init_from=first", "output_dir=eval")
    assert first.result("eval")["metric"] == first.result("first")["metric"]
    assert first.result("eval")["checkpoint"].endswith("first/checkpoints/best.pth")


@pytest.mark.slow
def test_best_weights_of_another_attempt_do_not_count(first):
    """As after a crash between the best checkpoint and the training checkpoint of the same step."""
    folder = first.path("first") / "checkpoints"
    other = checkpoint.read(folder / "step_00000002.pth")
    checkpoint.write(folder / "best.pth", {"meta": {**other["meta"], "step": 2}, "state_dict": other["state_dict"]})
    done = first(*TINY, *DRIFTS, "max_steps=3", "resume=first/checkpoints/step_00000001.pth", "output_dir=second")
    assert done.returncode == 0, done.stderr
    assert "best.pth has those of step 2" in done.stdout
    assert named(first.result("second"))[:2] == ["checkpoints/best.pth", 2]


@pytest.mark.slow
def test_without_the_best_weights_the_last_are_tested_and_their_validation_is_reported(first):
    settings = [*DRIFTS, "checkpoint.keep_best=false"]
    result = first.train("last", *settings, "max_steps=3")
    assert named(result) == ["last weights, step 3", 3, 0, 0]
    assert result["validation"] == {"mse": validations(first, "last")[3]}
    assert not (first.path("last") / "checkpoints" / "best.pth").exists()
    again = first.train("last", *settings, "max_steps=3", "resume=auto")
    assert again["validation"] == result["validation"]
    assert again["metric"] == result["metric"]
