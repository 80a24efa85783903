"""Time per training step of our engine on a tiny model, against a hand-written PyTorch loop and MMEngine's own Runner.

All three train the same model with the same optimizer on the same batches (from a plain DataLoader; ours from exp's),
in one process, in turns (A B C A B C ...). The result is the median, over the turns, of the ratio to the hand-written
loop in the same turn: a drift of the machine's speed (a fifth within a minute on shared machines) affects both alike.

    python benchmarks/step_overhead.py [--steps 2000] [--rounds 15]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
import time
from typing import Any, Callable

import torch
from exp.backends.cpu import CpuBackend
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner as StockRunner
from omegaconf import OmegaConf
from positions import Positions
from torch.utils.data import DataLoader, Dataset

from exp.config.schema import ExpConfig
from exp.data.loader import make_loader, to_device
from exp.distributed import Distributed
from exp.engine.loops import TrainLoop
from exp.engine.optim import BackendOptimWrapper
from exp.engine.trainer import Trainer
from exp.models.base import Model
from exp.runs.folder import RunFolder
from exp.session import RankInfo, Session
from exp.tasks.train import Train

BATCH, WIDTH = 32, 64
CPU = torch.device("cpu")


class Samples(Dataset):
    """Random vectors; a batch is one indexing operation."""

    yields_tensors = True

    def __init__(self, batches: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(batches, BATCH, WIDTH, generator=generator)
        self.y = torch.randn(batches, BATCH, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def network() -> torch.nn.Sequential:
    """A tiny MLP, so that the time of a step is mostly overhead."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))


def loss_of(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return (net(x) - y).square().mean()


class OurModel(Model):
    """The network as a model of exp."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "loss") -> dict[str, torch.Tensor]:
        """Return the loss in every mode."""
        return {"loss": loss_of(self.net, x, y)}


class StockModel(BaseModel):
    """The network as a model of MMEngine."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "loss") -> dict[str, torch.Tensor]:
        """Return the loss in every mode."""
        return {"loss": loss_of(self.net, x, y)}


def by_hand(loader: DataLoader, steps: int, device: torch.device = CPU) -> float:
    """The hand-written loop, which reads the loss every 20 steps; returns seconds per step."""
    net = network().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    running = torch.zeros((), device=device)
    begun = time.perf_counter()
    for step, cpu_batch in enumerate(loader, 1):
        batch = to_device(cpu_batch, device)
        loss = loss_of(net, batch["x"], batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        if step % 20 == 0:
            running.item()
            running.zero_()
    return (time.perf_counter() - begun) / steps


def ours(loader: DataLoader, steps: int, folder: str, backend: Any = None, device: torch.device = CPU) -> float:
    """Our engine with its usual hooks; returns seconds per step of the training loop."""
    config = OmegaConf.structured(ExpConfig)
    config.name, config.task, config.global_batch_size = "overhead", OmegaConf.structured(Train), BATCH
    config.log_every, config.schedule.param_scheduler = 20, [{"type": "ExponentialLR", "gamma": 0.5}]
    session = Session(config, RunFolder(folder), RankInfo(), backend or CpuBackend(name="cpu"), Train())
    session.device, session.distributed = device, Distributed()
    session.start_run()  # else the first step does, and describes the machine
    model = OurModel().to(device)
    wrapper = BackendOptimWrapper(torch.optim.Adam(model.parameters(), lr=1e-3), session.backend)
    clock = Clock()
    Trainer(session, model, wrapper, TrainLoop(loader, max_epochs=1), hooks=[clock]).train()
    return clock.seconds / steps


class Clock(Hook):
    """Times an epoch, without the set-up before and the work after it."""

    def before_train_epoch(self, runner: Any) -> None:
        """Start the clock."""
        self.begun = time.perf_counter()

    def after_train_epoch(self, runner: Any) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self.begun


def stock(loader: DataLoader, steps: int, folder: str) -> float:
    """MMEngine's Runner with its default hooks, without checkpoints; returns seconds per step."""
    with contextlib.redirect_stdout(io.StringIO()):
        runner = StockRunner(
            model=StockModel(),
            work_dir=folder,
            train_dataloader=loader,
            train_cfg={"by_epoch": True, "max_epochs": 1},
            optim_wrapper={"optimizer": {"type": "Adam", "lr": 1e-3}},
            param_scheduler=[{"type": "ExponentialLR", "gamma": 0.5}],
            default_hooks={"checkpoint": None, "sampler_seed": None, "logger": {"type": "LoggerHook", "interval": 20}},
            experiment_name=f"stock{time.time_ns()}",
            log_level="ERROR",
        )
        begun = time.perf_counter()
        runner.train()
        return (time.perf_counter() - begun) / steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    loader: DataLoader[Any] = DataLoader(
        Samples(arguments.steps), batch_size=None, sampler=Positions(arguments.steps, BATCH)
    )
    own_loader = make_loader(loader.dataset, Positions(arguments.steps, BATCH), 0, 0)
    times: dict[str, list[float]] = {"by hand": [], "exp": [], "MMEngine Runner": []}
    with tempfile.TemporaryDirectory() as folder:
        RunFolder(folder).create()
        contenders: dict[str, Callable[[], float]] = {
            "by hand": lambda: by_hand(loader, arguments.steps),
            "exp": lambda: ours(own_loader, arguments.steps, folder),
            "MMEngine Runner": lambda: stock(loader, arguments.steps, folder),
        }
        by_hand(loader, arguments.steps)  # warm-up
        for _ in range(arguments.rounds):
            for name, contender in contenders.items():
                times[name].append(contender())
    for name, seconds in times.items():
        ratios = sorted(own / reference for own, reference in zip(seconds, times["by hand"]))
        lower, upper = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"{name:<16} {statistics.median(seconds) * 1e6:8.1f} us/step   {statistics.median(ratios):.2f} x by hand "
            f"(half of the turns: {lower:.2f} to {upper:.2f})"
        )


if __name__ == "__main__":
    main()
