"""``task=estimate`` against the count of simulated cards, for every experiment: peak memory of a rank in MiB, and
ratio.

Each experiment is made small, with its own model, loss, optimizer and validation. Series are made from the bundled one,
images are the bundled ones.

    python benchmarks/estimate_memory.py [--nproc 1] [--only 'timebridge_*'] [precision=bf16 ...]
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator

import pandas as pd
from hydra import compose, initialize_config_module

from exp.config.sources import register

ROOT = Path(__file__).parents[1]
_ROWS = 1200
_SERIES = ["data.lookback=192", "data.horizon=96", "data.split=ratio", "data.eval_batch_size=4"]
_IMAGES = ["data.num_workers=0", "data.eval_batch_size=2", "global_batch_size=4", "schedule=constant"]
_SMALLER = {
    "timebridge_*electricity": ["data.channels=24"],
    "timebridge_*traffic": ["data.channels=24"],
    "timebridge_*solar": ["data.channels=24", "data.header=true", "data.file=solar_AL.csv"],
    "timebridge_*": _SERIES,
    "dinov3_*": _IMAGES,
    "dinov3_loveda*": [
        "data=dubai",
        "data.size=128",
        "model.window=128",
        "model.backbone.size=vits16",
        "model.backbone.depth=6",
    ],
    "dinov3_loveda_finetune": ["model.auxiliary_out_index=5"],
    "dinov3_mmrs1m": ["data=eurosat", "model.backbone.size=vits16", "model.backbone.depth=6"],
    "dinov3_dubai": ["data.size=128", "model.window=128"],
    "dinov3_mmrs1m_segmentation": [
        "data=dubai",
        "data.modality=null",
        "data.modality_weights=null",
        "data.size=128",
        "model.window=128",
        "model.backbone.size=vits16",
        "model.backbone.depth=6",
        "model.auxiliary_out_index=5",
    ],
}


def smaller(experiment: str) -> list[str]:
    """The overrides that make an experiment small."""
    return [each for pattern, given in _SMALLER.items() if fnmatch.fnmatch(experiment, pattern) for each in given]


def write_series(folder: Path, experiment: str, overrides: list[str]) -> None:
    """Write the file that an experiment reads, from the columns of ETTh1."""
    with initialize_config_module("exp.conf", version_base="1.3"):
        data = compose("config", [f"experiment={experiment}", *overrides]).data
    if "lookback" not in data:
        return
    known = pd.read_csv(ROOT / "data" / "ett" / "ETTh1.csv", nrows=_ROWS)
    columns = {f"s{number}": known.iloc[:, 1 + number % 7] for number in range(data.channels)}
    path = folder / data.file
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame({"date": known["date"], **columns}).to_csv(path, index=False)


def measured(folder: Path, *arguments: str) -> dict[str, object]:
    """``result.json`` of a run."""
    command = [sys.executable, "-m", "exp", *arguments, f"output_dir={folder}", "overwrite=true"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stderr}")
    result: dict[str, object] = json.loads((folder / "result.json").read_text())
    return result


def compared(experiments: list[str], nproc: int, more: list[str]) -> Iterator[tuple[str, int, int]]:
    """Estimate and run an experiment; returns its name, the estimated and the counted bytes."""
    for experiment in experiments:
        with tempfile.TemporaryDirectory() as place:
            given = smaller(experiment)
            write_series(Path(place), experiment, given)
            limit = ["debug.eval_batches=1"] * experiment.startswith("timebridge")  # images have different sizes
            root = [f"data.root={place}"] if experiment.startswith("timebridge") else []
            if experiment == "dinov3_distillation":
                measured(Path(place, "teacher"), "experiment=dinov3_eurosat", "max_steps=1", "data.num_workers=0")
                root = [f"model.teacher.init_from={place}/teacher"]
            common = [f"experiment={experiment}", "backend=gcu_simulated", f"nproc={nproc}", *given, *root, *more]
            estimated = measured(Path(place, "estimate"), "task=estimate", *common)["estimate"]
            counted = measured(
                Path(place, "speed"), "task=speed", "task.warm_up=1", "max_steps=3", *limit,
                "schedule=constant", *common,
            )  # fmt: skip
            assert isinstance(estimated, dict)
            yield experiment, estimated["memory_peak"], max(counted["memory_peak"])  # type: ignore[call-overload]


def main() -> None:
    """Print a line for each experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--only", default="*")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    register()
    names = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
    chosen = [name for name in names if fnmatch.fnmatch(name, options.only)]
    for name, estimated, counted in compared(chosen, options.nproc, options.overrides):
        print(f"{name:30} {estimated / 2**20:9.1f} {counted / 2**20:9.1f} {estimated / counted:7.3f}", flush=True)


if __name__ == "__main__":
    main()
