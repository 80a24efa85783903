from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

# A shell that puts the tests into the background (`pytest &` in a script) has them, and every process under them,
# ignore SIGINT; then no test of Ctrl-C could mean anything.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A training of the default experiment that takes seconds: few short windows, a tiny model.
TINY = [
    "backend=cpu",
    "data.lookback=96",
    "model.d_model=16",
    "model.d_ff=16",
    "model.num_heads=2",
    "global_batch_size=32",
    "max_epochs=1",
    "max_steps=4",
    "log_every=2",
    "plots=false",  # matplotlib takes longer than the training
]


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a child: this one's, less what would make it someone's rank; one thread per process."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_BACKEND")
    environment = {key: value for key, value in os.environ.items() if key not in drop}
    return {**environment, "OMP_NUM_THREADS": "1", **extra}


@pytest.fixture
def exp(tmp_path):
    """Runs ``python -m exp`` in an empty folder; ``exp.result(name)`` reads a run's result."""

    class Exp:
        folder = tmp_path

        def __call__(self, *arguments: str, timeout: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "exp", *arguments],
                cwd=tmp_path,
                env=clean_environment(**extra),
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )

        def train(self, name: str, *arguments: str, **extra: str) -> dict:
            done = self(*TINY, f"output_dir={name}", *arguments, **extra)
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            return self.result(name)

        def result(self, name: str) -> dict:
            return json.loads((tmp_path / name / "result.json").read_text())

        def losses(self, name: str) -> dict[int, float]:
            lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            return {record["step"]: record["loss"] for record in records if record["split"] == "train"}

        def path(self, name: str) -> Path:
            return tmp_path / name

    return Exp()


# What every rank begins with: its place, a backend by name, and the engine's way of joining the process group.
BEGIN = """
import json, sys
from datetime import timedelta
rank, world_size, name, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
from exp.backends_registry import create_backend
backend = create_backend({"_target_": name, "name": name})
def join():
    import torch.distributed as dist
    from exp.engine.distributed import Distributed
    store = dist.FileStore(folder + "/store", world_size)
    return Distributed.create(backend, store, rank, world_size, timedelta(seconds=30))
"""


@pytest.fixture
def ranks(tmp_path):
    """Runs a script in real processes, one per rank; gives what each printed last, as JSON, by rank."""

    def run(script: str, world_size: int = 1, backend: str = "cpu", before: str = "", **environment: str) -> list:
        program = before + BEGIN + textwrap.dedent(script)
        folder = tempfile.mkdtemp(dir=tmp_path)
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(rank), str(world_size), backend, folder],
                env=clean_environment(**environment),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            done = [worker.communicate(timeout=60) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        for worker, (_, said) in zip(workers, done):
            assert worker.returncode == 0, said
        return [json.loads(printed.splitlines()[-1]) for printed, _ in done]

    return run
