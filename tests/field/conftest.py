from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest

from tests.conftest import TINY, clean_environment

CARDS = [*(setting for setting in TINY if setting != "backend=cpu"), "backend=gcu", "backend.simulate=true"]
"""A tiny training on simulated cards."""

JOIN = """
import os, sys, warnings, torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
warnings.simplefilter("ignore")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def join(name):
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
"""
"""Beginning of a user's script that is one of several ranks."""


class Ended(NamedTuple):
    """How a stock script ended: a process's return code, and what it printed."""

    returncode: int
    printed: str


@pytest.fixture
def stock(tmp_path):
    """Runs a user's script without exp: real processes, one per rank; with a simulated card on its path if asked."""

    def run(script: str, world_size: int = 1, card: bool = False, timeout: float = 90, **environment: str):
        source = tmp_path / "stock.py"
        source.write_text(textwrap.dedent(script))
        path = os.environ.get("PYTHONPATH", "")
        if card:
            import simulated_gcu
            from simulated_gcu.build import extension

            extension()
            path = os.pathsep.join([str(simulated_gcu.path()), path])
        workers = [
            subprocess.Popen(
                [sys.executable, str(source)],
                env=clean_environment(
                    **{
                        "PYTHONPATH": path,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world_size),
                        "STORE": str(tmp_path / "store"),
                        **environment,
                    }
                ),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            printed = [worker.communicate(timeout=timeout)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        return [Ended(worker.returncode, text) for worker, text in zip(workers, printed)]

    return run


@pytest.fixture
def library(exp):
    """Writes a user's own module ``mine`` beside the run, and gives the setting that makes it importable."""

    def write(code: str) -> dict[str, str]:
        (exp.folder / "lib").mkdir(exist_ok=True)
        (exp.folder / "lib" / "mine.py").write_text(textwrap.dedent(code))
        return {"PYTHONPATH": str(exp.folder / "lib")}

    return write
