"""What became of a launch, and of the ranks that failed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from exp.errors import EXIT_OK
from exp.launcher.rank import this_host

__all__ = ["Outcome", "RankFailure", "error_record"]


@dataclass
class RankFailure:
    """How one rank ended."""

    rank: int
    local_rank: int
    host: str
    type: str
    message: str
    exit_code: int
    """As a process has it: negative for a signal."""
    time: float
    """Seconds since the epoch."""
    log: str
    """Path of the rank's log."""
    restart: int = 0
    """The attempt that it belongs to."""
    pid: int | None = None
    of_peer: bool = False
    """It lost another rank, or waited for one in vain: that one is the cause."""
    own: bool = False
    """An error of exp's own, whose exit code is the command's; any other code is what a process ended with."""


def error_record(
    rank: int,
    local_rank: int,
    pid: int,
    kind: str,
    message: str,
    exit_code: int,
    restart: int = 0,
    of_peer: bool = False,
    own: bool = False,
) -> dict[str, Any]:
    """What an error file holds: a :class:`RankFailure` of this host and this moment, less the log.

    Args:
        rank: of the process that failed, as are ``local_rank`` and ``pid``.
        local_rank: on its node.
        pid: its process id.
        kind: the class of the error.
        message: what is wrong, in its first line.
        exit_code: as a process has it: negative for a signal.
        restart: the attempt that it belongs to.
        of_peer: it lost another rank, which is the cause.
        own: it is an error of exp's own.
    """
    return {
        "rank": rank, "local_rank": local_rank, "host": this_host(), "type": kind, "message": message,
        "exit_code": exit_code, "time": time.time(), "pid": pid, "restart": restart, "of_peer": of_peer, "own": own,
    }  # fmt: skip


@dataclass
class Outcome:
    """What became of a launch."""

    exit_code: int = EXIT_OK
    """For the command line."""
    restarts: int = 0
    failures: list[RankFailure] = field(default_factory=list)
    """The first to fail comes first."""
    interrupted_by: str | None = None
    """Name of the signal that ended it."""
    preempted: dict[str, Any] | None = None
    """It was preempted: ``step`` after which its state is saved, null where there is nothing to save; and, from
    torchrun, ``signals``: those that this node got."""
    reported: bool = False
    """What there is to say of it has been printed, and written, where it ran."""
    recorded: bool = False
    """``result.json`` is as it has to be: it was written, or left alone, where the run was."""
    left: bool = False
    """It has not ended, but nobody here waits for it any longer."""
    begun: bool = True
    """False: the sweep that it is part of was interrupted before."""
    detail: str | None = None
    """What the agent itself complained of."""
    unkillable: list[int] = field(default_factory=list)
    """Processes that did not die."""
