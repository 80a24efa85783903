"""Images per second and core of the training pipelines, against only decoding and resizing the same files with OpenCV.

One process, one thread, in turns (A B A B ...); the medians are compared. No decoded file is cached between the turns.

    python benchmarks/image_loading.py [--rounds 5] [data=dubai data.size=512]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable

import cv2
import torch
from hydra import compose, initialize_config_module

from exp.config.compose import register
from exp.config.resolve import create
from exp.data.base import Data

BATCH = 8


def make_data(experiment: str, overrides: list[str]) -> Any:
    """The data set of an experiment, without its cache of decoded files."""
    register()
    with initialize_config_module("exp.conf", version_base="1.3"):
        config = compose("config", [f"experiment={experiment}", "data.cache_megabytes=0", *overrides])
    return create(config.data, Data, "data")


def pipeline(data: Any) -> int:
    """Load all training samples, augmented, in batches; returns their number."""
    numbers = torch.arange(len(data.train))
    keys = torch.stack([numbers, torch.zeros_like(numbers)], dim=1)
    for batch in keys.split(BATCH):
        data.train[batch]
    return len(numbers)


def reference(data: Any) -> int:
    """Only decode and resize the same files; returns their number."""
    _, *size = data.train.blank
    for path, label in data.train.samples:
        cv2.resize(cv2.imread(path), size)
        if isinstance(label, str):
            cv2.resize(cv2.imread(label), size, interpolation=cv2.INTER_NEAREST)
    return len(data.train)


def rate(work: Callable[[Any], int], data: Any) -> float:
    """Images per second."""
    began = time.perf_counter()
    return work(data) / (time.perf_counter() - began)


def main() -> None:
    """Print the rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for experiment in ("dinov3_eurosat", "dinov3_dubai"):
        data = make_data(experiment, arguments.overrides)
        pairs = [(rate(pipeline, data), rate(reference, data)) for _ in range(arguments.rounds + 1)]
        ours, plain = (statistics.median(column) for column in zip(*pairs[1:]))  # the first round warms up
        what = "decode, resize, crop, flip, turn" + (", distort" if "dubai" in experiment else "")
        print(f"{experiment:15} {what}: {ours:7.0f} images/s per core, {1000 / ours:.2f} ms each")
        factor = plain / ours
        print(f"{'':15} decode and resize with OpenCV only: {plain:7.0f} images/s; ours takes {factor:.2f} x as long")


if __name__ == "__main__":
    main()
