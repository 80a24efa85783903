"""MMEngine's hooks, and a user's own, in whole runs: what they do to validation, best checkpoint, test and resume."""

from __future__ import annotations

import json

import pytest
import torch

from tests.behaviour.conftest import FORECAST

# A small model with a batch norm; each rank of two sees other data. The hook notes the running means with which a rank
# validates, and those before the engine touched them.
MINE = """
import json
import torch
from mmengine.hooks import Hook
from exp.models.base import Model

class Normed(Model):
    def __init__(self, lookback, horizon, channels, **_):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(channels, momentum=0.3)
        self.layer = torch.nn.Linear(lookback, horizon)

    def forward(self, x, y=None, mode="tensor", **_):
        found = self.layer(self.norm(x.transpose(1, 2))).transpose(1, 2)
        return {"loss": (found - y).square().mean()} if mode == "loss" else found

class Buffers(Hook):
    priority = "VERY_LOW"

    def __init__(self):
        self.before, self.during = [], []

    def before_run(self, runner):
        runner.message_hub.update_info("visits", runner.message_hub.get_info("visits", 0) + 1)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        model = getattr(runner.model, "module", runner.model)
        self.latest = model.norm.running_mean.tolist()

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        if batch_idx == 0:
            model = getattr(runner.model, "module", runner.model)
            self.before.append(self.latest)
            self.during.append(model.norm.running_mean.tolist())

    def after_train(self, runner):
        with open(f"buffers{runner.rank}.json", "w") as file:
            json.dump([self.before, self.during], file)
"""
NORMED = [*FORECAST, "model._target_=mine.Normed", "max_epochs=2", "max_steps=6", "val_every=2", "optim.lr=0.01",
          "checkpoint.every_steps=1", "checkpoint.keep_last=10"]  # fmt: skip
EMA = "hooks=[{type: EMAHook, momentum: 0.3}]"


@pytest.fixture
def mine(exp):
    (exp.folder / "mine.py").write_text(MINE)
    return exp


def saved(exp, name, file):
    return torch.load(str(exp.path(name) / "checkpoints" / file), map_location="cpu")


def train(exp, name, *arguments):
    done = exp(*NORMED, *arguments, f"output_dir={name}")
    assert done.returncode == 0, done.stderr
    return exp.result(name)


def test_averaged_weights_are_validated_tested_and_continued(mine):
    train(mine, "plain")
    result = train(mine, "run", EMA)
    averaged = None
    for step in range(1, result["tested_step"] + 1):
        raw = saved(mine, "plain", f"step_{step:08d}.pth")["state_dict"]["layer.weight"]
        averaged = raw if averaged is None else torch.lerp(averaged, raw, 0.3)
    best = saved(mine, "run", "best.pth")
    assert torch.allclose(best["state_dict"]["layer.weight"], averaged, rtol=1e-6)
    assert result["metric"] != mine.result("plain")["metric"]
    half = train(mine, "half", EMA, "resume=run/checkpoints/step_00000004.pth")
    ours, theirs = (saved(mine, name, "step_00000006.pth") for name in ("half", "run"))
    for key in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(value, theirs[key][name]) for name, value in ours[key].items())
    assert half["metrics"] == result["metrics"]
    done = mine(*NORMED, "output_dir=half", "resume=auto", "max_steps=8")
    assert done.returncode == 2
    assert "EMAHook" in done.stderr.splitlines()[0]
    mine("task=eval", "init_from=run", "backend=cpu", "plugins=[mine]", "output_dir=eval")
    assert mine.result("eval")["metric"] == result["metric"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("hook", "nproc"),
    [
        ("{type: EMAHook, ema_type: StochasticWeightAverage, update_buffers: true}", 2),
        ("{type: EMAHook, ema_type: MomentumAnnealingEMA, begin_iter: 2, strict_load: true}", 1),
    ],
)
def test_other_averages_are_continued_exactly(mine, hook, nproc):
    settings = [f"hooks=[{hook}]", f"nproc={nproc}"]
    straight = train(mine, "straight", *settings)
    half = train(mine, "half", *settings, "resume=straight/checkpoints/step_00000004.pth")
    assert half["metrics"] == straight["metrics"]


@pytest.mark.parametrize(
    ("wrapper", "hooks", "more"),
    [
        ("ddp", "", ["accumulate=2", "wrapper.broadcast_buffers=false"]),
        pytest.param("mmddp", "{type: EMAHook, momentum: 0.3}, {type: SyncBuffersHook}, ", [],
                     marks=pytest.mark.extended),
    ],
)  # fmt: skip
def test_every_rank_validates_with_the_mean_of_the_running_statistics(mine, wrapper, hooks, more):
    settings = ["nproc=2", f"wrapper={wrapper}", "plugins=[mine]", f"hooks=[{hooks}{{type: mine.Buffers}}]", *more]
    result = train(mine, "run", *settings)
    notes = [json.loads((mine.folder / f"buffers{rank}.json").read_text()) for rank in (0, 1)]
    (before_0, during_0), (before_1, during_1) = ([torch.tensor(part) for part in note] for note in notes)
    assert not torch.equal(before_0, before_1)
    assert torch.equal(during_0, during_1)
    assert torch.allclose(during_0, (before_0 + before_1) / 2, atol=1e-6)
    best = saved(mine, "run", "best.pth")["state_dict"]
    assert torch.equal(best["norm.running_mean"], during_0[result["tested_step"] // 2 - 1])
    assert saved(mine, "run", "step_00000006.pth")["message_hub"]["visits"] == 1


@pytest.mark.extended
def test_early_stopping_by_hook_and_by_patience_is_remembered(mine):
    hook = "hooks=[{type: EarlyStoppingHook, monitor: mse, patience: 2, min_delta: 100}]"  # nothing is ever better
    straight = train(mine, "straight", "val_every=1", hook)
    assert straight["steps"] == 3  # the first is better than nothing
    train(mine, "halves", "val_every=1", hook, "max_steps=2")
    again = train(mine, "halves", "val_every=1", hook, "resume=auto")
    assert (again["steps"], again["metrics"]) == (3, straight["metrics"])
    settings = ["val_every=1", "min_delta=100"]
    stopped = train(mine, "run", *settings, "patience=1")
    (mine.path("run") / "result.json").unlink()  # killed before its test
    again = train(mine, "run", *settings, "patience=1", "resume=auto")
    assert (again["steps"], again["metrics"]) == (stopped["steps"], stopped["metrics"]) == (2, stopped["metrics"])
    assert train(mine, "run", *settings, "patience=3", "resume=auto")["steps"] == 4
