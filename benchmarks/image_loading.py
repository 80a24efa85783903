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
import mmcv
import torch
from hydra import compose, initialize_config_module

from exp.config.resolve import create
from exp.config.sources import register
from exp.data.base import Data

BATCH = 8


def make_data(experiment: str, overrides: list[str]) -> tuple[Any, tuple[int, int]]:
    """The data set of an experiment, without its cache of decoded files, and the size to which its pipeline resizes."""
    register()
    with initialize_config_module("exp.conf", version_base="1.3"):
        config = compose("config", [f"experiment={experiment}", "data.cache_mb=0", *overrides])
    width, height = config.data.train_pipeline[0].scale
    return create(config.data, Data, "data"), (width, height)


def pipeline(data: Any) -> int:
    """Load all training samples, augmented, in batches; returns their number."""
    numbers = torch.arange(len(data.train))
    keys = torch.stack([numbers, torch.zeros_like(numbers)], dim=1)
    for batch in keys.split(BATCH):
        data.train[batch]
    return len(numbers)


def reference(data: Any, scale: tuple[int, int]) -> int:
    """Only decode the same files, and resize them to the pipeline's ``scale``; returns their number."""
    for path, label in data.train.samples:
        mmcv.imrescale(cv2.imread(path), scale)
        if isinstance(label, str):
            mmcv.imrescale(cv2.imread(label), scale, interpolation="nearest")
    return len(data.train)


def rate(work: Callable[..., int], *arguments: Any) -> float:
    """Images per second."""
    began = time.perf_counter()
    return work(*arguments) / (time.perf_counter() - began)


def main() -> None:
    """Print the rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for experiment in ("dinov3_eurosat", "dinov3_dubai"):
        data, scale = make_data(experiment, arguments.overrides)
        pairs = [(rate(pipeline, data), rate(reference, data, scale)) for _ in range(arguments.rounds + 1)]
        ours, plain = (statistics.median(column) for column in zip(*pairs[1:]))  # the first round warms up
        what = "decode, resize, crop, flip, turn" + (", distort" if "dubai" in experiment else "")
        print(f"{experiment:15} {what}: {ours:7.0f} images/s per core, {1000 / ours:.2f} ms each")
        factor = plain / ours
        print(f"{'':15} decode and resize with OpenCV only: {plain:7.0f} images/s; ours takes {factor:.2f} x as long")


if __name__ == "__main__":
    main()
