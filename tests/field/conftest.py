from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import TINY, clean_environment

CARDS = [*(setting for setting in TINY if setting != "backend=cpu"), "backend=gcu", "backend.simulate=true"]
"""A tiny training on simulated cards."""

NO_DROPOUT = "model.attention_dropout=0"
"""Each rank draws its own dropout; without it, losses do not depend on their number."""

JOIN = """
import os, sys, warnings, torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
warnings.simplefilter("ignore")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def join(name):
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=240))
"""
"""Beginning of a user's script that is one of several ranks."""

CARD = """
import torch, torch_gcu
plugin, kind = (torch.gcu, "gcu") if hasattr(torch, "gcu") else (torch_gcu, "xla")  # the current, the legacy generation
"""
"""Beginning of a user's script that computes on a card."""

OWN_GCU = """
import os
from exp.backends_registry import create_backend
Gcu = type(create_backend({"_target_": "gcu", "name": "gcu"}))  # the class for cards of this torch's generation
"""
"""Beginning of a module with a backend of the user's own, derived from the one for GCU cards."""


class Ended(NamedTuple):
    """How a stock script ended: a process's return code, and what it printed."""

    returncode: int
    printed: str

    @property
    def last(self) -> str:
        """The last line: of an error, what it says."""
        return self.printed.rstrip().splitlines()[-1]


class Run(NamedTuple):
    """A run of exp that several rows look at."""

    folder: Path
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    @property
    def losses(self) -> dict[int, float]:
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return {record["step"]: record["loss"] for record in records if record["split"] == "train"}

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank{rank}.log").read_text()


@pytest.fixture(scope="session")
def eight_cards(tmp_path_factory) -> Run:
    """A training on eight simulated cards, made once, in a shell where a job's variables are half set."""
    folder = tmp_path_factory.mktemp("eight")
    done = subprocess.run(
        [sys.executable, "-m", "exp", *CARDS, NO_DROPOUT, "nproc=8", "report_placement=true", "output_dir=run"],
        cwd=folder,
        env=clean_environment(WORLD_SIZE="2", LOCAL_RANK="0"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Run(folder / "run", done.stdout, done.stderr)


@pytest.fixture
def stock(tmp_path):
    """Runs a user's script without exp: real processes, one per rank; with a simulated card on its path if asked.

    ``begin`` is put before the script: :data:`JOIN`, :data:`CARD` or both.
    """

    def run(
        script: str, world_size: int = 1, card: bool = False, timeout: float = 90, begin: str = "", **environment: str
    ) -> list[Ended]:
        source = tmp_path / "stock.py"
        source.write_text(begin + textwrap.dedent(script))
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

    def write(code: str, begin: str = "") -> dict[str, str]:
        (exp.folder / "lib").mkdir(exist_ok=True)
        (exp.folder / "lib" / "mine.py").write_text(begin + textwrap.dedent(code))
        return {"PYTHONPATH": str(exp.folder / "lib")}

    return write
