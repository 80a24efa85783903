"""Runs the checks of one rank, one after the other, whatever becomes of each."""

from __future__ import annotations

import faulthandler
import json
import logging
import re
import time
import traceback
from typing import TYPE_CHECKING, Any, Callable, Sequence

from exp.doctor.record import FAILED, OK, SKIPPED, WARNING, Check, CheckError, Findings, Record, SkipError, record_file
from exp.errors import ExpError, RunError
from exp.runfolder import read_json, to_json

if TYPE_CHECKING:
    from torch.distributed import Store

    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["GRACE_S", "Examination", "Rendezvous"]

logger = logging.getLogger(__name__)

GRACE_S = 5
"""How much longer a hanging rank is let live than others wait for it, in seconds: they are to write down who is missing
before its end ends the job."""

_POLL_S = 0.1
_NATIVE_PLACE = re.compile(r"^\[[^\]]*:\d+\] *")  # "[/pytorch/third_party/.../pair.cc:144] "
_TRACEBACK = "the traceback is in the log of the rank"
_ADVICE = {
    "device": f"{_TRACEBACK}; the vendor's monitor tells whether the driver still answers",
    "ranks": f"{_TRACEBACK}; between nodes, see that each reaches the other's ports (firewall, host names)",
    "group": f"{_TRACEBACK}; between nodes, name the network interface in the collectives' variable (backend.env)",
}
_STDERR = 2  # the descriptor, which native code writes to, too: it leads to the log of the rank


class Examination:
    """One rank's checks.

    Args:
        record: takes what they find.
        timeout_s: longest that a check may take. After it (and :data:`GRACE_S`), the process ends with its stack on
            stderr. That is done by faulthandler's thread, which does not need the interpreter's lock: a driver may hang
            while it holds that.
    """

    def __init__(self, record: Record, timeout_s: float) -> None:
        self.record = record
        self.timeout_s = timeout_s

    def check(self, name: str, body: Callable[[], Findings], needs: Sequence[str] = ()) -> None:
        """Make one check; an exception of ``body`` is a finding, not the end.

        Args:
            name: of the check.
            body: raises :class:`CheckError` or :class:`SkipError`, or whatever the device's libraries raise.
            needs: checks without which this one makes no sense.
        """
        blocked = next((other for other in needs if not self.record.passed(other)), None)
        if blocked is not None:
            self.record.add(Check(name, SKIPPED, f"needs the check '{blocked}'"))
            return
        self.record.begin(name)
        faulthandler.dump_traceback_later(self.timeout_s + GRACE_S, exit=True, file=_STDERR)
        started = time.monotonic()
        try:
            found = body()
            check = Check(name, WARNING if found.advice else OK, found.finding, found.advice, values=found.values)
        except SkipError as skipped:
            check = Check(name, SKIPPED, str(skipped))
        except CheckError as failed:
            check = Check(name, FAILED, failed.finding, failed.advice, values=failed.values)
        except ExpError as error:
            finding, _, advice = str(error).partition("; ")
            check = Check(name, FAILED, finding, advice or "see the log of the rank")
        except Exception as error:  # noqa: BLE001 - a check that breaks is a finding; the others must still be made
            logger.error("check '%s' failed\n%s", name, traceback.format_exc())
            first = _NATIVE_PLACE.sub("", (str(error).splitlines() or ["no message"])[0])
            check = Check(name, FAILED, f"{type(error).__name__}: {first}", _ADVICE.get(name, _TRACEBACK))
        finally:
            faulthandler.cancel_dump_traceback_later()
        check.seconds = round(time.monotonic() - started, 3)
        logger.info("check '%s': %s: %s", name, check.status, check.finding)
        self.record.add(check)


class Rendezvous:
    """Where the ranks tell one another how far they are: over the store, not over the group that is examined.

    Args:
        folder: the run folder, whose records tell what a missing rank is doing.
        info: this rank.
        timeout_s: longest wait for the others.
    """

    def __init__(self, folder: RunFolder, info: RankInfo, timeout_s: float) -> None:
        self.folder = folder
        self.info = info
        self.timeout_s = timeout_s
        self.absent: list[int] = []
        self._passed: set[str] = set()
        self.store: Store | None = None

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

        A rank that has no part in a common check must do this, or the others wait for it.
        """
        if self.store is None or point in self._passed:
            return
        self._passed.add(point)
        self.store.set(f"doctor/{point}/{self.info.rank}", to_json(value))
        self.store.add(f"doctor/{point}/here/{self.info.rank}", 1)
        self.store.add(f"doctor/{point}/count", 1)

    def describe_absent(self) -> str:
        """Who is missing, and what each was last seen doing."""
        return "; ".join(f"rank {rank} {self._last_seen(rank)}" for rank in self.absent)

    def _last_seen(self, rank: int) -> str:
        try:
            record = read_json(record_file(self.folder, rank))
        except RunError:
            record = None
        if record is None:
            return "never arrived: it has left no record"
        if record["running"]:
            running = record["running"]
            return f"has been in the check '{running['name']}' for {time.time() - running['since']:.0f} s"
        return f"was last seen after the check '{record['checks'][-1]['name']}'"
