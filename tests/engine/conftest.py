from __future__ import annotations

import pytest
import torch
from exp.backends.cpu import CpuBackend
from mmengine.hooks import Hook
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset

from exp.config.schema import ExpConfig
from exp.data.loader import EvalBatchSampler, TrainBatchSampler
from exp.distributed import Distributed
from exp.engine.loops import EvalLoop, TrainLoop
from exp.engine.optim import BackendOptimWrapper
from exp.engine.trainer import Trainer
from exp.hardware.compat import supports_full_sharding
from exp.metrics import Evaluator, SampleMetric
from exp.models.base import Model
from exp.runs.folder import RunFolder
from exp.session import RankInfo, Session
from exp.task import create_task, task_class
from exp.tasks.train import Train

needs_sharding = pytest.mark.skipif(not supports_full_sharding(), reason="needs torch >= 2.7")

# What scripts of several ranks begin with. They end as exp's workers do: torch 2.13 may abort while the interpreter is
# taken down after a backward pass.
ON_DEVICES = """
import os, torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
if name != "cpu":
    backend.simulate = True
device = backend.set_device(rank)

def end(found):
    backend.collectives.destroy()
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


class Line(Model):
    """y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, y, mode="loss"):
        return {"loss": (self.w * x - y).square().mean()} if mode == "loss" else self.w * x


class Mse(SampleMetric):
    names, greater_is_better = ("mse",), False

    def per_sample(self, outputs, batch):
        return (outputs - batch["y"]).square()


class Spy(Hook):
    """Keeps in ``seen`` what ``look(runner)`` gives before each step."""

    priority = "LOWEST"

    def __init__(self, look):
        self.poll, self.seen = look, []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.seen.append(self.poll(runner))


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 64)[index]
        return {"x": x, "y": 3 * x}


@pytest.fixture
def make_session(tmp_path):
    """Makes a session of a training on the CPU, whose rank is alone in this process."""

    def make(rank=0, world_size=1, **settings):
        task = OmegaConf.structured(Train)
        config = OmegaConf.merge(OmegaConf.structured(ExpConfig), {"name": "line", "task": task, **settings})
        info = RankInfo(rank=rank, world_size=world_size)
        session = Session(
            config,
            RunFolder(tmp_path),
            info,
            CpuBackend(name="cpu"),
            create_task(task_class(config), config.task),
        )
        session.device, session.distributed = torch.device("cpu"), Distributed()
        return session

    return make


@pytest.fixture
def make_runner(make_session):
    """Makes a runner around a line, with our hooks; an epoch has 16 steps of one micro-batch."""

    def make(model=None, accumulate=1, log_every=5, max_epochs=1, hooks=(), schedulers=None, optimizer=None,
             metrics=None, **limits):  # fmt: skip
        session = make_session(
            global_batch_size=4 * accumulate, log_every=log_every, schedule={"param_scheduler": schedulers or []}
        )
        session.folder.create()
        model = model or Line()
        sampler = TrainBatchSampler(64, batch_size=4, accumulate=accumulate)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        test_loader = DataLoader(Samples(), batch_size=None, sampler=EvalBatchSampler(64, 1))
        train_loader = DataLoader(Samples(), batch_size=None, sampler=sampler)
        runner = Trainer(
            session,
            model,
            BackendOptimWrapper(optimizer, session.backend, accumulate=accumulate),
            TrainLoop(train_loader, max_epochs, accumulate=accumulate, **limits),
            EvalLoop(session, model, test_loader, Evaluator(metrics or [Mse()]), "val"),
            EvalLoop(session, model, test_loader, Evaluator([Mse()]), "test"),
            hooks,
        )
        runner.saving, runner.sampler = runner.checkpoints, sampler
        return runner

    return make
