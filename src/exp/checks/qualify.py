"""task=qualify: rows one after the other, what is known written down after each; killed, it goes on where it was.

Each row is ``python -m exp`` in a process of its own (:mod:`~exp.checks.child`, :mod:`~exp.checks.rows`), so that
nothing that a driver does can end this one. ``qualify.json`` has all, ``qualify.md`` is the page of it.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig

from exp import console
from exp.checks.check import FAILED, OK, SKIPPED, STYLES, WARNING, Answer, fail, skip, worst
from exp.checks.child import Ended, run_exp
from exp.checks.machine import Secrets, different, machine, tidy
from exp.checks.page import page_of
from exp.checks.rows import MAKERS, Making, Row, plan
from exp.config.check import check_hardware
from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, ConfigError, ExpError
from exp.freezing import prepare
from exp.hardware.registry import create_backend
from exp.launcher.processes import handle_signals, signal_name
from exp.runs.environment import describe_environment, variables
from exp.runs.files import read_json, write_atomically, write_json
from exp.runs.lock import RunLock
from exp.runs.preemption import PREEMPT_SIGNAL
from exp.summary import Finished
from exp.task import create_task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.tasks.checks import Qualify

__all__ = ["qualify"]

_STARTS = 2
"""So often a row may end this process itself, or the machine."""
_MADE = (OK, WARNING, FAILED)
_LATER = "the same command goes on with it"


def qualify(config: ExpConfig, overrides: list[str]) -> Finished:
    """Make all rows that are not made yet; see docs/hardware/checks.md.

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
    for pattern in task.rows or ():
        if not any(fnmatch(row.name, pattern) for row in rows):
            raise ConfigError(f"task.rows: no row is called {pattern}; there are {', '.join(row.name for row in rows)}")
    given = any(override.startswith("output_dir=") for override in overrides)
    place = Path(config.output_dir if given else f"outputs/qualify/{backend.name}_{config.nproc}").absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {place}: {error.strerror}; set output_dir") from error
    lock = RunLock(place)
    lock.acquire()
    try:
        return _Suite(config, overrides, task, rows, backend, place).run()
    finally:
        lock.release()


class _Suite:
    def __init__(
        self, config: ExpConfig, overrides: list[str], task: Qualify, rows: list[Row], backend: Backend, place: Path
    ) -> None:
        self.task, self.plan, self.backend, self.place = task, rows, backend, place
        self.secrets = Secrets(overrides, config.backend.env)
        self.signal: int | None = None
        self.terminal = console.make_console()
        cards = backend.monitor()
        own = sorted(each for each in overrides if not re.match(r"task[.=]|output_dir=|resume=|over", each))
        about = {"backend": backend.name, "simulated": backend.simulate, "nproc": config.nproc, "overrides": own}
        self.record: dict[str, Any] = {
            **about, "verdict": SKIPPED, "exit_code": None, "machine": machine(backend, cards), "monitor": cards,
            "environment": {}, "rows": {},
        }  # fmt: skip
        if not config.overwrite:
            self._go_on(self.secrets.hide({**about, **self.record["machine"]}))
        self.rows: dict[str, dict[str, Any]] = self.record["rows"]

    def _go_on(self, now: dict[str, Any]) -> None:
        """Take the rows that an earlier start has made in this folder."""
        found: dict[str, Any] | None = read_json(self.place / "qualify.json")
        if found is None:
            names = {each.name for each in self.place.iterdir() if not each.name.startswith(".")}
            if names - {"rows", "qualify.md"}:
                raise ConfigError(f"{self.place} holds something else; set output_dir to a folder of its own")
            return
        before = {**{key: found.get(key) for key in now if key in found}, **found.get("machine", {})}
        other = different(before, now)
        if other is not None:
            raise ConfigError(
                f"{self.place} holds a suite of {other}; set another output_dir, or overwrite=true to begin anew"
            )
        self.record["rows"] = found["rows"]

    def run(self) -> Finished:
        """Make what is left, then tell."""
        left = [row for row in self.plan if not self._is_made(row)]
        done = len(self.plan) - len(left)
        self.terminal.print(
            f"qualify: {len(self.plan)} rows on {self.record['nproc']} x {self.backend.name}"
            + (", SIMULATED" if self.backend.simulate else "")
            + (f"; {done} are there, and stay" if done else "")
            + f"; {self.task.budget_minutes:g} minutes\nfolder: {console.shown(self.place)}",
            soft_wrap=True,
        )
        packages = {"backend_packages": self.backend.packages(), "variables": variables(self.backend)}
        self.record["environment"] = {**describe_environment(self.backend, []), **packages}
        for row in left:  # this process may have been killed in it
            tidy(self.place / "rows" / row.name, self.secrets)
        self._write()
        deadline = time.monotonic() + self.task.budget_minutes * 60
        with handle_signals(lambda number, _: setattr(self, "signal", number)):
            for row in left:
                self._row(row, deadline)
        return self._end()

    def _is_made(self, row: Row) -> bool:
        """A row whose folder was removed is made again."""
        return self.rows.get(row.name, {}).get("status") in _MADE and (self.place / "rows" / row.name).is_dir()

    def _row(self, row: Row, deadline: float) -> None:
        """Make a row, unless there is a reason not to."""
        limit_s = self.task.row_minutes * 60
        started = self.rows.get(row.name, {}).get("started", 0)
        if self.task.rows is not None and not any(fnmatch(row.name, pattern) for pattern in self.task.rows):
            self._keep(row, skip("left out by task.rows"))
        elif self.signal is not None:
            self._keep(row, skip("the suite ended before", _LATER))
        elif time.monotonic() > deadline:
            self._keep(row, skip("the budget was spent", _LATER))
        elif started >= _STARTS:
            finding = f"the suite itself ended in this row, {started} times"
            self._keep(row, fail(finding, "see the machine's own log: dmesg, the driver's"), started)
        else:
            self._keep(row, skip("begun", _LATER), started + 1, tell=False)
            begun = time.monotonic()
            answer = self._made(row, limit_s)
            if self.signal is None:
                self._keep(row, answer, started + 1, time.monotonic() - begun)
            else:
                self._keep(row, skip(f"ended by {signal_name(self.signal)}", _LATER))

    def _made(self, row: Row, limit_s: float) -> Answer:
        folder = self.place / "rows" / row.name
        shutil.rmtree(str(folder), ignore_errors=True)
        folder.mkdir(parents=True)
        deadline = time.monotonic() + limit_s

        def run(*more: str, stop: Any) -> Ended:
            arguments, left_s = [*_search(), *row.overrides, *more], deadline - time.monotonic()
            return run_exp(arguments, folder / "output.log", left_s, lambda: self.signal is not None or stop())

        real = self.backend.exclusive_devices and not self.backend.simulate
        try:
            return MAKERS[row.kind](Making(row, folder, run, self.rows, real))
        except (ExpError, OSError, KeyError, ValueError, TypeError) as error:  # files that are not what a row leaves
            return fail(f"what it left cannot be read: {type(error).__name__}: {error}", "")
        finally:
            tidy(folder, self.secrets)

    def _keep(
        self, row: Row, answer: Answer, started: int = 0, seconds: float | None = None, tell: bool = True
    ) -> None:
        command = " ".join(["python -m exp", *_search(), *row.overrides])
        about = {"kind": row.kind, **row.about, **asdict(answer)}
        self.rows[row.name] = {**about, "seconds": seconds, "started": started, "command": command}
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
        record = self.secrets.hide({**self.record, "rows": ordered})
        write_json(self.place / "qualify.json", record)
        write_atomically(self.place / "qualify.md", page_of(record).encode())

    def _end(self) -> Finished:
        rows = [self.rows[row.name] for row in self.plan]
        statuses = [row["status"] for row in rows]
        unfinished = any(row["status"] == SKIPPED and row["advice"] == _LATER for row in rows)
        code = EXIT_FAILED if FAILED in statuses else EXIT_PREEMPTED if unfinished else EXIT_OK
        if self.signal is not None:
            code = EXIT_PREEMPTED if self.signal == PREEMPT_SIGNAL else 128 + self.signal
        self.record["exit_code"] = code
        self._write()
        counts = ", ".join(f"{statuses.count(each)} {each}" for each in (*_MADE, SKIPPED) if each in statuses)
        self.terminal.print(f"{counts}; the page: {console.shown(self.place / 'qualify.md')}", soft_wrap=True)
        if unfinished:
            self.terminal.print("the same command goes on with what was skipped", soft_wrap=True)
        return Finished(code, interrupted_by=None if self.signal is None else signal_name(self.signal))


def _search() -> list[str]:
    """Where the user's own YAML files lie, for the children."""
    state = HydraConfig.get()
    folders = [source.path for source in state.runtime.config_sources if source.provider == "command-line"]
    searched = [each for each in state.overrides.hydra if each.startswith("hydra.searchpath=")]
    return [*(argument for folder in folders for argument in ("--config-dir", folder)), *searched]
