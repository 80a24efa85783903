"""Time and memory of each further job of a sweep until it is written, against Hydra alone composing the same job.

The sweep is exp's own command, in this process: jobs are composed, frozen and written, and reported at the end. Only
training is left out: each job gets a result and some lines of losses instead. Hydra alone composes and writes nothing.

    python benchmarks/sweep_freeze.py [--jobs 1000]
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Sequence
from unittest import mock

from hydra import compose, initialize_config_module

from exp import cli
from exp.config.sources import register
from exp.launcher.outcome import Outcome
from exp.runs.files import to_json, write_json
from exp.sweep import sweep

STEPS = 20


def pretend(runs: Sequence[Any], parallel_jobs: int | None, watcher: Any) -> tuple[dict[int, Outcome], None]:
    """Write the files of a finished job, in place of training."""
    del parallel_jobs, watcher
    for number, run in enumerate(runs):
        mse = 0.4 + number % 97 / 1000
        result = {"status": "completed", "task": "train", "experiment": run.config.name, "metrics": {"mse": mse},
                  "metric_name": "mse", "metric": mse, "greater_is_better": False, "backend": "cpu", "epochs": 1,
                  "steps": STEPS, "samples_per_second": 1000.0, "wall_s": 1.0, "error": None}  # fmt: skip
        write_json(run.folder.result, result)
        lines = [{"split": "train", "step": step, "epoch": 0, "loss": mse + 1 / step} for step in range(1, STEPS + 1)]
        run.folder.metrics.write_text("".join(f"{to_json(line)}\n" for line in lines), encoding="utf-8")
    return {number: Outcome() for number in range(len(runs))}, None


def measure(jobs: int, folder: Path) -> tuple[float, float, float]:
    """CPU seconds until all jobs are written, CPU seconds of the sweep's end, and peak memory in MiB."""
    marks: list[float] = []

    def mark(*arguments: Any) -> tuple[dict[int, Outcome], None]:
        marks.append(time.process_time())
        outcomes = pretend(*arguments)
        marks.append(time.process_time())
        return outcomes

    began = time.process_time()
    command = ["exp", "-m", "backend=cpu", f"seed=range(0,{jobs})", "optim.lr=1e-3", f"output_dir={folder}"]
    with mock.patch.object(sys, "argv", command), mock.patch.object(sweep, "run_locally", mark):
        code = cli.main()
    assert code == 0, code
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return marks[0] - began, time.process_time() - marks[1], memory


def hydra_alone(jobs: int) -> float:
    """CPU seconds in which Hydra composes one job of the same sweep, without writing it."""
    register()
    with initialize_config_module("exp.conf", version_base="1.3"):
        compose("config", ["backend=cpu", "seed=0", "optim.lr=1e-3"])  # reads and caches the files
        began = time.process_time()
        for seed in range(jobs):
            compose("config", ["backend=cpu", f"seed={seed}", "optim.lr=1e-3"])
    return (time.process_time() - began) / jobs


def main() -> None:
    """Print the cost of each further job, that of Hydra alone, and that of the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    jobs = parser.parse_args().jobs
    with tempfile.TemporaryDirectory() as place:
        one, _, before = measure(1, Path(place, "one"))
        all_jobs, report, after = measure(jobs, Path(place, "all"))
    further, reference = (all_jobs - one) / max(jobs - 1, 1), hydra_alone(min(jobs, 20))
    print(f"{jobs} jobs: {all_jobs:.1f} s of CPU until they are written; one job {one:.1f} s")
    print(f"a further job: {further * 1e3:.1f} ms, {(after - before) / jobs * 1024:.0f} KiB")
    print(f"Hydra alone composes it in {reference * 1e3:.1f} ms; exp / Hydra alone: {further / reference:.2f}")
    print(f"report of {jobs} runs: {report:.1f} s of CPU")
    print(f"memory at the most: {after:.0f} MiB; for one job {before:.0f} MiB")


if __name__ == "__main__":
    main()
