"""Time that the exchange of gradients through the CPU takes in a job of several vendors, after and during backward.

Two processes exchange the gradients of 24 layers of 4 MiB over gloo. A card is stood in for by waiting in each layer's
backward pass, so that the CPU is as free as beside a card. Steps of the three kinds take turns.

    python benchmarks/mixed_exchange.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from exp.distributed import AveragingDataParallel, StagedCollectives, StagedDataParallel

LAYERS, WIDTH, BACKWARD_S, STEPS = 24, 1024, 0.02, 15


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return grad


class Net(nn.Module):
    """Layers with large gradients, whose backward pass takes a card's time and none of the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: (B, WIDTH)."""
        for layer in self.layers:
            x = _Waits.apply(layer(x))
        return x.square().mean()


def run(rank: int, store: str, results: Any) -> None:
    """One rank: times steps without an exchange, with one after the backward pass, and with one during it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(minutes=5)
    )
    collectives, group = StagedCollectives(), dist.new_group(backend="gloo")
    alone, how = Net(), {"all_reduce": collectives.all_reduce, "group": group}
    after = AveragingDataParallel(Net(), **how)
    during = StagedDataParallel(Net(), start_all_reduce=collectives.start_all_reduce, **how)
    seconds: dict[str, list[float]] = {"without": [], "after": [], "during": []}
    x = torch.randn(1, WIDTH)
    for _ in range(STEPS):
        for name, model in (("without", alone), ("after", after), ("during", during)):
            dist.barrier(group)
            started = time.perf_counter()
            model(x).backward()
            getattr(model, "exchange_gradients", lambda: None)()
            seconds[name].append(time.perf_counter() - started)
            model.zero_grad(set_to_none=True)
    if rank == 0:
        results.put({name: statistics.median(values[2:]) for name, values in seconds.items()})


def main() -> None:
    """Print the bytes of a step, the seconds of each kind, and the share of the exchange that is hidden."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, f"{folder}/store", results)) for rank in range(2)]
        for process in ranks:
            process.start()
        seconds = results.get()
        for process in ranks:
            process.join()
    exchange, left = seconds["after"] - seconds["without"], seconds["during"] - seconds["without"]
    print(f"gradients: {LAYERS * WIDTH**2 * 4 / 2**20:.0f} MiB a step from each card to the CPU, and as many back")
    for name, value in seconds.items():
        print(f"{name:>8}: {value * 1e3:6.0f} ms a step")
    print(f"exchange: {exchange * 1e3:.0f} ms, of which {1 - left / exchange:.0%} are hidden behind the backward pass")


if __name__ == "__main__":
    main()
