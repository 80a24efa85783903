"""What is drawn on a terminal while runs are elsewhere: a pseudo-terminal sees all that is drawn."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time

from tests.conftest import TINY, clean_environment


def on_a_terminal(folder, *arguments: str, **extra: str) -> tuple[int, str]:
    """Exit code of ``python -m exp``, and everything that was drawn, without the control sequences."""
    ours, theirs = pty.openpty()
    environment = clean_environment(TERM="xterm-256color", COLUMNS="120", LINES="40", **extra)
    command = [sys.executable, "-m", "exp", *arguments]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn, deadline = b"", time.monotonic() + 280
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.5)[0]:
            try:
                drawn += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    return process.wait(timeout=120), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode(errors="replace"))


def test_a_sweep(exp):
    sweep = ["-m", *TINY, "output_dir=sweep", "optim.lr=0.001,1e30", "sweep.parallel_jobs=1"]
    code, drawn = on_a_terminal(exp.folder, *sweep)
    assert code == 1, drawn
    assert re.search(r"0 of 2 ended, 1 under way, 1 waiting, 0 failed +0:00:\d\d", drawn)
    assert re.search(r"  0 optim.lr=0.001  running.*0:00:\d\d", drawn)
    assert re.search(r"error: 1 optim.lr=1e.?30: .*loss is nan", drawn)
    assert "1 completed, 1 failed" in drawn
    assert "Traceback" not in drawn
