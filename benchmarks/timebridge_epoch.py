"""Time of one ETTh1 training epoch with our data pipeline, model and loss, against a plain PyTorch loop.

Published size: lookback 720, horizon 96, batch 64, d_model 128, 3 + 1 layers, attention dropout 0.15, float32, Adam.
The plain loop has a data set that returns one window, a DataLoader that collates, reference_timebridge.py and
torch.fft. Both start from the same weights, use the same windows in the same order, and train in blocks of steps in
turns (A B A B ...); the medians over the blocks are compared, so that a drift of the machine's speed affects both.

    python benchmarks/timebridge_epoch.py [--steps 10] [--blocks 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable, Iterator

import torch
from reference_timebridge import PlainTimeBridge, plain_loss
from torch.utils.data import DataLoader, Dataset

from exp.data.loader import TrainBatchSampler, make_loader
from exp.forecasting.data.dataset import ForecastingData
from exp.forecasting.timebridge.model import TimeBridge

LOOKBACK, HORIZON, BATCH, CHANNELS, LR, ALPHA = 720, 96, 64, 7, 2e-4, 0.35


class PlainWindows(Dataset):
    """A data set of single windows, cut from (T, C) arrays."""

    def __init__(self, values: torch.Tensor, marks: torch.Tensor, lookback: int, horizon: int) -> None:
        self.values, self.marks, self.lookback, self.horizon = values, marks, lookback, horizon

    def __len__(self) -> int:
        return len(self.values) - self.lookback - self.horizon + 1

    def __getitem__(self, start: int) -> tuple[torch.Tensor, ...]:
        middle = start + self.lookback
        return self.values[start:middle], self.marks[start:middle], self.values[middle : middle + self.horizon]


def ours(data: ForecastingData, sampler: TrainBatchSampler, weights: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Train with exp's data, model and loss; yields the loss of each step."""
    model = TimeBridge(channels=CHANNELS, lookback=LOOKBACK, horizon=HORIZON, alpha=ALPHA)
    model.load_state_dict(weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for batch in make_loader(data.train, sampler, num_workers=0, seed=0):
        loss = model(**batch, mode="loss")["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def plain(
    data: ForecastingData, sampler: TrainBatchSampler, weights: dict[str, torch.Tensor], device: str = "cpu"
) -> Iterator[torch.Tensor]:
    """Train with the plain loop; yields the loss of each step."""
    model = PlainTimeBridge(CHANNELS, data.lookback, data.horizon)
    model.load_state_dict(weights)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    values, marks = whole_series(data)
    batches: Any = [index.tolist() for index in sampler]
    windows = PlainWindows(values, marks, data.lookback, data.horizon)
    for batch in DataLoader(windows, batch_sampler=batches):
        x, features, y = (tensor.to(device) for tensor in batch)
        loss = plain_loss(model(x, features), y, ALPHA)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def whole_series(data: ForecastingData) -> tuple[torch.Tensor, torch.Tensor]:
    """The training rows (T, C) and their time features (T, M), joined from windows."""
    lookback, size = data.lookback, data.lookback + data.horizon
    starts = [*range(0, len(data.train), lookback), len(data.train) - 1]
    values = torch.empty(len(data.train) + size - 1, CHANNELS)
    marks = torch.empty(len(values), data.num_marks)
    for start in starts:
        window = data.train[[start]]
        values[start : start + lookback] = window["x"][0]
        values[start + lookback : start + size] = window["y"][0]
        marks[start : start + lookback] = window["marks"][0]
    return values, marks


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps per block")
    parser.add_argument("--blocks", type=int, default=5, help="blocks per contender")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    data = ForecastingData(name="ETTh1", file="ETTh1.csv", split="ett_hour", channels=CHANNELS)
    weights = TimeBridge(channels=CHANNELS, lookback=LOOKBACK, horizon=HORIZON).state_dict()
    steps_per_epoch = TrainBatchSampler(len(data.train), BATCH).steps_per_epoch
    if arguments.steps * arguments.blocks + 2 > steps_per_epoch:
        parser.error(f"steps * blocks must be at most {steps_per_epoch - 2}, the steps of an epoch without the warm-up")

    contenders: dict[str, Callable[..., Iterator[torch.Tensor]]] = {"plain": plain, "exp": ours}
    runs = {name: run(data, TrainBatchSampler(len(data.train), BATCH), weights) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [float(next(run)) for _ in range(2)] for name, run in runs.items()}
    for _ in range(arguments.blocks):
        for name, run in runs.items():
            begun = time.perf_counter()
            block = [next(run) for _ in range(arguments.steps)]
            times[name].append((time.perf_counter() - begun) / arguments.steps)
            losses[name] += [float(loss) for loss in block]

    reference = statistics.median(times["plain"])
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, {arguments.blocks} blocks of {arguments.steps} steps"
    )
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"{name:<6} {median * 1e3:7.0f} ms/step  {median * steps_per_epoch:6.1f} s/epoch  "
            f"{reference / median:.2f} x as fast as plain  (mean loss {statistics.mean(losses[name]):.4f})"
        )


if __name__ == "__main__":
    main()
