"""Runs one job of a sweep: ``python -m exp.sweep.job FOLDER TOKEN PARENT``, started by :mod:`exp.sweep.packing`."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from exp import console
from exp.errors import EXIT_OK, EXIT_PREEMPTED, REFUSED, ExpError
from exp.frozen import FrozenRun
from exp.launcher.base import Outcome, log_file, outcome_file
from exp.launcher.processes import die_with_parent
from exp.runs.files import read_json, write_json
from exp.runs.folder import RunFolder
from exp.runs.lock import RunLock

__all__ = ["main"]


def main(run_dir: str, token: str, parent: str) -> int:
    """Run a frozen job and write its outcome file: code of the user may change the exit code of the process.

    Args:
        run_dir: the run folder.
        token: of the lock of the run folder, which the sweep holds.
        parent: process id of the sweep, which this process must not outlive.

    Returns:
        The exit code.
    """
    die_with_parent(signal.SIGTERM, int(parent))
    folder, lock, detail = RunFolder(run_dir), RunLock(Path(run_dir), token), None
    before = read_json(folder.result)
    try:
        lock.take_over()
        run = FrozenRun.load(folder)
        run.lock = lock
        code = run.execute()
    except ExpError as error:
        console.error(str(error))
        code, detail = error.exit_code, str(error)
    finally:
        lock.release()
    result = read_json(folder.result) or {}
    if result == before:  # the job was refused, and the result is that of an earlier run
        result = {}
    if code not in (EXIT_OK, EXIT_PREEMPTED) and result.get("error"):
        detail = result["error"]["message"] + ("" if code in REFUSED else f"\n  log: {log_file(folder)}")
    preempted = {"step": result.get("steps")} if code == EXIT_PREEMPTED else None
    outcome = Outcome(code, result.get("restarts", 0), preempted=preempted, reported=True, detail=detail)
    write_json(outcome_file(folder, str(os.getpid())), asdict(outcome))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
