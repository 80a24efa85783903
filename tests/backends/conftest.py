from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import clean_environment

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
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(rank), str(world_size), backend, str(tmp_path)],
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
