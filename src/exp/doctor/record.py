"""What one rank has found so far, in a file that is complete at any moment: it may hang or die in the next check."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Sequence

from exp.launcher.rank import this_host
from exp.runfolder import write_json

if TYPE_CHECKING:
    from pathlib import Path

    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["CHECKS", "FAILED", "OK", "SKIPPED", "WARNING", "Check", "CheckError", "Findings", "Record", "SkipError"]

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"

CHECKS = (
    "interpreter",
    "packages",
    "device",
    "variables",
    "ranks",
    "cards",
    "memory",
    "group",
    "all_reduce",
    "ddp",
    "autocast",
    "operators",
    "burst",
    "utilisation",
    "data",
    "output",
    "limits",
    "teardown",
)
"""All checks, in their order (docs/doctor.md)."""

_PATIENCE = 20


@dataclass
class Findings:
    """What a check found where it did not fail.

    Attributes:
        finding: one line.
        values: figures, for ``doctor.json`` and the table.
        advice: what to do; given, it makes the finding a warning.
    """

    finding: str
    values: dict[str, Any] = field(default_factory=dict)
    advice: str | None = None


class CheckError(Exception):
    """A check failed.

    Args:
        finding: what is wrong, in one line.
        advice: what to do about it.
        **values: figures.
    """

    def __init__(self, finding: str, advice: str, **values: Any) -> None:
        super().__init__(finding)
        self.finding = finding
        self.advice = advice
        self.values = values


class SkipError(Exception):
    """A check cannot be made, because of what failed before it; says what."""


@dataclass
class Check:
    """One check of one rank."""

    name: str
    status: str
    """``ok``, ``warning``, ``failed`` or ``skipped``."""
    finding: str
    advice: str | None = None
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


class Record:
    """The checks of one rank, and the file that holds them.

    Args:
        folder: the run folder.
        info: the rank.
    """

    def __init__(self, folder: RunFolder, info: RankInfo) -> None:
        self.path = record_file(folder, info.rank)
        self.checks: dict[str, Check] = {}
        self.unwritable: OSError | None = None
        self._about = {
            "rank": info.rank,
            "local_rank": info.local_rank,
            "node_rank": info.node_rank,
            "host": this_host(),
            "pid": os.getpid(),
            "started": time.time(),
        }
        self._running: dict[str, Any] | None = None
        self._finished = False
        self._absent: list[int] = []

    def begin(self, name: str) -> None:
        """Note that a check has begun: if the rank never comes back, this is where it stayed."""
        self._running = {"name": name, "since": time.time()}
        self._write()

    def add(self, check: Check) -> None:
        """Note what a check has found."""
        self.checks[check.name] = check
        self._running = None
        self._write()

    def finish(self, absent: Sequence[int] = ()) -> None:
        """Note that there is nothing more to come, and which ranks have been waited for in vain."""
        self._finished, self._absent = True, list(absent)
        self._write()
        for _ in range(_PATIENCE):
            if self.unwritable is None:
                break
            time.sleep(0.1)  # another rank may be trying how much this disk takes
            self._write()

    def passed(self, name: str) -> bool:
        """Whether a check has been made and did not fail."""
        return name in self.checks and self.checks[name].status in (OK, WARNING)

    def failed(self, name: str) -> bool:
        """Whether a check has been made and failed."""
        return name in self.checks and self.checks[name].status == FAILED

    def _write(self) -> None:
        content = {
            **self._about,
            "running": self._running,
            "finished": self._finished,
            "absent": self._absent,
            "checks": [asdict(check) for check in self.checks.values()],
        }
        try:
            write_json(self.path, content)
        except OSError as error:
            # A full disk is for the check of the output folder to find; the examination goes on meanwhile.
            self.unwritable = error
        else:
            self.unwritable = None


def record_file(folder: RunFolder, rank: int) -> Path:
    """Where a rank keeps its record."""
    return folder.path / "doctor" / f"rank{rank}.json"
