"""Starts a module of ours in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import IO, Callable, Mapping, Optional

__all__ = ["Way", "start_module", "start_modules_by"]

Way = Callable[..., Optional["subprocess.Popen[bytes]"]]
"""Called as :func:`start_module` is; None: it has no process for this."""

_ways: list[Way] = []


def start_modules_by(way: Way) -> None:
    """Have :func:`start_module` ask ``way`` first.

    For a process that has others at hand which have imported torch already, as those have that are forked in our tests.
    """
    _ways.append(way)


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
    for way in _ways:
        process = way(module, *arguments, environment=environment, stderr=stderr, stdout=stdout)
        if process is not None:
            return process
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )
