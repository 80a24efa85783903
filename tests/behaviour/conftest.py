"""What the tests of behaviour share: settings of trainings that take seconds, and runs that many tests read.

These tests know exp by its command line, its files and ``exp.open_run/open_sweep/run`` alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Callable

import pytest

from tests.conftest import TINY, read_strictly, run_exp

BACKBONE = ["model.embed_dim=16", "model.depth=2", "model.num_heads=2", "model.patch_size=16"]
SHORT = ["max_steps=4", "log_every=1", "schedule.warmup_steps=2", "checkpoint.every_steps=2", "plots=false"]

FORECAST = TINY
"""A forecasting training of seconds: ETTh1 in short windows, a small TimeBridge."""

SCENES = [
    "experiment=dinov3_eurosat",
    "backend=cpu",
    *BACKBONE,
    *SHORT,
    "data.size=32",
    "data.split=[0.4,0.3,0.3]",
    "global_batch_size=8",
]
"""Scene classification on EuroSAT, a small DINOv3."""

TILES = [
    "experiment=dinov3_dubai",
    "backend=cpu",
    *BACKBONE,
    *SHORT,
    "model.head_channels=16",
    "model.window=96",
    "val_every=2",
    "data.size=64",
    "global_batch_size=8",
    "data.parts={train:['tile1/*_00[1-3].*','tile2/*_00[1-3].*','tile6/*_00[1-3].*'],val:['tile5/*_008.*']}",
]
"""Segmentation of Dubai's tiles, a small DINOv3."""

_SHARED = {
    "forecast": FORECAST,
    "forecast_bf16": [*FORECAST, "precision=bf16"],
    "scenes": SCENES,
    "tiles": TILES,
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Callable[[str], Path]:
    """Gives the folder of a finished run that tests may read, never write: ``trained("forecast")``.

    Each is trained once for all workers of pytest; see ``_SHARED`` for the names.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root = root / "trained"
    root.mkdir(exist_ok=True)

    def get(name: str) -> Path:
        run, claim, failed = root / name, root / f"{name}.claim", root / f"{name}.failed"
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            while not (root / f"{name}.done").exists():
                assert not failed.exists(), failed.read_text()
                time.sleep(0.1)
            return run
        ended = run_exp(root, *_SHARED[name], f"output_dir={name}")
        if ended.returncode != 0:
            failed.write_text(f"{ended.stdout}\n{ended.stderr}")
            raise AssertionError(failed.read_text())
        (root / f"{name}.done").touch()
        return run

    return get


@pytest.fixture
def copy_of(trained, tmp_path) -> Callable[..., Path]:
    """A copy of a finished run in the test's own folder, to be spoilt or gone on with: ``copy_of("scenes", "run")``."""

    def copy(name: str, to: str = "run") -> Path:
        return Path(shutil.copytree(trained(name), tmp_path / to))

    return copy


@pytest.fixture
def python() -> list[str]:
    """``python -m exp`` as a command of its own, for what has to begin anew."""
    return [sys.executable, "-m", "exp"]


def result(run: Path) -> Any:
    """The content of the run's ``result.json``."""
    return read_strictly((run / "result.json").read_text())


def losses(run: Path) -> dict[int, float]:
    """The training loss of each logged step."""
    records = [read_strictly(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["split"] == "train"}
