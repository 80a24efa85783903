"""task=qualify: rows one after the other, what is known written down after each; killed, it goes on where it was.

Each row is ``python -m exp`` in a process of its own (:mod:`~exp.checks.child`, :mod:`~exp.checks.rows`), so that
nothing that a driver does can end this one. ``qualify.json`` has all, ``qualify.md`` is the page of it.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig

from exp import console
from exp.checks.check import FAILED, OK, SKIPPED, WARNING, Answer, fail, skip, worst
from exp.checks.child import Interrupted, Signals
from exp.checks.machine import Monitor, Secrets, different, machine, tidy
from exp.checks.page import write_page
from exp.checks.report import STYLES
from exp.checks.rows import Maker, Row, plan
from exp.config.check import check_hardware
from exp.environment import describe_environment, variables
from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, ConfigError, ExpError
from exp.freezing import prepare
from exp.hardware.registry import create_backend
from exp.launcher.processes import handle_signals, signal_name
from exp.preemption import PREEMPT_SIGNAL
from exp.runfolder import read_json, write_json
from exp.runlock import RunLock
from exp.summary import Finished
from exp.task import create_task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.tasks.checks import Qualify

__all__ = ["qualify"]

_LEAST_S = 20.0
"""Less than this is no time for any row."""
_STARTS = 2
"""So often a row may end this process itself, or the machine."""
_MADE = (OK, WARNING, FAILED)
_LATER = "the same command goes on with it"


def qualify(config: ExpConfig, overrides: list[str]) -> Finished:
    """Make all rows that are not made yet; see docs/checks.md.

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
        self.task, self.plan, self.backend, self.place = task, rows, backend, place
        self.secrets = Secrets(overrides, config.backend.env)
        self.signals = Signals()
        self.terminal = console.make_console()
        monitor = Monitor(config, backend)
        cards = monitor.read()
        own = sorted(each for each in overrides if not re.match(r"task[.=]|output_dir=|resume=|over", each))
        about = {"backend": backend.name, "simulated": backend.simulate, "nproc": config.nproc, "overrides": own}
        about, now = self.secrets.hide(about), self.secrets.hide(machine(backend, cards))
        before = {} if config.overwrite else self._before(about, now)
        self.rows: dict[str, dict[str, Any]] = before.get("rows", {})
        self.record: dict[str, Any] = {
            **about, "verdict": SKIPPED, "exit_code": None, "machine": now, "monitor": self.secrets.hide(cards),
            "environment": {}, "rows": self.rows,
        }  # fmt: skip
        self.maker = Maker(place, _search(), monitor, backend, task.soak_minutes * 60, self.signals, self.rows)

    def _before(self, about: dict[str, Any], now: dict[str, str]) -> dict[str, Any]:
        """What an earlier start has found in this folder."""
        found: dict[str, Any] | None = read_json(self.place / "qualify.json")
        if found is None:
            names = {each.name for each in self.place.iterdir() if not each.name.startswith(".")}
            if names - {"rows", "qualify.md"}:
                raise ConfigError(f"{self.place} holds something else; set output_dir to a folder of its own")
            return {}
        others = [f"{key}={found.get(key)}, this one has {about[key]}" for key in about if found.get(key) != about[key]]
        other = next(iter(others), None) or different(found.get("machine", now), now)
        if other is not None:
            raise ConfigError(
                f"{self.place} holds a kit of {other}; set another output_dir, or overwrite=true to begin anew"
            )
        return found

    def run(self) -> Finished:
        """Make what is left, then tell."""
        done = sum(map(self._is_made, self.plan))
        self.terminal.print(
            f"qualify: {len(self.plan)} rows on {self.record['nproc']} x {self.backend.name}"
            + (", SIMULATED" if self.backend.simulate else "")
            + (f"; {done} are there, and stay" if done else "")
            + f"; {self.task.budget_minutes:g} minutes\nfolder: {console.shown(self.place)}",
            soft_wrap=True,
        )
        packages = {"backend_packages": self.backend.packages(), "variables": variables(self.backend)}
        self.record["environment"] = self.secrets.hide({**describe_environment(self.backend, []), **packages})
        left = [row for row in self.plan if not self._is_made(row)]
        for row in left:  # this process may have been killed in it
            tidy(self.place / "rows" / row.name, self.secrets)
        self._write()
        interrupted = None
        deadline = time.monotonic() + self.task.budget_minutes * 60
        with handle_signals(lambda number, _: setattr(self.signals, "received", number)):
            for row in left:
                try:
                    self._row(row, deadline)
                except Interrupted as signal:
                    interrupted = signal.number
                    self._keep(row, skip(f"ended by {signal_name(signal.number)}", _LATER))
                    break
        for row in self.plan:  # nothing is left out silently
            if row.name not in self.rows:
                self._keep(row, skip("the kit ended before", _LATER))
        return self._end(interrupted)

    def _is_made(self, row: Row) -> bool:
        """A row whose folder was removed is made again."""
        return self.rows.get(row.name, {}).get("status") in _MADE and (self.place / "rows" / row.name).is_dir()

    def _row(self, row: Row, deadline: float) -> None:
        """Make a row, unless there is a reason not to."""
        left, limit = deadline - time.monotonic(), self.task.row_minutes * 60
        started = self.rows.get(row.name, {}).get("started", 0)
        if self.task.rows is not None and not any(fnmatch(row.name, pattern) for pattern in self.task.rows):
            self._keep(row, skip("left out by task.rows"))
            return
        if self.signals.received is not None:
            raise Interrupted(self.signals.received)
        if row.kind == "soak":
            self.maker.soak_s = min(self.task.soak_minutes * 60, left - limit / 4)
            limit += self.maker.soak_s
        if min(left, limit) < _LEAST_S or (row.kind == "soak" and self.maker.soak_s <= 0):
            self._keep(row, skip("the budget was spent", _LATER))
            return
        if started >= _STARTS:
            finding = f"the kit itself ended in this row, {started} times"
            self._keep(row, fail(finding, "see the machine's own log: dmesg, the driver's"), started)
            return
        self._keep(row, skip("begun", _LATER), started + 1, tell=False)
        begun = time.monotonic()
        self.maker.late = False
        try:
            answer = self.maker.make(row, min(left, limit))
        except (ExpError, OSError, KeyError, ValueError, TypeError) as error:  # files that are not what a row leaves
            answer = fail(f"what it left cannot be read: {type(error).__name__}: {error}", "")
        finally:
            tidy(self.place / "rows" / row.name, self.secrets)
        if self.maker.late and limit > left:
            answer, started = skip(f"{left:.0f} s of the budget were not enough", _LATER), -1
        self._keep(row, answer, started + 1, time.monotonic() - begun)

    def _keep(
        self, row: Row, answer: Answer, started: int = 0, seconds: float | None = None, tell: bool = True
    ) -> None:
        kept = {
            "kind": row.kind,
            **row.about,
            **asdict(answer),
            "seconds": seconds,
            "started": started,
            "command": " ".join(["python -m exp", *self.maker.command(row)]),
        }
        self.rows[row.name] = self.secrets.hide(kept)
        self._write()
        if tell:
            took = f"{seconds:5.0f} s" if seconds is not None else "       "
            self.terminal.print(f"{answer.status:8}", style=STYLES[answer.status], end="")
            self.terminal.print(f"{took}  {row.name}: {answer.finding}", soft_wrap=True, markup=False)

    def _write(self) -> None:
        """The record and the page, in the order of the plan; rows of an earlier plan stay, and do not count."""
        names = [row.name for row in self.plan if row.name in self.rows]
        self.record["verdict"] = worst(self.rows[name]["status"] for name in names)
        ordered = {**{name: self.rows[name] for name in names}, **self.rows}
        record = {**self.record, "rows": ordered}
        write_json(self.place / "qualify.json", record)
        write_page(self.place / "qualify.md", record)

    def _end(self, interrupted: int | None) -> Finished:
        rows = [self.rows[row.name] for row in self.plan]
        statuses = [row["status"] for row in rows]
        unfinished = any(row["status"] == SKIPPED and row["advice"] == _LATER for row in rows)
        code = EXIT_FAILED if FAILED in statuses else EXIT_PREEMPTED if unfinished else EXIT_OK
        name = None
        if interrupted is not None:
            name = signal_name(interrupted)
            code = EXIT_PREEMPTED if interrupted == PREEMPT_SIGNAL else 128 + interrupted
        self.record["exit_code"] = code
        self._write()
        counts = ", ".join(f"{statuses.count(each)} {each}" for each in (*_MADE, SKIPPED) if each in statuses)
        self.terminal.print(f"{counts}; the page: {console.shown(self.place / 'qualify.md')}", soft_wrap=True)
        if code == EXIT_PREEMPTED or name is not None:
            self.terminal.print("the same command goes on with what was skipped", soft_wrap=True)
        return Finished(code, interrupted_by=name)


def _search() -> list[str]:
    """Where the user's own YAML files lie, for the children."""
    state = HydraConfig.get()
    folders = [source.path for source in state.runtime.config_sources if source.provider == "command-line"]
    searched = [each for each in state.overrides.hydra if each.startswith("hydra.searchpath=")]
    return [*(argument for folder in folders for argument in ("--config-dir", folder)), *searched]
