"""What the tests of behaviour share: settings of trainings that take seconds, and runs that many tests read.

These tests know exp by its command line, its files and ``exp.open_run/open_sweep/run`` alone.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterable

import pytest

from tests.conftest import TINY, Forked, read_strictly, run_exp, write_files

ROOT = Path(__file__).parents[2]

BACKBONE = [
    "model.backbone.embed_dim=16",
    "model.backbone.depth=2",
    "model.backbone.num_heads=2",
    "model.backbone.patch_size=16",
]
SHORT = [
    "max_steps=4",
    "log_every=1",
    "schedule.warmup_steps=2",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=4",
    "plots=false",
]

TOY_DATA = """
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from exp.data.base import Data
from exp.metrics import SampleMetric
from exp.models.base import Model

def sleeps(seconds, rank):
    # A negative number is for all ranks.
    if seconds < 0 or seconds and dist.is_initialized() and dist.get_rank() == rank:
        time.sleep(abs(seconds))

class Rows(Dataset):
    def __init__(self, n, seconds=0.0):
        self.x, self.seconds = torch.randn(n, 8, generator=torch.Generator().manual_seed(n)), seconds

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        sleeps(self.seconds, 1)
        return {"x": self.x[index], "y": self.x[index].sum(-1)}

class Error(SampleMetric):
    names, greater_is_better = ("error",), False

    def per_sample(self, outputs, batch):
        return (outputs - batch["y"]).abs()

class Toy(Data):
    def __init__(self, name, slow=0.0):
        self.train, self.val, self.test = Rows(240, slow), Rows(16), Rows(17)

    def metrics(self, detailed=False):
        return Error()
"""
"""A module of a user: numbers and their sum; ``slow`` seconds for each of rank 1, or of all ranks if it is negative."""

FORECAST = [*TINY, "log_every=1", "checkpoint.every_steps=2"]
"""A forecasting training of seconds: ETTh1 in short windows, a small TimeBridge."""

STEADY = [*FORECAST, "model.attention_dropout=0"]
"""The same without dropout: its numbers do not depend on how many ranks there are."""

LONG = [*TINY, "max_steps=4000", "max_epochs=1000", "val_every=1000", "checkpoint.every_epochs=0"]
"""A forecasting training that ends only when somebody ends it."""

SCENES = [
    "experiment=dinov3_eurosat",
    "backend=cpu",
    *BACKBONE,
    *SHORT,
    "data.size=32",
    "data.split_ratio=[0.4,0.3,0.3]",
    "global_batch_size=8",
]
"""Scene classification on EuroSAT, a small DINOv3."""

TILES = [
    "experiment=dinov3_dubai",
    "backend=cpu",
    *BACKBONE,
    *SHORT,
    "model.head.channels=16",
    "model.window=96",
    "val_every=2",
    "data.size=64",
    "global_batch_size=8",
    "data.splits={train:['tile1/*_00[1-3].*','tile2/*_00[1-3].*','tile6/*_00[1-3].*'],val:['tile5/*_008.*']}",
]
"""Segmentation of Dubai's tiles, a small DINOv3."""

CARDS = [*(word for word in STEADY if word != "backend=cpu"), "backend=gcu", "backend.simulate=true"]
"""The steady training on simulated cards of this torch's generation."""

_SHARED = {
    "eight_cards": [*CARDS, "nproc=8", "report_placement=true"],
    "forecast": FORECAST,
    "forecast_bf16": [*FORECAST, "precision=bf16", "optim.clip_grad_norm=1.0"],
    "steady": STEADY,
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


@pytest.fixture
def start(tmp_path) -> Iterable[Callable[..., Forked]]:
    """Starts ``python -m exp`` in the test's own folder, in a session of its own; what is left in the end is killed."""
    started: list[Forked] = []

    def begin(*arguments: str, **options: Any) -> Forked:
        started.append(Forked(tmp_path, *arguments, new_session=True, **options))
        return started[-1]

    yield begin
    for process in started:
        for pid in family(process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.communicate()


@pytest.fixture
def page(tmp_path) -> Callable[..., None]:
    """Writes the listings of a page of docs: its blocks of a language, in order, under these names."""

    def write(name: str, **files: list[str]) -> None:
        (found,) = (ROOT / "docs").rglob(f"{name}.md")
        write_files(found, tmp_path, **files)

    return write


def wait_for(condition: Callable[[], Any], *processes: Any, seconds: float = 240) -> None:
    """Until it holds; none of the processes may end before."""
    deadline = time.monotonic() + seconds
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def has_steps(run: Path, at_least: int = 1) -> Callable[[], bool]:
    """Whether the run has logged as many training steps."""
    file = run / "metrics.jsonl"
    return lambda: file.is_file() and file.read_text().count('"train"') >= at_least


def family(pid: int) -> dict[int, str]:
    """A process and all below it that live, and what each calls itself."""
    parents, names = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            head, _, rest = (entry / "stat").read_text().rpartition(")")
        except OSError:
            continue
        if rest.split()[0] != "Z":
            parents[int(entry.name)], names[int(entry.name)] = int(rest.split()[1]), head.partition("(")[2]
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return {each: names[each] for each in found if each in names}


def gone(pids: Iterable[int], within_s: float = 10.0) -> bool:
    """Whether all of the processes end within a while; a zombie has ended.

    Python's resource tracker ends a moment after the process that it has cleaned up after.
    """

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    pids, deadline = list(pids), time.monotonic() + within_s
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(lives, pids))


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def ran(exp: Any, *words: str, code: int = 0, **environment: str) -> Any:
    """A command that has to end with this code."""
    done = exp(*words, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


ONE_BY_ONE = """
import contextlib, io, json, runpy, sys
found = []
for line in json.loads(sys.argv[1]):
    sys.argv, code, said, printed = ["exp", *line], 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        try:
            runpy.run_module("exp", run_name="__main__")
        except SystemExit as end:
            code = end.code
    found.append([code, said.getvalue(), printed.getvalue()])
print(json.dumps(found))
"""


def one_by_one(folder: Path, lines: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit code, errors and output of each line as ``python -m exp <line>``, in one process; for what only composes."""
    process = Forked(folder, json.dumps(lines), script=ONE_BY_ONE)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def first_line(done: Any) -> str:
    """What a failed command says first; it is no traceback."""
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[0]


def result(run: Path) -> Any:
    """The content of the run's ``result.json``."""
    return read_strictly((run / "result.json").read_text())


def losses(run: Path) -> dict[int, float]:
    """The training loss of each logged step."""
    records = [read_strictly(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["split"] == "train"}
