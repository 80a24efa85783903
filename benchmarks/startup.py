"""Seconds from Enter to the end of the first training step, against a plain script with the same imports under
torchrun.

On the CPU, one thread per process, in turns (A B A B ...); the medians are compared. The plain script reads the same
file with pandas, and trains a linear layer with DDP, which is less than ours does before its first step.

    python benchmarks/startup.py [--nproc 1 2 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLAIN = """
import sys
import torch
import torch.distributed as dist
import hydra, mmengine.runner, pandas
from torch.nn.parallel import DistributedDataParallel

pandas.read_csv(sys.argv[2])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write("done")
dist.barrier()
dist.destroy_process_group()
"""

TINY = ["data.lookback=96", "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "global_batch_size=32",
        "max_steps=1", "log_every=1", "plots=false"]  # fmt: skip


def seconds_until(command: list[str], sign: Path) -> float:
    """Seconds from the start of a command until a file of its run has content; waits for the command's end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (sign.is_file() and sign.stat().st_size):
        if process.poll() not in (None, 0):
            raise SystemExit(f"{' '.join(command)} failed:\n{process.communicate()[1]}")
        time.sleep(0.005)
    taken = time.perf_counter() - began
    process.communicate()
    return taken


def ours(nproc: int, folder: Path) -> float:
    """The default experiment at a tiny size."""
    command = [sys.executable, "-m", "exp", "backend=cpu", *TINY, f"nproc={nproc}", f"output_dir={folder / 'run'}"]
    return seconds_until(command, folder / "run" / "metrics.jsonl")


def plain(nproc: int, folder: Path) -> float:
    """The plain script under torchrun."""
    (folder / "plain.py").write_text(PLAIN)
    spec = importlib.util.find_spec("exp.sample_data.ett")
    assert spec is not None
    data = Path(next(iter(spec.submodule_search_locations or []))) / "ETTh1.csv"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return seconds_until([*command, str(folder / "plain.py"), str(folder / "done"), str(data)], folder / "done")


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for nproc in arguments.nproc:
        pairs = []
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
                pairs.append((ours(nproc, Path(one)), plain(nproc, Path(other))))
        mine, reference = (statistics.median(column) for column in zip(*pairs))
        print(
            f"nproc={nproc}: exp {mine:5.1f} s, torchrun of a plain script {reference:5.1f} s; {mine / reference:.2f} x"
        )


if __name__ == "__main__":
    main()
