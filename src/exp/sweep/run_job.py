"""Runs one job of a sweep: ``python -m exp.sweep.run_job FOLDER PARENT TOKEN``, started by the scheduler."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import asdict

from exp import console
from exp.errors import EXIT_FAILED, ExpError, SignalReceived
from exp.launcher.base import FrozenRun
from exp.launcher.execute import execute
from exp.launcher.outcome import Outcome, outcome_file
from exp.runs.files import read_json, write_json
from exp.runs.folder import RunFolder
from exp.runs.job import PREEMPT_SIGNAL, handle_signals, signal_name
from exp.runs.lock import RunLock
from exp.worker.processes import die_with_parent


def main(run_dir: str, parent: str, token: str) -> int:
    """Run a frozen job, and write its outcome for the sweep; return the exit code.

    Args:
        run_dir: the run folder.
        parent: process id of the sweep, which this process must not outlive.
        token: of the lock of the run folder, which the sweep passes to this process.
    """
    die_with_parent(signal.SIGTERM, int(parent))
    folder = RunFolder(run_dir)
    file = outcome_file(folder, str(os.getpid()))
    file.unlink(missing_ok=True)  # of an earlier process with this number

    def raise_ended(number: int, _frame: object) -> None:
        raise SignalReceived(number)

    try:
        with handle_signals(raise_ended):  # while no launcher does
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (PREEMPT_SIGNAL,))  # the sweep has blocked it
            run = FrozenRun.load(folder)
            run.lock = RunLock(folder.path, token)
            run.lock.acquire()
            outcome = execute(run)
        if outcome.exit_code == EXIT_FAILED and outcome.detail is None and not outcome.failures:
            # The task itself has found what is wrong, and printed it.
            error = (read_json(folder.result) or {}).get("error") or {}
            outcome.detail, outcome.printed = error.get("message"), True
    except ExpError as error:
        console.error(str(error))
        outcome = Outcome(error.exit_code, printed=True, detail=str(error))
    except SignalReceived as ended:
        outcome = Outcome(ended.exit_code, interrupted_by=signal_name(ended.number))
    with contextlib.suppress(OSError):  # on a full disk the sweep shows the end of the log
        if folder.logs.is_dir():
            write_json(file, asdict(outcome))
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
