"""What MMEngine's documentation, and the hooks of MMSegmentation and MMPretrain, take of a runner is there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MessageHub, MMLogger
from mmengine.model import BaseModule, is_model_wrapper
from mmengine.runner import LogProcessor
from mmengine.visualization import Visualizer

from tests.engine.conftest import Line

WHOLE = {"weights_only": False} if hasattr(torch.serialization, "safe_globals") else {}  # of torch.load


class Touches(Hook):
    """A hook that looks at everything, at the stage where others do."""

    def __init__(self):
        self.stages = []

    def before_run(self, runner):
        assert isinstance(runner.cfg, Config)
        assert runner.cfg.optim.type == runner.cfg["optim"]["type"] == "Adam"
        assert runner.cfg.get("no_such_key", 3) == 3
        assert (runner.rank, runner.world_size, runner.distributed, runner.launcher) == (0, 1, False, "none")
        assert (runner.seed, runner.deterministic) == (2023, False)
        assert Path(runner.log_dir) == Path(runner.work_dir) / runner.timestamp
        assert Path(runner.log_dir).is_dir()
        assert runner.experiment_name.startswith("line")
        assert (runner.model_name, runner.default_scope.scope_name) == ("Line", "mmengine")
        assert isinstance(runner.log_processor, LogProcessor)
        for own, kind in ((runner.logger, MMLogger), (runner.message_hub, MessageHub), (runner.visualizer, Visualizer)):
            assert own is kind.get_current_instance()

    def before_train(self, runner):
        assert (runner.max_epochs, runner.max_iters, runner.val_interval, runner.val_begin) == (2, 32, 1, 1)
        for stage in ("train", "val", "test"):
            loop = getattr(runner, f"{stage}_loop")
            assert getattr(runner, f"{stage}_dataloader") is loop.dataloader
            assert stage == "train" or getattr(runner, f"{stage}_evaluator") is loop.evaluator
        assert len(runner.param_schedulers) == 1
        assert self in runner.hooks
        runner.register_hook(Late(), priority="LOWEST")
        assert isinstance(runner.hooks[-1], Late)

    def before_train_epoch(self, runner):
        self.stages.append(f"epoch {runner.epoch}")

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        assert set(data_batch) == {"x", "y"}
        assert outputs["loss"].dim() == 0
        assert self.end_of_epoch(runner.train_dataloader, batch_idx) == (runner.iter in (15, 31))
        assert self.is_last_train_epoch(runner) == (runner.iter > 15)
        if self.every_n_train_iters(runner, 16):
            self.stages.append(f"iter {runner.iter}")
            assert runner.optim_wrapper.get_lr()["lr"] == [runner.optim_wrapper.param_groups[0]["lr"]]
            assert isinstance(runner.optim_wrapper.optimizer, torch.optim.Optimizer)
            assert not is_model_wrapper(runner.model)
        if self.is_last_train_iter(runner):
            runner.visualizer.add_scalar("mine", 1.0, step=runner.iter)
            runner.message_hub.update_scalar("train/mine", 2.0)

    def after_train_epoch(self, runner):
        if self.every_n_epochs(runner, 2):
            runner.save_checkpoint(runner.work_dir, "mine.pth", by_epoch=True)

    def after_val_epoch(self, runner, metrics=None):
        assert runner.message_hub.get_info("loop_stage") == "val"
        loop = runner.val_loop  # as MMPretrain's EMAHook measures a second time
        loop.evaluator.reset()
        for index, batch in enumerate(loop.dataloader):
            loop.run_iter(index, batch)
        assert loop.evaluator.compute(None) == metrics
        self.stages.append("val")

    def after_run(self, runner):
        self.stages.append("after_run")


class Late(Hook):
    """Registered once the training has begun."""

    calls = 0

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.calls += 1


def test_a_hook_finds_what_mmengine_documents(make_runner):
    hook = Touches()
    schedule = [{"type": "ExponentialLR", "gamma": 0.5, "by_epoch": True}]
    runner = make_runner(max_epochs=2, hooks=[hook], schedulers=schedule)
    runner.train()
    assert hook.stages == ["epoch 0", "iter 15", "val", "epoch 1", "iter 31", "val", "after_run"]
    assert runner.hooks[-1].calls == 32
    assert runner.message_hub.get_scalar("train/mine").current() == 2.0
    content = torch.load(Path(runner.work_dir) / "mine.pth", **WHOLE)
    assert torch.equal(content["state_dict"]["w"], runner.model.w.detach())
    assert (content["meta"]["epoch"], content["meta"]["seed"]) == (2, 2023)
    assert {"optimizer", "param_schedulers", "message_hub"} <= set(content)


class Part(BaseModule):
    def __init__(self):
        super().__init__(init_cfg={"type": "Constant", "layer": "Linear", "val": 7.0})
        self.linear = torch.nn.Linear(1, 1)


@pytest.mark.parametrize("weights", [None, "a file's"])
def test_what_a_model_says_of_its_initialisation_is_done_but_not_to_weights_of_a_file(
    make_runner, weights, tmp_path, monkeypatch
):
    """``init_cfg``, also of a part, as MMSegmentation's models have it; MMEngine notes it in a worker's log."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.FileHandler(tmp_path / "rank0.log")])
    seen = []

    class Look(Hook):
        def before_train(self, runner):
            seen.append(runner.model.part.linear.weight.item())

    model = Line()
    model.part = Part()
    before = model.part.linear.weight.item()
    runner = make_runner(model, hooks=[Look()])
    runner.session.weights = weights
    runner.train()
    assert seen == [before if weights else 7.0]
    assert ("ConstantInit" in (tmp_path / "rank0.log").read_text()) == (weights is None)
