"""MMEngine's hooks in whole runs: what they do to validation, best checkpoint, test and resume."""

from __future__ import annotations

import json

import pytest
import torch

from exp.engine import checkpoint
from tests.conftest import TINY
from tests.simulators import needs_card
from tests.tasks.test_train import assert_same

# A small model with a batch norm; each rank of two sees other data.
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
    '''Notes the running means with which each rank validates, and those before the engine touched them.'''
    priority = "VERY_LOW"

    def __init__(self):
        self.before, self.during = [], []

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

class Looks(Hook):
    '''A hook as MMEngine's documentation writes them.'''

    def __init__(self):
        self.seen = []

    def before_run(self, runner):
        runner.message_hub.update_info("visits", runner.message_hub.get_info("visits", 0) + 1)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.every_n_train_iters(runner, 2):
            hub = runner.message_hub
            infos = [hub.get_info(name) for name in ("iter", "epoch", "max_iters", "loop_stage", "seed")]
            self.seen.append([*infos, runner.train_loop.max_iters, float(outputs["loss"]), sorted(hub.log_scalars)])
            runner.logger.info("looked at step %d", runner.iter)

    def after_val_epoch(self, runner, metrics=None):
        self.seen.append([runner.message_hub.get_scalar("val/mse").current(), metrics["mse"]])

    def after_train(self, runner):
        with open("seen.json", "w") as file:
            json.dump(self.seen, file)
"""
NORMED = ["model._target_=mine.Normed", "max_epochs=2", "max_steps=6", "val_every=2", "optim.lr=0.01"]
SIMULATED = ["backend=gcu", "backend.simulate=true"]
EVERY = ["checkpoint.every_steps=1", "checkpoint.keep_last=10"]


@pytest.fixture
def mine(exp):
    (exp.folder / "mine.py").write_text(MINE)
    return exp


def saved(exp, name, step):
    return checkpoint.read(exp.path(name) / "checkpoints" / f"step_{step:08d}.pth")


def test_averaged_weights_are_validated_kept_as_the_best_and_tested(mine):
    mine.train("plain", *NORMED, *EVERY)
    result = mine.train("run", *NORMED, *EVERY, "hooks=[{type: EMAHook, momentum: 0.3}]")
    averaged = None
    for step in range(1, result["tested_step"] + 1):
        raw = saved(mine, "plain", step)["state_dict"]["layer.weight"]
        averaged = raw if averaged is None else torch.lerp(averaged, raw, 0.3)
    best = checkpoint.read(mine.path("run") / "checkpoints" / "best.pth")
    assert torch.allclose(best["state_dict"]["layer.weight"], averaged, rtol=1e-6)
    assert torch.equal(best["ema_state_dict"]["module.layer.weight"], raw)
    assert result["tested_checkpoint"] == "checkpoints/best.pth"
    assert best["meta"]["validation"] == result["validation"]
    assert result["metric"] != mine.result("plain")["metric"]
    done = mine(*TINY, *NORMED, "task=eval", "init_from=run", "output_dir=eval")
    assert done.returncode == 0, done.stderr
    assert mine.result("eval")["metric"] == result["metric"]
    assert mine.result("eval")["checkpoint"].endswith("run/checkpoints/best.pth")


@pytest.mark.slow
def test_the_last_weights_are_tested_as_they_were_validated(mine):
    hook = "hooks=[{type: EMAHook, momentum: 0.3}]"
    result = mine.train("run", *NORMED, hook, "checkpoint.keep_best=false")
    assert result["tested_checkpoint"] == "last weights, step 6"
    done = mine(*TINY, *NORMED, "task=eval", "init_from=run", "output_dir=eval")
    assert done.returncode == 0, done.stderr
    assert mine.result("eval")["metric"] == result["metric"]
    assert mine.result("eval")["checkpoint"].endswith("run/checkpoints/step_00000006.pth")


@pytest.mark.parametrize(
    ("hook", "nproc"),
    [
        ("{type: EMAHook, momentum: 0.3}", 1),
        pytest.param(
            "{type: EMAHook, ema_type: StochasticWeightAverage, update_buffers: true}", 2, marks=pytest.mark.slow
        ),
        pytest.param(
            "{type: EMAHook, ema_type: MomentumAnnealingEMA, begin_iter: 2, strict_load: true}",
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param("{type: EMAHook, begin_epoch: 1, interval: 2}", 1, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_with_averaged_weights_is_the_uninterrupted_one(mine, hook, nproc):
    settings = [*NORMED, f"hooks=[{hook}]", f"nproc={nproc}"]
    straight = mine.train("straight", *settings, *EVERY)
    half = mine.train("half", *settings, *EVERY, "resume=straight/checkpoints/step_00000004.pth")
    assert half["resumed_from"].endswith("step_00000004.pth")
    assert_same(saved(mine, "straight", 6), saved(mine, "half", 6))
    assert half["metrics"] == straight["metrics"]
    if nproc == 1:
        done = mine(*TINY, *NORMED, "output_dir=half", "resume=auto", "max_steps=8")
        assert done.returncode == 2
        assert "was trained with the hooks EMAHook" in done.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("wrapper", "hooks", "more"),
    [
        ("ddp", "", ["accumulate=2", "wrapper.broadcast_buffers=false"]),
        pytest.param("mmddp", "{type: EMAHook, momentum: 0.3}, {type: SyncBuffersHook}, ", [], marks=pytest.mark.slow),
        pytest.param("mmddp", "{type: EMAHook}, ", SIMULATED, marks=[needs_card, pytest.mark.slow]),
    ],
)
def test_every_rank_validates_with_the_mean_of_the_running_statistics(mine, wrapper, hooks, more):
    settings = [
        *NORMED,
        "nproc=2",
        f"wrapper={wrapper}",
        "plugins=[mine]",
        f"hooks=[{hooks}{{type: mine.Buffers}}]",
        *more,
    ]
    result = mine.train("run", *settings)
    notes = [json.loads((mine.folder / f"buffers{rank}.json").read_text()) for rank in (0, 1)]
    (before_0, during_0), (before_1, during_1) = ([torch.tensor(part) for part in note] for note in notes)
    assert not torch.equal(before_0, before_1)
    assert torch.equal(during_0, during_1)
    assert torch.allclose(during_0, (before_0 + before_1) / 2, atol=1e-6)
    best = checkpoint.read(mine.path("run") / "checkpoints" / "best.pth")
    index = result["tested_step"] // 2 - 1
    assert torch.equal(best["state_dict"]["norm.running_mean"], during_0[index])
    done = mine(*TINY, *NORMED, "task=eval", "init_from=run", "output_dir=eval")
    assert done.returncode == 0, done.stderr
    assert mine.result("eval")["metric"] == pytest.approx(result["metric"], rel=1e-6)


def test_a_hook_of_ones_own_sees_what_mmengine_documents(mine):
    mine.train("run", *NORMED, "log_every=1", "plugins=[mine]", "hooks=[{type: mine.Looks}]")
    seen = json.loads((mine.folder / "seen.json").read_text())
    steps, validations = seen[0::2], seen[1::2]
    assert [entry[:2] for entry in steps] == [[1, 0], [3, 0], [5, 0]]
    assert all(entry[2:4] == [6, "train"] and entry[5] == 6 for entry in steps)
    assert all({"train/loss", "train/lr"} <= set(entry[-1]) for entry in steps[1:])
    assert all(value == metric for value, metric in validations)
    assert "looked at step 5" in (mine.path("run") / "logs" / "rank0.log").read_text()
    assert saved(mine, "run", 6)["message_hub"] == {"visits": 1}
    losses = mine.losses("run")
    assert [entry[6] for entry in steps] == pytest.approx([losses[2], losses[4], losses[6]])


@pytest.mark.slow
def test_early_stopping_stops_and_a_resumed_run_goes_on_counting(mine):
    hook = "hooks=[{type: EarlyStoppingHook, monitor: mse, patience: 2, min_delta: 100}]"  # nothing is ever better
    settings = [*NORMED, "val_every=1", hook, "checkpoint.every_steps=1"]
    straight = mine.train("straight", *settings)
    assert straight["steps"] == 3  # the first is better than nothing
    mine.train("halves", *settings, "max_steps=2")
    assert mine.train("halves", *settings, "resume=auto")["steps"] == 3
    again = mine.train("halves", *settings, "resume=auto")
    assert (again["steps"], again["metrics"]) == (3, straight["metrics"]), "it had been stopped"
    more = hook.replace("patience: 2", "patience: 4")
    assert mine.train("halves", *[more if each == hook else each for each in settings], "resume=auto")["steps"] == 5


def test_a_run_that_was_stopped_early_and_killed_before_its_test_tests_what_it_would_have(mine):
    settings = [*NORMED, "val_every=1", "patience=1", "min_delta=100", "checkpoint.every_steps=1"]
    straight = mine.train("straight", *settings)
    assert straight["steps"] == 2
    (mine.path("straight") / "result.json").unlink()
    done = mine(*TINY, *settings, "output_dir=straight", "resume=auto")
    assert done.returncode == 0, done.stderr
    assert "resume: this training was stopped early; with a larger patience it would go on" in done.stdout
    again = mine.result("straight")
    assert (again["steps"], again["tested_step"]) == (2, straight["tested_step"])
    assert again["metrics"] == straight["metrics"]
    assert mine.train("straight", *settings, "resume=auto", "patience=3")["steps"] == 4


@pytest.mark.slow
def test_the_profiler_writes_into_the_run_folder(mine):
    mine.train("run", *NORMED, "hooks=[{type: ProfilerHook, by_epoch: false, profile_times: 2}]")
    assert "traceEvents" in json.loads((mine.path("run") / "profile.json").read_text())
    mine.train(
        "other", *NORMED, "max_steps=2", "nproc=2", "hooks=[{type: ProfilerHook, json_trace_path: traces/a.json}]"
    )
    names = sorted(path.name for path in (mine.path("other") / "traces").iterdir())
    assert names == ["a.rank0.json", "a.rank1.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("{type: LoggerHook}", "hooks: LoggerHook cannot be used here: "),
        ("{type: mmengine.hooks.CheckpointHook, interval: 1}", "set checkpoint.every_epochs"),
        ("{interval: 1}", "hooks[0] has no type"),
        ("{milestones: [1]}", "schedule.param_scheduler[0] has no type"),
        ("{type: EMAHok}", "there is no hook EMAHok; did you mean 'EMAHook'?"),
        ("{type: EMAHook, begin_iter: 100}", "hooks: EMAHook: self.begin_iter should be smaller"),
        ("{type: EMAHook, begin_iter: -1}", "hooks: EMAHook does not take these settings: `begin_iter`"),
        ("{type: EarlyStoppingHook, monitor: size}", "rule must be specified"),
        ("{type: EarlyStoppingHook, monitor: msee, rule: less}", "has monitor=msee; did you mean 'mse'?, but what is"),
        ("{type: EMAHook, priority: SILLY}", "EMAHook has priority SILLY, but it is one of HIGHEST, "),
        ("{type: EMAHook, momentm: 1}", "hooks: EMAHook: "),
        ("{type: EMAHook, ema_type: MomentumAnealing}", "hooks: EMAHook: "),
    ],
)
def test_a_hook_that_cannot_work_is_a_usage_error(mine, hook, says):
    key = "schedule.param_scheduler" if "milestones" in hook else "hooks"
    done = mine(*TINY, *NORMED, f"{key}=[{hook}]", "output_dir=run")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr.splitlines()[0]
