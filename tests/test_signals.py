"""A signal while a run is being composed, checked and written: one line, the documented code, and no folder."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, clean_environment

CODES = {"SIGUSR2": 75, "SIGTERM": 143, "SIGHUP": 129}
SAYS = "error: interrupted by {}\n"
MINE = [*TINY[1:], "backend=cpu", "backend._target_=mine.Mine"]

# The signal comes while the backend is looked at, or once the run's folder is written.
BACKEND = """
import os, signal, time
from exp.backends.cpu import CpuBackend
def end(at):
    if at == "{at}":
        os.kill(os.getpid(), signal.{signal})
        time.sleep(60)
class Mine(CpuBackend):
    def unavailable_reason(self):
        end("checked")
    def __str__(self):
        assert os.path.isfile("run/config.yaml")
        end("written")
        return "mine"
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """``python`` with these arguments, anew: how it imports is tested."""
    return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=clean_environment(), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def test_while_the_command_line_is_imported(tmp_path):
    process = start(tmp_path, "-m", "exp", *TINY)
    status, wanted = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGUSR2 - 1)
    deadline = time.monotonic() + 60
    while not int(re.findall(r"SigCgt:\t(\w+)", status.read_text())[0], 16) & wanted:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGUSR2)
    assert process.communicate(timeout=60) == ("", SAYS.format("SIGUSR2"))
    assert process.returncode == CODES["SIGUSR2"]
    assert list(tmp_path.iterdir()) == []


def contents(folder: Path) -> dict:
    found = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {path: path.read_bytes() if path.is_file() else None for path in found}


@pytest.mark.parametrize(
    ("name", "at", "there"),
    [("SIGHUP", "checked", False), ("SIGTERM", "written", False), ("SIGUSR2", "written", True)],
)
def test_while_a_run_is_checked_and_written(exp, name, at, there):
    """Also in the folder of an earlier run, which stays as it was."""
    if there:
        exp.train("run", "max_steps=1")
    (exp.folder / "mine.py").write_text(BACKEND.format(signal=name, at=at))
    before = contents(exp.folder)
    done = exp(*MINE, "output_dir=run", "resume=auto", "max_epochs=2", "max_steps=9")
    assert (done.returncode, done.stderr) == (CODES[name], SAYS.format(name))
    assert contents(exp.folder) == before
