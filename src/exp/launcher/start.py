"""Starts a module of ours in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import IO, Mapping

__all__ = ["start_module"]


def start_module(
    module: str, *arguments: str, environment: Mapping[str, str], stderr: IO[bytes], stdout: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """``python -m module arguments...`` in a session of its own, with nothing to read.

    Args:
        module: its dotted name.
        arguments: its own.
        environment: all of the process's.
        stderr: where that goes.
        stdout: where that goes; None: where this process's does.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )
