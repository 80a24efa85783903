"""Time that a checkpoint blocks training, against writing the same state while training waits.

The engine trains a model whose state (weights and Adam's two moments) takes about ``--gib``, with a checkpoint after
every second step. Blocked is the time within the checkpoint hook; a plain save is the time within the same hook when it
calls ``write_checkpoint``, in turns in the same run. The steps after a save show what its thread costs them.

    python benchmarks/checkpoint_blocking.py [--gib 1] [--saves 5] [--folder /where/checkpoints/go]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from exp.backends.cpu import CpuBackend
from omegaconf import OmegaConf
from positions import Positions
from torch.utils.data import DataLoader

from exp.config.schema import ExpConfig
from exp.distributed import Distributed
from exp.engine.checkpoint.policy import CheckpointHook, check_finite, prune_checkpoints
from exp.engine.checkpoint.writer import write_checkpoint
from exp.engine.loops import TrainLoop
from exp.engine.optim import BackendOptimWrapper
from exp.engine.trainer import Trainer
from exp.models.base import Model
from exp.runs.folder import RunFolder
from exp.session import RankInfo, Session
from exp.tasks.train import Train

LAYERS, BATCH = 8, 128


class Stack(Model):
    """Linear layers: all time goes into matrix products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor, mode: str = "loss") -> dict[str, torch.Tensor]:
        """Return a loss in every mode."""
        return {"loss": self.net(x).square().mean()}


class Batches:
    """The same batch for every step."""

    def __init__(self, width: int) -> None:
        self.batch = {"x": torch.randn(BATCH, width)}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.batch


class TimedHook(CheckpointHook):
    """Saves after every second step, in the background and plainly in turns."""

    priority = "VERY_LOW"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plain: list[float] = []
        self.hook: list[float] = []
        self.steps: dict[bool, list[float]] = {False: [], True: []}  # by whether a thread is writing
        self.writing = False
        self.mark = time.perf_counter()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Take the time of the step; save after every second one."""
        begun = time.perf_counter()
        self.steps[self.writing].append(begun - self.mark)
        step = runner.iter + 1
        if step % 4 == 0:
            content = runner.training_checkpoint(step, self.state_dict())
            check_finite(runner, content["state_dict"], step)
            write_checkpoint(self.folder / f"step_{step:08d}.pth", content)
            prune_checkpoints(self.folder, self.keep_last)
            self.plain.append(time.perf_counter() - begun)
        elif step % 2 == 0:
            self.save(runner, step)
            self.hook.append(time.perf_counter() - begun)
        self.writing = step % 4 == 2
        if step % 4 == 3:
            runner.checkpoint_writer.wait()
        self.mark = time.perf_counter()


def measure(gib: float, saves: int, folder: str, backend: Any, device: torch.device) -> tuple[float, TimedHook]:
    """Train with saves of both kinds in turns; returns the size of a checkpoint in GiB, and the times."""
    width = int((gib * 2**30 / 4 / 3 / LAYERS) ** 0.5)
    steps = 4 * (saves + 1)
    config = OmegaConf.structured(ExpConfig)
    config.name, config.task, config.global_batch_size = "blocking", OmegaConf.structured(Train), BATCH
    session = Session(config, RunFolder(folder), RankInfo(), backend, Train())
    session.folder.create()
    session.device, session.distributed = device, Distributed()
    model = Stack(width).to(device)
    loader: DataLoader[Any] = DataLoader(Batches(width), batch_size=None, sampler=Positions(steps, BATCH))  # type: ignore
    optim_wrapper = BackendOptimWrapper(torch.optim.Adam(model.parameters()), session.backend)
    runner = Trainer(session, model, optim_wrapper, TrainLoop(loader, max_epochs=1))
    hook = TimedHook(session.config, session.folder.checkpoints)
    runner.hooks.remove(runner.checkpoints)
    runner.register_hook(hook)
    hook.mark = time.perf_counter()
    runner.train()
    runner.checkpoint_writer.wait()
    return max(path.stat().st_size for path in session.folder.checkpoints.iterdir()) / 2**30, hook


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        size, hook = measure(arguments.gib, arguments.saves, folder, CpuBackend(name="cpu"), torch.device("cpu"))
    plain, first, saved = statistics.median(hook.plain), hook.hook[0], statistics.median(hook.hook[1:])
    free, beside = (statistics.median(hook.steps[writing][1:]) for writing in (False, True))
    print(f"{size:.2f} GiB of state; {len(hook.hook)} saves of each kind")
    print(f"plain save            {plain:7.3f} s")
    share = f"{100 * saved / plain:5.1f} %"
    print(f"blocked per save      {saved:7.3f} s  {share}  (the first, which makes its buffers: {first:.3f} s)")
    print(f"steps                 {free:7.3f} s; beside a thread that writes {beside:.3f} s")


if __name__ == "__main__":
    main()
