"""Somebody who looks at a terminal: a pseudo-terminal sees all that is drawn."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time

from tests.conftest import clean_environment

__all__ = ["on_a_terminal"]


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
