"""F18: after a failure, stray ranks kept cards busy: `pkill -f python`.

Ranks that a shell script starts in the background do not notice that one of them is gone.

With exp any exit, Ctrl-C and SIGTERM included, leaves no worker behind within seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, clean_environment


def alive(mark: str) -> list[int]:
    """Processes that were started with ``mark`` in their environment, zombies left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"MARK={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if marked and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_stock_ranks_outlive_the_script_that_started_them(tmp_path):
    mark = f"{tmp_path}-stock"
    rank = "import time; time.sleep(60)"
    script = f"{sys.executable} -c '{rank}' & {sys.executable} -c '{rank}' & wait"
    shell = subprocess.Popen(["bash", "-c", script], env=clean_environment(MARK=mark))
    deadline = time.monotonic() + 60
    while len(alive(mark)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    shell.terminate()
    shell.wait()
    left = alive(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 2


@pytest.mark.slow
def test_exp_leaves_none(exp):
    number = signal.SIGTERM  # others: tests/launcher/test_torchrun.py
    mark = f"{exp.folder}-exp"
    settings = [*TINY, "max_steps=4000", "max_epochs=100", "checkpoint.every_steps=2", "nproc=2", "output_dir=run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "exp", *settings],
        cwd=exp.folder,
        env=clean_environment(MARK=mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not list(exp.path("run").glob("checkpoints/step_*.pth")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(alive(mark)) >= 4  # the command, torch's agent, two ranks
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert alive(mark) == []
    assert process.returncode == 128 + number
    assert errors.splitlines()[0].startswith(f"error: interrupted by {number.name}")
