"""One job of a sweep in a process of its own, which :mod:`exp.sweep.packing` starts.

``-m exp.launcher.job FOLDER TOKEN``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from exp import console
from exp.errors import ExpError
from exp.execute import execute
from exp.frozen import FrozenRun
from exp.launcher.processes import die_with_parent
from exp.runfolder import RunFolder, write_json
from exp.runlock import RunLock

__all__ = ["ENDED", "PARENT_VARIABLE", "main"]

PARENT_VARIABLE = "EXP_SWEEP_PID"
"""Environment variable that tells a job which process must not die before it."""

ENDED = "ended.json"
"""In ``logs``: the exit code, as exp has decided on it; what the process ends with, code of the user's may decide."""


def main(folder: str, token: str) -> int:
    """Run what is frozen in ``folder``, whose lock the sweep has under ``token``; returns the exit code."""
    die_with_parent(signal.SIGTERM, int(os.environ[PARENT_VARIABLE]))
    lock = RunLock(Path(folder), token or None)
    try:
        lock.take_over()
        run = FrozenRun.load(RunFolder(folder))
        run.lock = lock
        code = execute(run).exit_code
    except ExpError as error:
        console.error(str(error))
        code = error.exit_code
    finally:
        lock.release()
    write_json(RunFolder(folder).logs / ENDED, {"pid": os.getpid(), "exit_code": code})
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
