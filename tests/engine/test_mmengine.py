"""What MMEngine's documentation, and the hooks of MMSegmentation and MMPretrain, take of a runner is there.

Every hook that MMEngine exports works here, or is refused; a new one fails until it has been decided.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import mmengine.hooks
import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.logging import MessageHub, MMLogger
from mmengine.model import BaseModule
from mmengine.visualization import Visualizer

from exp.config.check import UNSUPPORTED_HOOKS, check_hooks
from exp.engine.build import build_model
from exp.engine.checkpoint.reader import list_checkpoints, read_checkpoint
from exp.engine.mmengine import build_hooks
from exp.errors import ConfigError
from exp.session import Weights
from tests.engine.conftest import Line, Spy


class Touches(Hook):
    """A hook that looks at everything, at the stage where others do."""

    def before_run(self, runner):
        place = (runner.rank, runner.world_size, runner.distributed, runner.launcher, runner.seed, runner.deterministic)
        assert place == (0, 1, False, "none", 2023, False)
        names = (runner.model_name, runner.default_scope.scope_name, runner.cfg.optim.type, runner.cfg["optim"]["type"])
        assert names == ("Line", "mmengine", "Adam", "Adam")
        assert Path(runner.log_dir) == Path(runner.work_dir) / runner.timestamp
        assert Path(runner.log_dir).is_dir()
        for own, kind in ((runner.logger, MMLogger), (runner.message_hub, MessageHub), (runner.visualizer, Visualizer)):
            assert own is kind.get_current_instance()

    def before_train(self, runner):
        assert (runner.max_epochs, runner.max_iters, runner.val_interval, runner.val_begin) == (2, 32, 1, 1)
        for stage in ("train", "val", "test"):
            assert getattr(runner, f"{stage}_dataloader") is getattr(runner, f"{stage}_loop").dataloader
        assert runner.val_evaluator is runner.val_loop.evaluator
        assert len(runner.param_schedulers) == 1
        assert self in runner.hooks

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        assert (set(data_batch), outputs["loss"].dim()) == ({"x", "y"}, 0)
        assert self.end_of_epoch(runner.train_dataloader, batch_idx) == (runner.iter in (15, 31))
        assert self.is_last_train_epoch(runner) == (runner.iter > 15)
        assert runner.optim_wrapper.get_lr()["lr"] == [runner.optim_wrapper.param_groups[0]["lr"]]
        if runner.iter == 1:  # others have been called by then
            runner.register_hook(Spy(lambda runner: runner.iter), priority="LOWEST")
        assert self.every_n_train_iters(runner, 16) == (runner.iter in (15, 31))
        if self.is_last_train_iter(runner):
            runner.visualizer.add_scalar("mine", 1.0, step=runner.iter)
            runner.message_hub.update_scalar("train/mine", 2.0)
            runner.message_hub.update_info("palette", [[0] * 3] * 2)

    def after_val_epoch(self, runner, metrics=None):
        assert runner.message_hub.get_info("loop_stage") == "val"
        loop = runner.val_loop  # as MMPretrain's EMAHook measures a second time
        loop.evaluator.reset()
        for index, batch in enumerate(loop.dataloader):
            loop.run_iter(index, batch)
        assert loop.evaluator.compute(runner.distributed_group) == metrics
        self.validated = runner.epoch


def test_a_hook_finds_what_mmengine_documents_and_its_checkpoints_are_read(make_runner):
    hook, schedule = Touches(), {"type": "ExponentialLR", "gamma": 0.5, "by_epoch": True}
    runner = make_runner(max_epochs=2, hooks=[hook], schedulers=[schedule])
    runner.train()
    assert hook.validated == 2
    assert runner.hooks[-1].seen == list(range(2, 32))
    assert runner.message_hub.get_scalar("train/mine").current() == 2.0
    content = read_checkpoint(list_checkpoints(runner.saving.folder)[0])
    assert content["message_hub"] == {"palette": [[0, 0, 0], [0, 0, 0]]}


class Part(BaseModule):
    def __init__(self):
        super().__init__(init_cfg={"type": "Constant", "layer": "Linear", "val": 7.0})
        self.linear = torch.nn.Linear(1, 1)


class Initialized(Line):
    def __init__(self):
        super().__init__()
        self.part = Part()


@pytest.mark.parametrize("given", [False, True])
def test_what_a_model_says_of_its_initialisation_is_done_but_not_to_weights_of_a_file(
    make_session, given, tmp_path, monkeypatch
):
    """``init_cfg``, also of a part, as MMSegmentation's models have it; MMEngine notes it in a worker's log."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.FileHandler(tmp_path / "rank0.log")])
    session = make_session(model={"_target_": f"{__name__}.Initialized"})
    session.weights = Weights(tmp_path, Initialized().state_dict(), None) if given else None
    model = build_model(session, SimpleNamespace(model_arguments=dict))
    assert (model.part.linear.weight.item() == 7.0) != given
    assert ("ConstantInit" in (tmp_path / "rank0.log").read_text()) != given


TABLE = (Path(__file__).parents[2] / "docs" / "extend" / "hooks.md").read_text()
EMA = {"type": "EMAHook", "momentum": 0.2}
WORK = [
    EMA,
    {"type": "EmptyCacheHook", "before_epoch": True, "after_iter": True},
    {"type": "EarlyStoppingHook", "monitor": "mse", "patience": 1, "stopping_threshold": -1.0},
    {"type": "IterTimerHook"},
    {"type": "ProfilerHook", "record_shapes": True},
    {"type": "RuntimeInfoHook"},
    {"type": "SyncBuffersHook"},
]


def test_each_of_mmengines_hooks_works_or_is_refused():
    works = {hook["type"] for hook in WORK}
    assert sorted([*works, *UNSUPPORTED_HOOKS]) == sorted(mmengine.hooks.__all__)
    for name in mmengine.hooks.__all__:
        assert f"| `{name}` | {'works' if name in works else 'refused'} |" in TABLE


def test_without_a_class_of_the_users_nothing_is_made_that_only_mmengine_reads(make_runner, monkeypatch):
    """The visualizer would import matplotlib, and the hub would be updated at every step."""
    monkeypatch.setattr(Line, "__module__", "exp.line")
    runner = make_runner(max_epochs=2, schedulers=[{"type": "ExponentialLR", "gamma": 0.5, "by_epoch": True}])
    runner.train()
    assert not {"cfg", "default_scope", "message_hub", "visualizer"} & {*vars(runner)}
    assert runner.optim_wrapper.get_lr()["lr"] == [0.05]
    assert read_checkpoint(list_checkpoints(runner.saving.folder)[0])["message_hub"] == {}


def test_a_figure_is_made_only_for_a_hook_that_draws(make_runner):
    """It would import matplotlib, on every rank."""
    runner = make_runner(hooks=[Spy(lambda runner: runner.visualizer is Visualizer.get_current_instance())])
    runner.train()
    assert runner.hooks[-1].seen == [True] * 16
    assert "fig_save" not in vars(runner.visualizer)
    runner.visualizer.set_image(np.zeros((4, 6, 3), np.uint8))
    assert runner.visualizer.get_image().shape == (4, 6, 3)


def test_all_that_work_do_so_together(make_runner):
    """In two epochs of 16 steps, and a test; what they do to the weights: tests/behaviour/test_hooks.py."""
    hooks = build_hooks(WORK, "mse", greater_is_better=False)
    runner = make_runner(max_epochs=2, log_every=4, hooks=hooks)
    runner.train()
    content, runner.tested = runner.saving.select_test_weights(runner)
    assert runner.test(content)["mse"] == runner.tested["validation"]["mse"]  # the same data here
    assert "traceEvents" in (Path(runner.work_dir) / "profile.json").read_text()
    hub = runner.message_hub
    counts = {name: len(scalar.data[0]) for name, scalar in hub.log_scalars.items()}
    assert [counts[f"train/{name}"] for name in ("loss", "lr", "time", "data_time")] == [32] * 4
    assert counts["val/mse"] == 2
    assert {"val/time", "test/time"} <= set(counts)
    assert hub.get_info("max_iters") == 32


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_HOOKS))
def test_some_are_refused_by_either_name(name):
    for kind in (name, f"mmengine.hooks.{name}"):
        with pytest.raises(ConfigError, match=f"hooks: {name} "):
            check_hooks([{"type": kind}])
    check_hooks([{"type": f"mine.{name}"}])  # of the same name, and not MMEngine's


mmengine.registry.HOOKS.register_module(
    module=type("Mine", (mmengine.hooks.LoggerHook,), {}), name="MyLogger", force=True
)


@pytest.mark.parametrize(
    ("hook", "named"),
    [
        ({"type": "MyLogger"}, "LoggerHook"),  # derived from a refused one
        ({"type": "EMAHok"}, "EMAHook"),
        ({"type": "EMAHook", "begin_iter": -1}, "begin_iter"),
        ({"type": "EarlyStoppingHook", "monitor": "msee", "rule": "less"}, "mse"),
        ({"type": "EMAHook", "priority": "SILLY"}, "SILLY"),
    ],
)
def test_a_hook_that_cannot_work_is_refused_by_name(hook, named):
    with pytest.raises(ConfigError, match=named):
        build_hooks([hook], "mse", False, ["mse"])
