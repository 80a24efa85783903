"""Runs one job of a sweep: ``python -m exp.sweep.job FOLDER PARENT TOKEN``, started by :mod:`exp.sweep.packing`."""

from __future__ import annotations

import signal
import sys

from exp import console
from exp.errors import ExpError
from exp.frozen import FrozenRun
from exp.launcher.processes import die_with_parent
from exp.runs.folder import RunFolder
from exp.runs.lock import RunLock

__all__ = ["main"]


def main(run_dir: str, parent: str, token: str) -> int:
    """Run a frozen job; return the exit code.

    Args:
        run_dir: the run folder.
        parent: process id of the sweep, which this process must not outlive.
        token: of the lock of the run folder, which the sweep passes to this process.
    """
    die_with_parent(signal.SIGTERM, int(parent))
    try:
        run = FrozenRun.load(RunFolder(run_dir))
        run.lock = RunLock(run.folder.path, token)
        run.lock.acquire()
        return run.execute().exit_code
    except ExpError as error:
        console.error(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
