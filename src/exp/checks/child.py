"""``python -m exp`` in a process that cannot outlive this one, nor its time."""

from __future__ import annotations

import os
import runpy
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Sequence

from hydra.core.hydra_config import HydraConfig

from exp.launcher.processes import JOB_VARIABLE, die_with_parent, kill_job, start_module

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Ended", "run_exp", "searched"]

_POLL_S = 0.1
_PATIENCE_S = 15.0  # a launcher gives its workers some seconds to end


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        code: exit code; negative: the signal that killed it.
        late: whether it was ended because its time was over.
        error: the last one that it printed, its first line; empty: none.
    """

    code: int
    late: bool = False
    error: str = ""


def searched() -> list[str]:
    """Where the user's own YAML files lie, for a child."""
    state = HydraConfig.get()
    folders = [source.path for source in state.runtime.config_sources if source.provider == "command-line"]
    paths = [each for each in state.overrides.hydra if each.startswith("hydra.searchpath=")]
    return [*(argument for folder in folders for argument in ("--config-dir", folder)), *paths]


def run_exp(arguments: Sequence[str], output: Path, limit_s: float, stop: Callable[[], bool]) -> Ended:
    """Run ``python -m exp`` to its end, or to the end of its time.

    Args:
        arguments: overrides, as on the command line.
        output: what it prints is added to this file.
        limit_s: longest that it may take, in seconds.
        stop: called again and again; true: it is to be ended.
    """
    mark = secrets.token_hex(8)
    environment = {**os.environ, JOB_VARIABLE: mark}
    environment.pop("HYDRA_FULL_ERROR", None)  # which the command line sets while Hydra runs this task
    deadline = time.monotonic() + limit_s
    with output.open("ab") as log:
        place = log.tell()
        process = start_module(
            "exp.checks.child",
            str(os.getpid()),
            *searched(),
            *arguments,
            environment=environment,
            stdout=log,
            stderr=log,
        )
    late = False
    try:
        while process.poll() is None and not (late or stop()):
            late = time.monotonic() > deadline
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:  # in order, if it can
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
        kill_job(mark)
        process.wait()
    lines = output.read_bytes()[place:].decode(errors="replace").splitlines()
    errors = [line[7:] for line in lines if line.startswith("error: ")]
    return Ended(process.returncode, late, errors[-1] if errors else "")


if __name__ == "__main__":  # ``-m exp.checks.child PARENT ARGUMENTS...`` is ``-m exp ARGUMENTS...``
    die_with_parent(signal.SIGTERM, int(sys.argv[1]))
    sys.argv[:] = ["exp", *sys.argv[2:]]
    runpy.run_module("exp", run_name="__main__")
