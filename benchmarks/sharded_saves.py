"""Time that a checkpoint of a sharded model blocks training, against torch's ``dcp.save`` of the same state.

A model whose state (weights and Adam's two moments) takes ``--gib`` on all ranks together is sharded over ``--ranks``
processes on the CPU. Blocked is the time of the calls that prepare and start a save. Both save the same tensors in the
same run, in turns; the slowest rank counts.

    python benchmarks/sharded_saves.py [--gib 1] [--ranks 2] [--saves 5] [--folder /where/checkpoints/go]
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exp.backends.cpu import CpuBackend

from exp.distributed import Distributed
from exp.engine.checkpoint.writer import CheckpointWriter
from exp.engine.fsdp import FullyShard
from exp.engine.optim import BackendOptimWrapper

LAYERS, BATCH = 8, 64


class Stack(torch.nn.Module):
    """Linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.net:
            x = layer(x)
        return x.square().mean()


def measure(rank: int, arguments: argparse.Namespace) -> None:
    """Save in both ways in turns, with a step in between; rank 0 prints."""
    import torch.distributed.checkpoint as dcp

    backend, world_size = CpuBackend(name="cpu"), arguments.ranks
    store = dist.FileStore(str(arguments.folder / "store"), world_size)
    group = Distributed.create(backend, store, rank, world_size, timedelta(seconds=600))
    width = int((arguments.gib * 2**30 / 4 / 3 / LAYERS) ** 0.5)
    device = torch.device("cpu")
    model: Any = FullyShard().move_to_device(Stack(width), backend, device)
    optimizer = torch.optim.Adam(model.parameters())
    optim: Any = BackendOptimWrapper(optimizer, backend, "fp32", model=model)
    writer = CheckpointWriter(backend, group, sharded=True)
    batch = torch.randn(BATCH, width)
    blocked, plain = [], []

    def content() -> dict[str, Any]:
        return {"meta": {"step": 1}, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}

    def everyones(seconds: float) -> float:
        return max(group.gather(seconds))

    optim.update_params(model(batch))
    for number in range(arguments.saves + 1):
        group.barrier()
        begun = time.perf_counter()
        tensors = {key: value for key, value in content().items() if key != "meta"}
        folder = arguments.folder / "plain"
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(str(folder)), process_group=group.cpu_group)
        plain.append(everyones(time.perf_counter() - begun))
        group.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        group.barrier()
        path = arguments.folder / f"step_{number:08d}.pth"
        begun = time.perf_counter()
        writer.start({path: content()})
        blocked.append(everyones(time.perf_counter() - begun))
        optim.update_params(model(batch))
        writer.wait()
        group.barrier()
        if rank == 0:
            size = sum(each.stat().st_size for each in path.with_suffix(".shards0").iterdir())
            shutil.rmtree(path.with_suffix(".shards0"))
    if rank == 0:
        reference, median = statistics.median(plain[1:]), statistics.median(blocked[1:])
        print(f"{size / 2**30:.2f} GiB of state on {world_size} ranks; {arguments.saves} saves of each kind")
        print(f"dcp.save              {reference:7.3f} s")
        print(
            f"blocked per save      {median:7.3f} s  {100 * median / reference:5.1f} %  (the first: {blocked[0]:.3f} s)"
        )
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        measure(arguments.rank, arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(arguments.ranks)]
        sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
