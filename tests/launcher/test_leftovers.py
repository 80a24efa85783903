"""What a run leaves on the machine, however it ends: nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, clean_environment


def processes_of(mark: str) -> dict[int, str]:
    """Living processes with ``mark`` in their environment, and their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def semaphores_of(pids) -> set[Path]:
    """Named semaphores, and other shared memory, that the processes use."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return found


def files_in(temporary: Path) -> list[Path]:
    """But for torch's cache, which all runs of a user share."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def scratch_of(pids) -> set[Path]:
    """The private folder of the job that the processes belong to."""
    found = set()
    for pid in pids:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {Path(each[len("EXP_SCRATCH=") :].decode()) for each in variables if each.startswith(b"EXP_SCRATCH=")}
    return found


# Below a folder with a name of 100 letters no socket can be made: neither the fork server's nor those of the loaders.
@pytest.mark.parametrize(
    ("victim", "letters"),
    [(None, 1), ("parent", 100), *(pytest.param(one, 1, marks=pytest.mark.slow) for one in ("parent", "agent"))],
)
def test_nothing_is_left_behind(tmp_path, victim, letters):
    temporary = tmp_path / ("t" * letters)
    temporary.mkdir()
    mark = f"TEST_MARK={tmp_path}"
    steps = ["max_steps=4"] if victim is None else ["max_steps=4000", "max_epochs=1000", "val_every=1000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "exp", *TINY, *steps, "nproc=2", "data.num_workers=1", "output_dir=run"],
        cwd=tmp_path,
        env=clean_environment(TEST_MARK=str(tmp_path), TMPDIR=str(temporary)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    semaphores: set[Path] = set()
    while process.poll() is None and not (metrics.is_file() and '"train"' in metrics.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
        semaphores |= semaphores_of(processes_of(mark))
    running = processes_of(mark)
    assert semaphores, "the workers' agent uses some"
    scratch = scratch_of(running)
    assert victim is None or len(scratch) == 1
    assert {path.parent == temporary for path in scratch} <= {letters == 1}
    assert {path.stat().st_mode & 0o777 for path in scratch if path.exists()} <= {0o700}
    if victim is not None:
        agent = next(pid for pid in running if Path(f"/proc/{pid}/comm").read_text() == "exp-agent\n")
        os.kill(process.pid if victim == "parent" else agent, signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == {None: 0, "parent": -signal.SIGKILL, "agent": 1}[victim], said
    deadline = time.monotonic() + 30
    while left := [*processes_of(mark).items(), *files_in(temporary), *filter(Path.exists, {*semaphores, *scratch})]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
def test_sigterm_to_every_process_loses_no_step(tmp_path):
    """As ``scancel`` and ``scontrol requeue`` send it: to all that belong to the job's step, and not just to one."""
    mark = f"TEST_MARK={tmp_path}"
    process = subprocess.Popen(
        [
            sys.executable, "-m", "exp", *TINY, "max_steps=4000", "max_epochs=1000", "val_every=1000", "nproc=2",
            "checkpoint.every_epochs=0", "launcher=submitit", "launcher.cluster=debug", "output_dir=run",
        ],
        cwd=tmp_path,
        env=clean_environment(TEST_MARK=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and '"train"' in metrics.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    for pid in processes_of(mark):
        os.kill(pid, signal.SIGTERM)
    said = "".join(process.communicate(timeout=120))
    assert process.returncode == 75, said
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step_*.pth")
    assert f"preempted after step {int(saved.stem[5:])}" in said
