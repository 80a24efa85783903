"""``python -m exp`` in a process of its own that cannot outlive the kit, nor its time."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Sequence

from exp.launcher.processes import JOB_VARIABLE, die_with_parent, kill_job, signal_name, start_module

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Ended", "Interrupted", "Watch", "run_exp"]

_POLL_S = 0.1
_PATIENCE_S = 15.0  # a launcher gives its workers some seconds to end
_TAIL_BYTES = 65536


class Interrupted(BaseException):
    """The kit itself has been told to end.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.number = number


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        code: exit code; negative: the signal that killed it.
        seconds: that it took.
        late: whether it was ended because its time was over.
        hung: whether it was ended because :attr:`Watch.look` said so.
        said: the last error that it printed, the first line; empty: none.
    """

    code: int
    seconds: float
    late: bool
    hung: bool
    said: str


@dataclass
class Watch:
    """What the kit sees to while a child runs.

    Attributes:
        received: the signal that the kit was sent, or None.
        look: called again and again with the child's process; true: it hangs, and is to be ended.
    """

    received: int | None = None
    look: Callable[[subprocess.Popen[bytes]], bool] | None = None


def run_exp(arguments: Sequence[str], output: Path, limit_s: float, watch: Watch) -> Ended:
    """Run ``python -m exp`` to its end, or to the end of its time.

    Args:
        arguments: as on the command line.
        output: what it prints is added to this file.
        limit_s: longest that it may take, in seconds.
        watch: of the kit.

    Raises:
        Interrupted: the kit was told to end; the child has been ended.
    """
    from exp.cli import wants_tracebacks

    mark = secrets.token_hex(8)
    environment = {**os.environ, JOB_VARIABLE: mark}
    if not wants_tracebacks():
        environment.pop("HYDRA_FULL_ERROR", None)  # which Hydra's own switch sets while it runs the kit
    output.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with output.open("ab") as log:
        place = log.tell()
        process = start_module(
            "exp.qualify.child", str(os.getpid()), *arguments, environment=environment, stdout=log, stderr=log
        )
    late = hung = False
    try:
        while process.poll() is None and watch.received is None and not (late or hung):
            hung = watch.look is not None and watch.look(process)
            late = time.monotonic() - begun > limit_s
            time.sleep(_POLL_S)
    finally:
        _end(process, mark)
    if watch.received is not None:
        raise Interrupted(watch.received)
    return Ended(process.returncode, time.monotonic() - begun, late, hung, _last_error(output, place))


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End it, in order if it can."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
    kill_job(mark)
    process.wait()


def _last_error(output: Path, place: int) -> str:
    with output.open("rb") as log:
        log.seek(max(place, output.stat().st_size - _TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return next((line[len("error: ") :] for line in reversed(lines) if line.startswith("error: ")), "")


def main() -> int:
    """The child: ``-m exp.qualify.child PARENT ARGUMENTS...``; returns the exit code of exp."""
    die_with_parent(signal.SIGTERM, int(sys.argv[1]))
    sys.argv[:] = ["exp", *sys.argv[2:]]
    from exp.cli import main as exp_main

    return exp_main()


if __name__ == "__main__":
    sys.exit(main())
