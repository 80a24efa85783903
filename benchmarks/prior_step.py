"""Time that a transition prior adds to TimeBridge's training step, against the forecaster's own step.

Three models with the published settings of an experiment train on the same random batch, in turns (A B C A B C ...):
the forecaster alone; with drawn latents, which need a second network; and with prior and regimes, both while the
regimes learn and when they are frozen. The cost of the prior is the difference between the last two. Medians over the
turns.

    python benchmarks/prior_step.py [--experiment weather] [--hidden 384] [--steps 3] [--rounds 7] [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any, Callable

import torch
from hydra import compose, initialize_config_module
from torch import nn

from exp.config.resolve import create
from exp.config.sources import register


def configuration(*overrides: str) -> Any:
    """The configuration that the command line would compose."""
    with initialize_config_module("exp.conf", version_base="1.3"):
        return compose("config", ["backend=cpu", *overrides])


def stepper(config: Any, epoch: int = 0) -> Callable[[], None]:
    """A function that takes one training step: loss, gradients and Adam."""
    torch.manual_seed(0)
    model = create(config.model, nn.Module, "model")
    if hasattr(model, "start_epoch"):
        model.start_epoch(epoch)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    size, data = config.global_batch_size, config.data
    batch = {
        "x": torch.randn(size, data.lookback, data.channels),
        "marks": torch.randn(size, data.lookback, config.model.time_features),
        "y": torch.randn(size, data.horizon, data.channels),
    }

    def step() -> None:
        losses = model(**batch, mode="loss")
        sum(losses.values()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="weather")
    parser.add_argument("--hidden", type=int, help="hidden units of a latent's MLP; default: the experiment's")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    register()
    forecaster = configuration(f"experiment=timebridge_{options.experiment}")
    variant = [f"experiment=timebridge_prior_{options.experiment}", f"model.prior_hidden={options.hidden or 'null'}"]
    steppers = {
        "forecaster": stepper(forecaster),
        "drawn latents": stepper(configuration(*variant, "model.prior=false")),
        "prior, regimes learn": stepper(configuration(*variant)),
        "prior, regimes frozen": stepper(configuration(*variant), epoch=10**6),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(options.rounds + 1):
        for name, step in steppers.items():
            started = time.perf_counter()
            for _ in range(options.steps):
                step()
            if turn:  # the first warms up
                seconds[name].append((time.perf_counter() - started) / options.steps)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    size = forecaster.global_batch_size
    print(f"{options.experiment}: {forecaster.data.channels} channels, batch {size}, {options.threads} threads")
    for name, value in median.items():
        print(f"{name:<22} {value * 1e3:7.0f} ms  {size / value:6.0f} samples/s")
    for name in ("prior, regimes learn", "prior, regimes frozen"):
        cost = (median[name] - median["drawn latents"]) / median["forecaster"]
        print(f"{name}: costs {cost:.2f} of the forecaster's step")


if __name__ == "__main__":
    main()
    os._exit(0)  # skips the interpreter's shutdown, which may race with autograd's threads
