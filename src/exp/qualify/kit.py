"""The kit: rows one after the other, what is known written down after each; killed, it goes on where it was."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

from hydra.core.hydra_config import HydraConfig

from exp import console
from exp.backends_registry import create_backend
from exp.config.hardware import check_hardware
from exp.environment import describe_environment, variables
from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, ConfigError, ExpError
from exp.freezing import prepare
from exp.launcher.processes import handle_signals, signal_name
from exp.preemption import PREEMPT_SIGNAL
from exp.qualify.child import Interrupted, Watch
from exp.qualify.machine import Monitor, different, machine
from exp.qualify.page import write_page
from exp.qualify.plan import Row, plan
from exp.qualify.rows import Maker
from exp.qualify.tidy import Secrets, tidy
from exp.qualify.verdict import FAIL, NOT_RUN, PASS, WARN, Verdict
from exp.runfolder import read_json, write_json
from exp.runlock import RunLock
from exp.summary import Finished
from exp.task import create_task

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.tasks.qualify import Qualify

__all__ = ["qualify"]

_LEAST_S = 20.0
"""Less than this is no time for any row."""
_STARTS = 2
"""So often a row may end the kit itself, or the machine."""
_DONE = (PASS, WARN, FAIL)
_COLOURS = {PASS: "green", WARN: "yellow", FAIL: "bold red", NOT_RUN: "dim"}


def qualify(config: ExpConfig, overrides: list[str]) -> Finished:
    """Make all rows that are not made yet; see docs/qualify.md.

    Args:
        config: composed; ``output_dir`` counts where the user gives one.
        overrides: the user's.

    Raises:
        ConfigError: the rows cannot be planned, the folder holds something else, or somebody is at work there.
        UnavailableError: the backend is not there, or has fewer cards than ``nproc``.
    """
    config = prepare(config, overrides)
    task: Any = create_task(config)
    task.check(config)
    backend = create_backend(config.backend)
    check_hardware(config, backend)
    rows = plan(config, overrides, task, backend)
    given = any(override.startswith("output_dir=") for override in overrides)
    place = Path(config.output_dir if given else f"outputs/qualify/{backend.name}_{config.nproc}").absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {place}: {error.strerror}; set output_dir") from error
    lock = RunLock(place)
    lock.acquire()
    try:
        return _Kit(config, overrides, task, rows, backend, place).run()
    finally:
        lock.release()


class _Kit:
    def __init__(
        self, config: ExpConfig, overrides: list[str], task: Qualify, rows: list[Row], backend: Backend, place: Path
    ) -> None:
        self.task = task
        self.plan = rows
        self.backend = backend
        self.place = place
        self.secrets = Secrets(overrides, config.backend.env)
        self.file = place / "qualify.json"
        self.watch = Watch()
        monitor = Monitor(config, backend)
        self.maker = Maker(place, _search(), monitor, backend, task.soak_minutes * 60, self.watch)
        self.terminal = console.make_console()
        about = {
            "backend": backend.name,
            "simulated": backend.simulate,
            "nproc": config.nproc,
            "overrides": self.secrets.hide(
                sorted(o for o in overrides if not re.match(r"task[.=]|output_dir=|resume=|over", o))
            ),
        }
        cards = monitor.read()
        now = self.secrets.hide({"machine": machine(backend, cards), "monitor": cards})
        before = None if config.overwrite else self._before(about, now["machine"])
        self.record: dict[str, Any] = {
            **(before or {**about, "verdict": NOT_RUN, "exit_code": None, "environment": {}, "rows": {}}),
            **now,
        }
        self.rows: dict[str, dict[str, Any]] = self.record["rows"]

    def _before(self, about: dict[str, Any], now: dict[str, Any]) -> dict[str, Any] | None:
        """What an earlier start has found in this folder."""
        found: dict[str, Any] | None = read_json(self.file)
        if found is None:
            if any(
                each.name not in ("rows", "qualify.md") and not each.name.startswith(".")
                for each in self.place.iterdir()
            ):
                raise ConfigError(f"{self.place} holds something else; set output_dir to a folder of its own")
            return None
        others = [f"{key}={found.get(key)}, this one has {about[key]}" for key in about if found.get(key) != about[key]]
        other = next(iter(others), None) or different(found.get("machine", now), now)
        if other is not None:
            raise ConfigError(
                f"{self.place} holds a kit of {other}; set another output_dir, or overwrite=true to begin anew"
            )
        return found

    def run(self) -> Finished:
        """Make what is left, then tell."""
        self._begin()
        interrupted = None
        deadline = time.monotonic() + self.task.budget_minutes * 60
        with self._signals():
            for row in self.plan:
                if self._is_done(row):
                    continue
                try:
                    self._row(row, deadline)
                except Interrupted as signal:
                    interrupted = signal.number
                    self._keep(row, Verdict(NOT_RUN, f"ended by {signal_name(signal.number)}"), started=0)
                    break
        for row in self.plan:  # nothing is left out silently
            if row.name not in self.rows:
                self._keep(row, Verdict(NOT_RUN, "the kit ended before"))
        return self._end(interrupted)

    def _begin(self) -> None:
        done = sum(map(self._is_done, self.plan))
        self.terminal.print(
            f"qualify: {len(self.plan)} rows on {self.record['nproc']} x {self.backend.name}"
            + (", SIMULATED" if self.backend.simulate else "")
            + (f"; {done} are there, and stay" if done else "")
            + f"; {self.task.budget_minutes:g} minutes\nfolder: {console.shown(self.place)}",
            soft_wrap=True,
        )
        self.backend.prepare()
        environment = {**describe_environment(self.backend, []), "variables": variables(self.backend)}
        self.record["environment"] = self.secrets.hide(environment)
        for row in self.plan:
            if not self._is_done(row):  # the kit may have been killed in it
                tidy(self.place / "rows" / row.name, self.secrets)
        self._write()

    def _is_done(self, row: Row) -> bool:
        """A row whose folder was removed is made again."""
        return self.rows.get(row.name, {}).get("verdict") in _DONE and (self.place / "rows" / row.name).is_dir()

    def _row(self, row: Row, deadline: float) -> None:
        """Make a row, unless there is a reason not to."""
        left = deadline - time.monotonic()
        limit = self.task.row_minutes * 60
        started = self.rows.get(row.name, {}).get("started", 0)
        if not _wanted(row, self.task.rows):
            self._keep(row, Verdict(NOT_RUN, "left out by task.rows"))
            return
        if self.watch.received is not None:
            raise Interrupted(self.watch.received)
        if row.kind == "soak":
            self.maker.soak_s = min(self.task.soak_minutes * 60, left - limit / 4)
            limit += self.maker.soak_s
        if min(left, limit) < _LEAST_S or (row.kind == "soak" and self.maker.soak_s <= 0):
            self._keep(row, Verdict(NOT_RUN, "the budget was spent", "the same command goes on with it"))
            return
        if started >= _STARTS:
            finding = f"the kit itself ended in this row, {started} times"
            self._keep(row, Verdict(FAIL, finding, "see the machine's own log: dmesg, the driver's"), started=started)
            return
        self._keep(row, Verdict(NOT_RUN, "begun"), started=started + 1, tell=False)
        begun = time.monotonic()
        try:
            verdict, late = self.maker.make(row, min(left, limit), self.rows)
        except (ExpError, OSError, KeyError, ValueError, TypeError) as error:  # files that are not what a row leaves
            verdict, late = Verdict(FAIL, f"what it left cannot be read: {type(error).__name__}: {error}"), False
        finally:
            tidy(self.place / "rows" / row.name, self.secrets)
        if late and limit > left:
            verdict = Verdict(
                NOT_RUN, f"{left:.0f} s of the budget were not enough", "the same command goes on with it"
            )
            started = -1
        self._keep(row, verdict, started=started + 1, seconds=time.monotonic() - begun)

    def _keep(
        self, row: Row, verdict: Verdict, started: int = 0, seconds: float | None = None, tell: bool = True
    ) -> None:
        command = " ".join(["python -m exp", *self.maker.command(row)])
        self.rows[row.name] = self.secrets.hide(
            {
                "kind": row.kind,
                "title": row.title,
                **row.about,
                "verdict": verdict.verdict,
                "finding": verdict.finding,
                "advice": verdict.advice,
                "seconds": seconds,
                "started": started,
                "command": command,
                "values": verdict.values,
            }
        )
        self._write()
        if tell:
            colour = _COLOURS[verdict.verdict]
            took = f"{seconds:5.0f} s" if seconds is not None else "       "
            self.terminal.print(f"{verdict.verdict:8}", style=colour, end="")
            self.terminal.print(f"{took}  {row.name}: {verdict.finding}", soft_wrap=True, markup=False)

    def _write(self) -> None:
        """The record and the page, in the order of the plan; rows of an earlier plan stay."""
        order = [row.name for row in self.plan]
        names = [name for name in order if name in self.rows] + [name for name in self.rows if name not in order]
        self.record["rows"] = self.rows = {name: self.rows[name] for name in names}
        found = {row["verdict"] for row in self._judged()}
        self.record["verdict"] = next((each for each in (FAIL, WARN, PASS) if each in found), NOT_RUN)
        write_json(self.file, self.record)
        write_page(self.place / "qualify.md", self.record)

    def _judged(self) -> list[dict[str, Any]]:
        """Rows of this plan, as far as they are known; those of an earlier one stay in the folder, and do not count."""
        return [self.rows[row.name] for row in self.plan if row.name in self.rows]

    def _end(self, interrupted: int | None) -> Finished:
        verdicts = [row["verdict"] for row in self._judged()]
        unfinished = any(row["finding"].startswith(("the budget", "the kit ended")) or "of the budget" in row["finding"]
                         for row in self._judged() if row["verdict"] == NOT_RUN)  # fmt: skip
        code = EXIT_FAILED if FAIL in verdicts else EXIT_PREEMPTED if unfinished else EXIT_OK
        name = None
        if interrupted is not None:
            name = signal_name(interrupted)
            code = EXIT_PREEMPTED if interrupted == PREEMPT_SIGNAL else 128 + interrupted
        self.record["exit_code"] = code
        self._write()
        counts = ", ".join(f"{verdicts.count(each)} {each}" for each in (*_DONE, NOT_RUN) if each in verdicts)
        self.terminal.print(f"{counts}; the page: {console.shown(self.place / 'qualify.md')}", soft_wrap=True)
        if code == EXIT_PREEMPTED or name is not None:
            self.terminal.print("the same command goes on with what was not run", soft_wrap=True)
        return Finished(code, interrupted_by=name)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def receive(number: int, _frame: object) -> None:
            self.watch.received = number

        with handle_signals(receive):
            yield


def _wanted(row: Row, patterns: list[str] | None) -> bool:
    return patterns is None or any(fnmatch(row.name, pattern) for pattern in patterns)


def _search() -> list[str]:
    """Where the user's own YAML files lie, for the children."""
    state = HydraConfig.get()
    folders = [source.path for source in state.runtime.config_sources if source.provider == "command-line"]
    searched = [each for each in state.overrides.hydra if each.startswith("hydra.searchpath=")]
    return [*(argument for folder in folders for argument in ("--config-dir", folder)), *searched]
