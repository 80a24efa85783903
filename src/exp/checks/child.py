"""Processes of their own that cannot outlive a check, nor its time: ``python -m exp``, or a module that answers."""

from __future__ import annotations

import json
import os
import runpy
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Sequence

from exp.errors import RunError
from exp.launcher.processes import JOB_VARIABLE, die_with_parent, kill_job, signal_name, start_module

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Ended", "Interrupted", "Signals", "ask", "run_exp"]

_POLL_S = 0.1
_PATIENCE_S = 15.0  # a launcher gives its workers some seconds to end
_TAIL_BYTES = 65536


class Interrupted(BaseException):
    """This process itself has been told to end.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.number = number


@dataclass
class Signals:
    """The signal that this process was sent, or None."""

    received: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        code: exit code; negative: the signal that killed it.
        seconds: that it took.
        late: whether it was ended because its time was over.
        hung: whether it was ended because ``look`` said so.
        said: the last error that it printed, the first line; empty: none.
    """

    code: int
    seconds: float
    late: bool
    hung: bool
    said: str


def run_exp(
    arguments: Sequence[str],
    output: Path,
    limit_s: float,
    signals: Signals,
    look: Callable[[subprocess.Popen[bytes]], bool] | None = None,
) -> Ended:
    """Run ``python -m exp`` to its end, or to the end of its time.

    Args:
        arguments: as on the command line.
        output: what it prints is added to this file.
        limit_s: longest that it may take, in seconds.
        signals: of this process.
        look: called again and again with the child's process; true: it hangs, and is to be ended.

    Raises:
        Interrupted: this process was told to end; the child has been ended.
    """
    mark = secrets.token_hex(8)
    environment = {**os.environ, JOB_VARIABLE: mark}
    environment.pop("HYDRA_FULL_ERROR", None)  # which the command line sets while Hydra runs this task
    output.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with output.open("ab") as log:
        place = log.tell()
        process = start_module(
            "exp.checks.child", str(os.getpid()), *arguments, environment=environment, stdout=log, stderr=log
        )
    late = hung = False
    try:
        while process.poll() is None and signals.received is None and not (late or hung):
            hung = look is not None and look(process)
            late = time.monotonic() - begun > limit_s
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:  # in order, if it can
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
        kill_job(mark)
        process.wait()
    if signals.received is not None:
        raise Interrupted(signals.received)
    with output.open("rb") as log:
        log.seek(max(place, output.stat().st_size - _TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    said = next((line[len("error: ") :] for line in reversed(lines) if line.startswith("error: ")), "")
    return Ended(process.returncode, time.monotonic() - begun, late, hung, said)


def ask(module: str, *arguments: str, order: bytes = b"", patience_s: float) -> Any:
    """What ``python -m module`` prints in its last line, as JSON.

    Args:
        module: its dotted name.
        arguments: its own.
        order: what it reads.
        patience_s: longest wait, in seconds.

    Raises:
        RunError: it ended without an answer.
        TimeoutError: it has been killed, and not waited for: it may hang in a driver.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        said, errors = process.communicate(order, timeout=patience_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {patience_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
    try:
        return json.loads(said.splitlines()[-1])
    except (ValueError, IndexError):
        lines = errors.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise RunError(lines[-1]) from None


def main() -> None:
    """The child: ``-m exp.checks.child PARENT ARGUMENTS...`` is ``-m exp ARGUMENTS...``."""
    die_with_parent(signal.SIGTERM, int(sys.argv[1]))
    sys.argv[:] = ["exp", *sys.argv[2:]]
    runpy.run_module("exp", run_name="__main__")


if __name__ == "__main__":
    main()
