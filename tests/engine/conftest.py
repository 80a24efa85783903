from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from exp.backends.cpu import CpuBackend
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset

from exp.config.schema import CheckpointConfig, ExpConfig
from exp.data.sampler import TrainBatchSampler
from exp.engine.checkpoint_hook import CheckpointHook
from exp.engine.distributed import Distributed
from exp.engine.hooks import MetricsHook
from exp.engine.loops import EvalLoop, TrainLoop
from exp.engine.optim import BackendOptimWrapper
from exp.engine.progress import Progress
from exp.engine.runner import Runner
from exp.launcher.rank import RankInfo
from exp.models.base import Model
from exp.runfolder import RunFolder
from exp.session import Session
from exp.tasks.train import Train


class Line(Model):
    """y = w x; ``poison`` makes the loss of one step infinite."""

    def __init__(self, poison: int | None = None) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.poison, self.calls = poison, 0

    def forward(self, x, y, mode="loss"):
        if mode == "predict":
            return self.w * x
        self.calls += 1
        loss = (self.w * x - y).square().mean()
        return {"loss": loss * float("inf") if self.calls == self.poison else loss}


class Mse:
    """What the loop asks of metrics."""

    def reset(self):
        self.errors = []

    def update(self, outputs, batch):
        self.errors.append((outputs - batch["y"]).square().mean().item())

    def compute(self, distributed):
        return {"mse": sum(self.errors) / len(self.errors)}


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 64)[index]
        return {"x": x, "y": 3 * x}


@pytest.fixture
def make_runner(tmp_path):
    """Makes a runner around a line, with our hooks; ``runner.run_steps()`` trains, without the validation ``val``."""

    def make(model=None, accumulate=1, log_every=5, max_epochs=1, hooks=(), schedulers=None, optimizer=None,
             val=EvalLoop, values=None, evaluator=None, **limits):  # fmt: skip
        config = OmegaConf.structured(ExpConfig)
        config.name, config.task, config.global_batch_size = "line", OmegaConf.structured(Train), 4 * accumulate
        session = Session(config, RunFolder(tmp_path), RankInfo.single(), CpuBackend(name="cpu"))
        session.folder.create()
        session.device, session.distributed = torch.device("cpu"), Distributed()
        model = model or Line()
        sampler = TrainBatchSampler(64, batch_size=4, accumulate=accumulate)
        loader = DataLoader(Samples(), batch_size=None, sampler=sampler)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        wrapper = BackendOptimWrapper(optimizer, session.backend, accumulate=accumulate)
        metrics = MetricsHook(session.folder.metrics, log_every, Progress(None), time.time())
        saving = CheckpointHook(session.folder.checkpoints, OmegaConf.structured(CheckpointConfig), None, 0.0, "mse")
        test_loader = DataLoader(Samples())
        runner = Runner(
            session,
            model,
            train_dataloader=loader,
            train_cfg={"type": TrainLoop, "max_epochs": max_epochs, "accumulate": accumulate, **limits},
            val_dataloader=test_loader,
            val_cfg={"type": val, "stage": "val", **({} if values is None else {"values": values})},
            val_evaluator=evaluator or Mse(),
            test_dataloader=test_loader,
            test_cfg={"type": EvalLoop, "stage": "test"},
            test_evaluator=Mse(),
            optim_wrapper=wrapper,
            param_scheduler=schedulers,
            custom_hooks=[metrics, saving, *hooks],
            visualizer={"type": "Visualizer", "name": session.unique_name, "vis_backends": None},
        )

        def run_steps():
            runner.call_hook("before_train")
            runner.train_loop._run_epoch()

        runner.run_steps = run_steps
        runner.parts = SimpleNamespace(metrics=metrics, saving=saving, sampler=sampler)
        return runner

    return make
