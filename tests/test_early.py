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

CODES = {"SIGUSR2": 75, "SIGTERM": 143, "SIGHUP": 129, "SIGINT": 130}
SAYS = "error: ended by {} before anything was begun; give the same command again\n"

# The signal comes while backend and run are looked at: before the folder is written, or after it.
BACKEND = """
import os, signal, time
from exp.backends.cpu import CpuBackend

def end():
    os.kill(os.getpid(), signal.{signal})
    time.sleep(60)

class Mine(CpuBackend):
    def prepare(self):
        {before}
    @property
    def title(self):
        assert os.path.isfile("run/config.yaml")
        {after}
"""


@pytest.mark.parametrize("name", ["SIGUSR2", "SIGINT"])
def test_while_the_command_line_is_imported(name, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "exp", *TINY], cwd=tmp_path, env=clean_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    status, wanted = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGUSR2 - 1)
    deadline = time.monotonic() + 60
    while not int(re.findall(r"SigCgt:\t(\w+)", status.read_text())[0], 16) & wanted:
        assert time.monotonic() < deadline
    process.send_signal(getattr(signal, name))
    said = process.communicate(timeout=60)
    assert process.returncode == CODES[name], said
    assert said == ("", "error: interrupted\n" if name == "SIGINT" else SAYS.format(name))
    assert list(tmp_path.iterdir()) == []


# Python itself ends by SIGINT, whatever its exit code, once a KeyboardInterrupt has passed through such an exec: that
# of a dataclass, for instance, of which importing the command line makes hundreds.
WITHIN_TEXT = """
import os, signal, sys, time
from exp import early

with early.listening():
    try:
        exec("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    except KeyboardInterrupt as interrupt:
        sys.exit(early.tell(interrupt))
"""


def test_while_python_executes_text(tmp_path):
    (tmp_path / "within_text.py").write_text(WITHIN_TEXT)
    done = subprocess.run(
        [sys.executable, "-m", "within_text"], cwd=tmp_path, env=clean_environment(), text=True, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize(
    ("name", "when"),
    [("SIGUSR2", "before"), ("SIGTERM", "after"), ("SIGHUP", "before"), ("SIGINT", "after")],
)
def test_while_a_run_is_checked_and_written(name, when, exp):
    at = {"before": "pass", "after": "return 'mine'", when: "end()"}
    (exp.folder / "mine.py").write_text(BACKEND.format(signal=name, **at))
    there = set(exp.folder.iterdir())
    done = exp(*TINY[1:], "backend=cpu", "backend._target_=mine.Mine", "output_dir=run", "nproc=2")
    assert done.returncode == CODES[name], done.stderr
    assert done.stderr == ("error: interrupted\n" if name == "SIGINT" else SAYS.format(name))
    assert {path for path in exp.folder.iterdir() if path.name != "__pycache__"} == there


def test_a_folder_that_was_there_is_as_it_was(exp):
    exp.train("run", "max_steps=1")
    files = {path: path.read_bytes() for path in exp.path("run").rglob("*") if path.is_file()}
    (exp.folder / "mine.py").write_text(BACKEND.format(signal="SIGUSR2", before="pass", after="end()"))
    own = ["backend=cpu", "backend._target_=mine.Mine", "output_dir=run", "resume=auto", "max_epochs=2", "max_steps=9"]
    done = exp(*TINY[1:], *own)
    assert done.returncode == 75, done.stderr
    assert {path: path.read_bytes() for path in exp.path("run").rglob("*") if path.is_file()} == files


def test_while_a_sweep_is_composed(exp):
    name = "SIGTERM"
    source = BACKEND.format(signal=name, before="pass", after="pass")
    (exp.folder / "mine.py").write_text(f"{source}\n    def __init__(self, **given):\n        end()\n")
    done = exp(*TINY[1:], "backend=cpu", "backend._target_=mine.Mine", "-m", "seed=1,2", "output_dir=sweep")
    assert done.returncode == CODES[name], done.stderr
    assert done.stderr == f"error: ended by {name}\n"
    assert not exp.path("sweep").exists()
