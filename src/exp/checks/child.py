"""Runs ``python -m exp`` in a child process that ends with this process, or at its time limit."""

from __future__ import annotations

import os
import re
import runpy
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Sequence

from exp.config.resolve import user
from exp.errors import EXIT_PREEMPTED
from exp.runs.files import read_json
from exp.runs.job import NOTE_VARIABLE, PREEMPT_SIGNAL, handle_signals, signal_name
from exp.worker.processes import JOB_VARIABLE, die_with_parent, kill_job, start_module

if TYPE_CHECKING:
    from pathlib import Path


_POLL_S = 0.1
_GRACE_S = 15.0  # the child's launcher waits some seconds for its own workers


class ChildEnd(NamedTuple):
    """How a child ended.

    Attributes:
        code: exit code of the child, negative if a signal killed it. If this process received a signal, the exit code
            with which this process should end.
        why: first line of the last error that the child has printed; otherwise the exit code or the signal, as text.
        interrupted_by: name of the signal that this process received, and for which it ended the child; None: none.
    """

    code: int
    why: str
    interrupted_by: str | None


def overrides_without(overrides: Sequence[str], *keys: str) -> list[str]:
    """The overrides of a command line, without those of some root keys and of all keys below them."""
    pattern = re.compile(rf"[+~]*({'|'.join(keys)})([.=].*)?")
    return [override for override in overrides if not pattern.fullmatch(override)]


def config_dir_args() -> list[str]:
    """Command-line arguments that give a child the user's own config folders."""
    return [argument for folder in user.folders for argument in ("--config-dir", folder)]


def run_exp(arguments: Sequence[str], output: Path, limit_s: float) -> ChildEnd:
    """Run ``python -m exp`` until it ends, reaches its time limit, or this process receives a signal.

    Args:
        arguments: overrides, as on the command line.
        output: file to which the child's stdout and stderr are appended.
        limit_s: time limit in seconds.
    """
    job_marker = secrets.token_hex(8)
    signals: list[int] = []
    note = output.with_suffix(".note.json")
    environment = {**os.environ, JOB_VARIABLE: job_marker, NOTE_VARIABLE: str(note)}
    environment.pop("HYDRA_FULL_ERROR", None)  # exp's command line sets it for this process only
    deadline, child_args = time.monotonic() + limit_s, (str(os.getpid()), *config_dir_args(), *arguments)
    with handle_signals(lambda number, _: signals.append(number), more_follows=True), output.open("ab") as log:
        process = start_module("exp.checks.child", *child_args, environment=environment, stdout=log, stderr=log)
        try:
            while process.poll() is None and not signals and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:  # SIGTERM first, so that the child can clean up
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
            kill_job(job_marker)
            code = process.wait()
    why = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
    if note.exists():
        why = read_json(note)["error"] or why
        note.unlink()
    if signals:
        code = EXIT_PREEMPTED if signals[0] == PREEMPT_SIGNAL else 128 + signals[0]
    return ChildEnd(code, why, signal_name(signals[0]) if signals else None)


if __name__ == "__main__":  # ``-m exp.checks.child PID ARGUMENTS...``: ``-m exp ARGUMENTS...``, which ends with PID
    die_with_parent(signal.SIGTERM, int(sys.argv[1]))
    sys.argv[:] = ["exp", *sys.argv[2:]]
    runpy.run_module("exp", run_name="__main__")
