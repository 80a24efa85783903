"""Finds the rank that hangs: all stand still, and one of them holds up the others."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp import heartbeat
from exp.errors import EXIT_FAILED
from exp.heartbeat import Beat, Stage
from exp.launcher.outcome import RankFailure, waited_in_vain, write_error
from exp.launcher.processes import is_alive, stat_of
from exp.launcher.rank import this_host
from exp.runfolder import read_json, write_json

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = ["HangDetector", "unfinished"]

_LEAST_S = 60.0
_LEAST_FOR_HOOKS_S = 600.0  # the user's may do anything now and then, such as send a file away
_TIMES_SLOWEST = 20
_SHARE = 0.9  # of the time-out of collectives, so that we speak before the ranks that wait do
_STACKS_WITHIN_S = 1.5
_SHOWN_FRAMES = 12
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/exp/engine/distributed.py")
_NAMES = {
    Stage.DATA: "waiting for data", Stage.FORWARD: "forward pass", Stage.BACKWARD: "backward pass and update",
    Stage.HOOKS: "hooks", Stage.VALIDATION: "validation", Stage.METRICS: "metrics",
    Stage.AFTER_VALIDATION: "hooks after a validation", Stage.CHECKPOINT: "writing a checkpoint", Stage.TEST: "test",
    Stage.TEST_METRICS: "metrics",
}  # fmt: skip


@dataclass
class HangDetector:
    """Watches the workers of one node, or one of them.

    What is not seen does not count: a laptop asleep or a suspended job stand still, too, and so does this process then.
    """

    folder: RunFolder
    """The run folder; several nodes agree there on whom to name."""
    scratch: str
    """Where the workers leave their beats."""
    nnodes: int
    """Nodes of the job; where each process watches its own worker only, how many these are."""
    timeout_s: float
    """Of collectives: longest for anything."""
    step_timeout_s: float | None
    """Longest for what belongs to a step; None: from the slowest so far; 0: never ends a run."""
    local_rank: int | None = None
    """Of the only worker to watch; None: all."""
    _still: list[tuple[Beat, float]] = field(default_factory=list)
    _slowest: float = 0.0
    _looked: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._word = self.folder.logs / f"stuck-{this_host()}-{os.getpid()}.json"
        for stale in self.folder.logs.glob("stuck-*.json"):
            stale.unlink()

    def look(self) -> int | None:
        """Called a few times a second; names the rank that hangs (its error file) and returns its process's id."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 1.0), now
        beats = heartbeat.read(self.scratch)
        if self.local_rank is not None:
            beats = beats[self.local_rank : self.local_rank + 1]
        if not beats or any(beat.pid == 0 for beat in beats):
            return None
        before = self._still if len(self._still) == len(beats) else [(beat, 0.0) for beat in beats]
        self._still = [(beat, still + passed if beat == last else 0.0) for beat, (last, still) in zip(beats, before)]
        for (last, still), beat in zip(before, beats):
            if last != beat and last.pid == beat.pid and last.stage in _NAMES and last.stage != Stage.CHECKPOINT:
                self._slowest = max(self._slowest, still)
        errors = [read_json(path) or {} for path in self.folder.logs.glob("rank*.error.json")]
        in_vain = bool(errors) and all(map(waited_in_vain, errors))
        failed = {error["rank"] for error in errors} if in_vain else set()
        going = [(beat, still) for beat, still in self._still if beat.stage != Stage.DONE and beat.rank not in failed]
        if any(not is_alive(beat.pid) for beat, _ in going):
            return None  # it is the one that the others have lost, and torch's agent ends them
        if in_vain:
            return self._judge(going, only_busy=True)
        if self.step_timeout_s == 0 or not going or any(still <= self._limit(beat) for beat, still in going):
            self.close()
            return None
        if any(_traced(beat.pid) for beat, _ in going):
            self._still = []  # somebody debugs it
            return None
        return self._judge(going)

    def close(self) -> None:
        """Take back what this node has said: the job is over, or its ranks go on."""
        with contextlib.suppress(FileNotFoundError):
            self._word.unlink()

    def _limit(self, beat: Beat) -> float:
        """Seconds that a rank may stand still where it is."""
        most = _SHARE * self.timeout_s
        if beat.stage not in _NAMES:
            return float("inf")
        if beat.stage == Stage.CHECKPOINT or beat.times <= 1:
            return most
        if self.step_timeout_s is not None:
            return self.step_timeout_s
        hooks = beat.stage in (Stage.HOOKS, Stage.AFTER_VALIDATION)
        return min(most, max(_LEAST_FOR_HOOKS_S if hooks else _LEAST_S, _TIMES_SLOWEST * self._slowest))

    def _judge(self, going: list[tuple[Beat, float]], only_busy: bool = False) -> int | None:
        """Agree with the other nodes on the rank that holds up all; returns its process's id where it is one of ours.

        Args:
            going: ranks that have neither ended nor failed.
            only_busy: some have waited for another one until their time was up: it is none that waits itself.
        """
        if self._word.exists():
            mine = read_json(self._word)
        else:
            stacks = _stacks(self.scratch, [beat for beat, _ in going])
            mine = [self._about(beat, still, stacks.get(beat.pid, "")) for beat, still in going]
            for each in mine:
                _write_down(self.folder, each)
            write_json(self._word, mine)
        views = [read_json(path) for path in self.folder.logs.glob("stuck-*.json")]
        if len(views) < self.nnodes:
            return None  # the ranks of another node still move, or may take longer where they are
        held_up = [each for view in views for each in view or [] if not (only_busy and each["waits"])]
        first = min(held_up, key=lambda each: list(each["order"]), default=None)
        if first is None or first not in mine:
            return None  # its own node names it
        rank, pid = first["rank"], int(first["pid"])
        failure = RankFailure(rank, first["local_rank"], "RankHung", first["message"], EXIT_FAILED, pid=pid)
        write_error(self.folder.error_file(rank), failure, self.scratch)
        self._still = []
        self.close()
        return pid

    def _about(self, beat: Beat, still: float, stack: str) -> dict[str, Any]:
        """One rank for the others to compare with theirs; the one that holds them up has the least ``order``."""
        stopped = _state(beat.pid) in ("T", "D")
        frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
        waits = any(mark in frame for frame in frames[:6] for mark in _WAITING)
        why = {"T": "it is stopped (SIGSTOP)", "D": "it is stuck in the kernel"}.get(_state(beat.pid))
        said = f"; {why}" if why else ""
        where = _NAMES.get(Stage(beat.stage), "set-up" if beat.step == 0 else "between steps")
        head = f"no progress for {still:.0f} s in step {beat.step}, {where}{said}"
        shown = [f"  {line.strip()}" for line in frames[:_SHOWN_FRAMES]]
        return {
            "waits": waits and not stopped,
            "order": [not stopped, beat.step, beat.stage, waits, beat.times, beat.rank],
            "rank": beat.rank,
            "local_rank": [each.pid for each in heartbeat.read(self.scratch)].index(beat.pid),
            "pid": beat.pid,
            "message": "\n".join([head, *shown]),
            "stack": stack,
        }


def unfinished(scratch: str, alive: bool = True) -> list[tuple[int, Beat]]:
    """The workers of this node that have begun and have not come to their end, by local rank.

    Args:
        scratch: the private folder of the job on this node.
        alive: those that run; otherwise those that are gone.
    """
    return [
        (local_rank, beat)
        for local_rank, beat in enumerate(heartbeat.read(scratch))
        if beat.pid and beat.stage != Stage.DONE and is_alive(beat.pid) is alive
    ]


def _stacks(scratch: str, beats: list[Beat]) -> dict[int, str]:
    """The stacks of workers by process id; what is stopped gives none."""
    files = {beat.pid: heartbeat.stack_file(scratch, rank) for rank, beat in enumerate(heartbeat.read(scratch))}
    sizes = {pid: file.stat().st_size for pid, file in files.items() if file.is_file()}
    for beat in beats:
        with contextlib.suppress(OSError):
            os.kill(beat.pid, heartbeat.STACK_SIGNAL)
    time.sleep(_STACKS_WITHIN_S)
    found = {}
    for pid, size in sizes.items():
        text = files[pid].read_bytes()[size:].decode(errors="replace")
        # The thread that got the signal, the main one, comes last, and matters most.
        threads = text.split("\n\n")
        current = [thread for thread in threads if "Current thread" in thread or "most recent call first" in thread]
        found[pid] = "\n\n".join([*current[-1:], *current[:-1]])
    return found


def _write_down(folder: RunFolder, about: dict[str, Any]) -> None:
    """Every rank's stack goes to its log."""
    head = about["message"].splitlines()[0]
    with folder.log_file(about["rank"]).open("a", encoding="utf-8") as log:
        log.write(f"rank {about['rank']}: {head}; its stack:\n{about['stack'] or '(none: it does not answer)'}\n")


def _state(pid: int) -> str:
    """``R``, ``S``, ``D``, ``T`` (stopped), ...; empty: gone."""
    return "".join(stat_of(pid)[:1])


def _traced(pid: int) -> bool:
    """Whether a debugger holds the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status.splitlines())
