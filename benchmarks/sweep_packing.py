"""A sweep of one-process jobs packed side by side, against the same jobs one after the other, on the CPU.

The wall time from Enter to the end of the command, in turns (A B A B ...); the medians are compared.

    python benchmarks/sweep_packing.py [--jobs 8] [--steps 200] [--rounds 1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL = ["backend=cpu", "data.lookback=192", "model.d_model=32", "model.d_ff=32", "model.num_heads=2",
         "global_batch_size=32", "max_epochs=100", "plots=false", "sweep.plots=false"]  # fmt: skip


def seconds_of(jobs: int, steps: int, parallel: str, folder: Path) -> float:
    """Wall time of a sweep over the seed; ``parallel`` is the value of ``sweep.parallel_jobs``."""
    seeds = ",".join(map(str, range(jobs)))
    command = [sys.executable, "-m", "exp", "-m", *SMALL, f"max_steps={steps}", f"val_every={steps}", f"seed={seeds}",
               f"sweep.parallel_jobs={parallel}", f"output_dir={folder}"]  # fmt: skip
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    times: dict[str, list[float]] = {"null": [], "1": []}
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.rounds):
            for parallel, taken in times.items():
                taken.append(seconds_of(options.jobs, options.steps, parallel, Path(place, f"{parallel}-{number}")))
    packed, alone = (statistics.median(taken) for taken in times.values())
    print(f"{options.jobs} jobs of {options.steps} steps on {cores} cores")
    print(f"side by side:        {packed:6.1f} s")
    print(f"one after the other: {alone:6.1f} s, with {cores} threads each")
    print(f"one after the other / side by side: {alone / packed:.2f}")


if __name__ == "__main__":
    main()
