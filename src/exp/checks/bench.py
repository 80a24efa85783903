"""The bench of one rank: it makes the checks, one after the other, whatever becomes of each, and meets the others."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

from exp.checks.check import FAILED, OK, WARNING, Answer, Journal, fail, ok, read_journal, skip
from exp.errors import ExpError
from exp.launcher.rank import this_host
from exp.runfolder import to_json

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.distributed import Store

    from exp.config.schema import ExpConfig
    from exp.engine.distributed import Distributed
    from exp.hardware.backend import Backend
    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["ALONE", "END", "START", "Bench", "Check", "journal_of"]

logger = logging.getLogger(__name__)

ALONE = "one process: nothing to exchange"
START, END = "start", "end"
"""Names of the first and the last line of a rank's journal."""
_GRACE_S = 5  # how much longer a hanging rank lives than others wait: they are to write down who is missing
_POLL_S = 0.1
_PATIENCE = 20
_NATIVE_PLACE = re.compile(r"^\[[^\]]*:\d+\] *")  # "[/pytorch/third_party/.../pair.cc:144] "
_TRACEBACK = "the traceback is in the log of the rank"
_ADVICE = {
    "device": f"{_TRACEBACK}; the vendor's monitor tells whether the driver still answers",
    "ranks": f"{_TRACEBACK}; between nodes, see that each reaches the other's ports (firewall, host names)",
    "group": f"{_TRACEBACK}; between nodes, name the network interface in the collectives' variable (backend.env)",
}
_STDERR = 2  # the descriptor, which native code writes to, too: it leads to the log of the rank
_BLOCKING = ("device", "ranks", "cards", "group", "all_reduce", "ddp")


class Check(NamedTuple):
    """One check of a rank.

    Attributes:
        body: makes it; may raise whatever the device's libraries raise.
        needs: checks without which it makes no sense.
        joint: all ranks make it, or none; they wait for each other before it, unless its body does that.
        meets: its body waits for the other ranks itself.
    """

    body: Callable[[Bench], Answer]
    needs: Sequence[str] = ()
    joint: bool = False
    meets: bool = False


class Bench:
    """What the checks of one rank share.

    The ranks tell one another how far they are over a store, not over the group that is examined.

    Attributes:
        device: once the check of that name has passed; ``described`` is what is known of it, with the host.
        readings: of the vendor's monitor, during the burst.
        peers: descriptions of all devices, by rank.
        absent: ranks that were waited for in vain.
    """

    def __init__(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        self.config, self.folder, self.info, self.backend = config, folder, info, backend
        self.timeout_s: float = config.task.timeout_s
        self.timeout = timedelta(seconds=self.timeout_s)
        self.answers: dict[str, Answer] = {}
        self.device: torch.device
        self.described: dict[str, Any] = {}
        self.readings: list[list[dict[str, Any]]] = []
        self.peers: dict[int, dict[str, Any]] = {}
        self.distributed: Distributed | None = None
        self.store: Store | None = None
        self.absent: list[int] = []
        self._passed_by: set[str] = set()
        self.journal = Journal(journal_of(folder, info.rank))
        ranks = {"rank": info.rank, "local_rank": info.local_rank, "node_rank": info.node_rank}
        self.journal.end(START, **ranks, host=this_host(), pid=os.getpid())

    def make(self, name: str, check: Check) -> None:
        """Make one check; an exception is an answer, not the end.

        A check that takes longer than the timeout (and some seconds) ends the process, with its stack on stderr:
        faulthandler's thread does that, and does not need the interpreter's lock, which a hanging driver may hold.
        """
        blocked = next((other for other in check.needs if not self.passed(other)), None)
        started = time.monotonic()
        if blocked is not None:
            answer = skip(f"needs the check '{blocked}'")
        elif check.joint and self.info.world_size == 1:
            answer = ok(ALONE)
        else:
            self.journal.begin(name)
            faulthandler.dump_traceback_later(self.timeout_s + _GRACE_S, exit=True, file=_STDERR)
            try:
                answer = (self._missing(name) if check.joint else None) or check.body(self)
            except ExpError as error:
                finding, _, advice = str(error).partition("; ")
                answer = fail(finding, advice or "see the log of the rank")
            except Exception as error:  # noqa: BLE001 - a check that breaks is a finding; the others must still be made
                logger.error("check '%s' failed\n%s", name, traceback.format_exc())
                first = _NATIVE_PLACE.sub("", (str(error).splitlines() or ["no message"])[0])
                answer = fail(f"{type(error).__name__}: {first}", _ADVICE.get(name, _TRACEBACK))
            finally:
                faulthandler.cancel_dump_traceback_later()
            logger.info("check '%s': %s: %s", name, answer.status, answer.finding)
        self.answers[name] = answer
        self.journal.end(name, **asdict(answer), seconds=round(time.monotonic() - started, 3))
        if check.joint or check.meets:
            self.pass_by(name, self.blocking())

    def finish(self) -> OSError | None:
        """Note that there is nothing more to come; returns why the journal could not be written."""
        self.journal.end(END, absent=self.absent)
        for _ in range(_PATIENCE):
            if self.journal.flush():
                break
            time.sleep(_POLL_S)  # another rank may be trying how much this disk takes
        return self.journal.error

    def passed(self, name: str) -> bool:
        """Whether a check has been made and did not fail."""
        return name in self.answers and self.answers[name].status in (OK, WARNING)

    def blocking(self) -> dict[str, Any]:
        """What this rank tells the others before a joint check: what of its own would leave them waiting in vain."""
        failures = [name for name in _BLOCKING if name in self.answers and self.answers[name].status == FAILED]
        if self.absent:
            failures = ["ranks"]
        if self.distributed is not None:
            failures = [name for name in failures if name != "group"]  # a fallback is a failure, and yet a group
        return {"failed": failures[0] if failures else None}

    def _missing(self, point: str) -> Answer | None:
        """Wait for all ranks; skips where one is missing, or has failed at something that this check needs."""
        told = self.exchange(point, self.blocking())
        if self.absent:
            return skip(self.describe_absent())
        ranks: dict[str, list[str]] = {}
        for rank, each in told.items():
            if each["failed"]:
                ranks.setdefault(each["failed"], []).append(str(rank))
        failures = (f"rank{'s' * (len(which) > 1)} {', '.join(which)} failed '{name}'" for name, which in ranks.items())
        return skip("; ".join(failures)) if ranks else None

    def exchange(self, point: str, value: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Tell the others ``value`` at ``point``, and wait for theirs.

        Returns:
            By rank, of all that came within the timeout; the others are in :attr:`absent` from now on.
        """
        if self.store is None:
            return {self.info.rank: value}
        self.pass_by(point, value)
        waiting = [rank for rank in range(self.info.world_size) if rank not in self.absent]
        deadline = time.monotonic() + self.timeout_s
        # Counters can be read without waiting for them, with every store of every torch.
        while self.store.add(f"doctor/{point}/count", 0) < len(waiting) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        here = [rank for rank in waiting if self.store.add(f"doctor/{point}/here/{rank}", 0)]
        self.absent += [rank for rank in waiting if rank not in here]
        return {rank: json.loads(self.store.get(f"doctor/{point}/{rank}")) for rank in here}

    def pass_by(self, point: str, value: dict[str, Any]) -> None:
        """Tell the others ``value`` at ``point`` without waiting for theirs; nothing if it has been told already.

        A rank that has no part in a joint check must do this, or the others wait for it.
        """
        if self.store is None or point in self._passed_by:
            return
        self._passed_by.add(point)
        self.store.set(f"doctor/{point}/{self.info.rank}", to_json(value))
        self.store.add(f"doctor/{point}/here/{self.info.rank}", 1)
        self.store.add(f"doctor/{point}/count", 1)

    def describe_absent(self) -> str:
        """Who is missing, and what each was last seen doing."""
        return "; ".join(f"rank {rank} {self._last_seen(rank)}" for rank in self.absent)

    def _last_seen(self, rank: int) -> str:
        ended, running = read_journal(journal_of(self.folder, rank))
        if not ended:
            return "never arrived: it has left no record"
        if running:
            return f"has been in the check '{running['name']}' for {time.time() - running['since']:.0f} s"
        return f"was last seen after the check '{ended[-1]['name']}'"


def journal_of(folder: RunFolder, rank: int) -> Path:
    """Where a rank keeps its journal."""
    return folder.path / "doctor" / f"rank{rank}.jsonl"
