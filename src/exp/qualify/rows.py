"""How each kind of row is made: one or several commands in its folder; the judges read what they leave."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any, Callable, Mapping

from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED
from exp.preemption import PREEMPT_SIGNAL
from exp.qualify import judge
from exp.qualify.child import Ended, Watch, run_exp
from exp.qualify.trail import read_trail

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from exp.backend import Backend
    from exp.qualify.machine import Monitor
    from exp.qualify.plan import Row
    from exp.qualify.verdict import Verdict

__all__ = ["Maker"]

_TRIES = 4
"""So often a row is begun anew without what has ended its process."""
_HANGS_AFTER_S = {"operators": 120.0, "collectives": 45.0}
"""A card may compile an operator when it first meets it; a collective has nothing to wait for but the other ranks."""
_KILL_AT = 5
_MONITOR_EVERY_S = 15.0


class Maker:
    """Makes rows.

    Args:
        place: the kit's folder; each row has its own in ``rows/``.
        search: arguments before the overrides, such as ``--config-dir``.
        monitor: is read in the soak.
        backend: of the rows.
        soak_s: of the soak, in seconds.
        watch: of the kit.
    """

    def __init__(
        self, place: Path, search: list[str], monitor: Monitor, backend: Backend, soak_s: float, watch: Watch
    ) -> None:
        self.place = place
        self.search = search
        self.monitor = monitor
        self.backend = backend
        self.soak_s = soak_s
        self.watch = watch

    def make(self, row: Row, limit_s: float, earlier: Mapping[str, Mapping[str, Any]]) -> tuple[Verdict, bool]:
        """Make a row and judge it.

        Args:
            row: of the plan.
            limit_s: longest that it may take, in seconds.
            earlier: what the rows before it have found, by name.

        Returns:
            The verdict, and whether the row ran out of its time.

        Raises:
            Interrupted: the kit was told to end.
        """
        folder = self.place / "rows" / row.name
        shutil.rmtree(str(folder), ignore_errors=True)
        folder.mkdir(parents=True)
        ways: dict[str, Callable[[Row, Path, float], tuple[Verdict, bool]]] = {
            "operators": self._again_without,
            "collectives": self._again_without,
            "resume": self._resume,
            "soak": self._soak,
        }
        if row.kind in ways:
            verdict, late = ways[row.kind](row, folder, limit_s)
        else:
            ended = self._run(row, folder, limit_s)
            verdict, late = judge.JUDGES[row.kind](judge.Made(row, folder, ended)), ended.late
        return judge.against(row, verdict, earlier, self.backend), late

    def command(self, row: Row, *more: str) -> list[str]:
        """The arguments of ``python -m exp`` for a row; with them anybody can make it again."""
        return [*self.search, *row.overrides, *more]

    def _run(self, row: Row, folder: Path, limit_s: float, *more: str) -> Ended:
        arguments = self.command(row, *more, f"output_dir={folder}")
        return run_exp(arguments, folder / "output.log", limit_s, self.watch)

    def _again_without(self, row: Row, folder: Path, limit_s: float) -> tuple[Verdict, bool]:
        """Where something ends or hangs the process, it is noted, and the row begun anew without it."""
        trail = folder / f"{row.kind}.jsonl"
        deadline = time.monotonic() + limit_s
        found: dict[str, dict[str, Any]] = {}
        culprits: dict[str, dict[str, Any]] = {}
        for attempt in range(_TRIES):
            if trail.exists():
                trail.replace(folder / f"{row.kind}.{attempt}.jsonl")
            skip = ",".join(f'"{name}"' for name in culprits)
            more = [f"task.skip=[{skip}]", *["overwrite=true"] * bool(attempt)]
            self.watch.look = _Stillness(trail, _HANGS_AFTER_S[row.kind])
            try:
                ended = self._run(row, folder, deadline - time.monotonic(), *more)
            finally:
                self.watch.look = None
            lines, open_ = read_trail(trail)
            for line in lines:
                found[f"{line['name']} {line.get('detail', line.get('kib'))}"] = line
            if open_ is None or ended.code == EXIT_OK or ended.late:
                break
            how = (
                f"hung for {_HANGS_AFTER_S[row.kind]:.0f} s" if ended.hung else ended.said or f"exit code {ended.code}"
            )
            culprits[open_["name"]] = {**open_, "crash": how}
        every = [*found.values(), *culprits.values()]
        return judge.JUDGES[row.kind](judge.Made(row, folder, ended, every)), ended.late

    def _resume(self, row: Row, folder: Path, limit_s: float) -> tuple[Verdict, bool]:
        """A training to its end; the same with one rank killed on the way, and continued."""
        deadline = time.monotonic() + limit_s
        mark = folder / "killed"
        hook = f"hooks=[{{type: exp.qualify.kill.KillOnce, step: {_KILL_AT}, mark: '{mark}'}}]"
        codes = []
        for name, more in (("straight", []), ("broken", [hook]), ("broken", [hook, "resume=auto"])):
            ended = self._run(row, folder / name, deadline - time.monotonic(), *more)
            codes.append(ended.code)
            expected = EXIT_OK if len(codes) != 2 else EXIT_FAILED
            if ended.code != expected or ended.late:
                return judge.broken_off(("the training", "the training that is killed", "its continuation")
                                        [len(codes) - 1], ended), ended.late  # fmt: skip
        return judge.resumed(folder / "straight", folder / "broken"), False

    def _soak(self, row: Row, folder: Path, limit_s: float) -> tuple[Verdict, bool]:
        """A training for some minutes, which then is told to save its state and end."""
        metrics = folder / "metrics.jsonl"
        begun: list[float] = []
        readings: list[tuple[float, list[dict[str, Any]]]] = []
        told: list[float] = []

        def look(process: subprocess.Popen[bytes]) -> bool:
            now = time.monotonic()
            if not begun and metrics.is_file():
                begun.append(now)
            if begun and (not readings or now - readings[-1][0] > _MONITOR_EVERY_S):
                readings.append((now, self.monitor.read()))
            if begun and not told and now - begun[0] > self.soak_s:
                told.append(now)
                process.send_signal(PREEMPT_SIGNAL)
            return False

        self.watch.look = look
        try:
            ended = self._run(row, folder, limit_s)
        finally:
            self.watch.look = None
        if ended.code != EXIT_PREEMPTED:
            return judge.broken_off("the training", ended), ended.late
        return judge.soaked(folder, self.soak_s, [each for _, each in readings], self.backend), False


class _Stillness:
    """Whether something was begun so long ago, and has not ended; not by the clock of a disk, which may be another's.

    Args:
        trail: says what was begun.
        seconds: how long is too long.
    """

    def __init__(self, trail: Path, seconds: float) -> None:
        self.trail = trail
        self.seconds = seconds
        self._size = -1
        self._since = 0.0

    def __call__(self, _: object) -> bool:
        try:
            size = self.trail.stat().st_size
        except FileNotFoundError:
            return False
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return time.monotonic() - self._since > self.seconds and read_trail(self.trail)[1] is not None
