"""task=qualify: rows one after the other, what is known written down after each; killed, it goes on where it was.

Each row is ``python -m exp`` in a process of its own (:mod:`~exp.checks.child`, :mod:`~exp.checks.rows`), so that
nothing that a driver does can end this one. ``qualify.json`` has all, ``qualify.md`` is the page of it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from hydra.core.hydra_config import HydraConfig

from exp import __version__, console
from exp.checks.check import FAILED, OK, SKIPPED, STYLES, WARNING, Answer, fail, skip, table_of, worst
from exp.checks.child import Ended, run_exp
from exp.checks.rows import MAKERS, Making, Row, plan
from exp.config.check import check_hardware
from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, ConfigError, ExpError
from exp.frozen import prepare
from exp.hardware.registry import create_backend
from exp.launcher.processes import handle_signals, signal_name
from exp.runs.files import read_json, to_json, without_credentials, write_atomically, write_json
from exp.runs.lock import RunLock
from exp.runs.record import git_revision, package_versions, variables
from exp.runs.status import PREEMPT_SIGNAL
from exp.summary import Finished
from exp.task import create_task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.tasks.checks import Qualify

__all__ = ["Secrets", "machine", "qualify", "tidy"]

_IDENTITY = ("name", "uuid", "serial", "bus_id", "memory_total")
_OF_THE_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")
"""Variables that are others each time."""
_KEPT = re.compile(r".*\.(?:json|jsonl|log|csv)")
_SECRET = re.compile(
    r"token|secret|pass(?:w|phrase|code|_|$)|credential|auth(?!or)|(?:api|access|private)_?key", re.IGNORECASE
)
_PAIR = re.compile(r"""['"]?([\w.]+)['"]?\s*[:=]\s*("[^"]*"|'[^']*'|[^\s,}\]]+)""")
_LEAST_CHARACTERS = 6
_MARKS = {FAILED: "**failed**", WARNING: "*warning*"}
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
        ConfigError: the rows cannot be planned, the folder holds another suite, or somebody is at work there.
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
        self.rows: dict[str, dict[str, Any]] = {}
        own = sorted(each for each in overrides if not re.match(r"task[.=]|output_dir=|resume=|over", each))
        about = {"backend": backend.name, "simulated": backend.simulate, "nproc": config.nproc, "overrides": own}
        self.record = {**about, "exp": f"{__version__}, {git_revision(Path(__file__).parent)}", "exit_code": None,
                       "machine": machine(backend, backend.monitor())}  # fmt: skip
        earlier: dict[str, Any] | None = None if config.overwrite else read_json(place / "qualify.json")
        if earlier is not None:
            before, now = ({**{key: each[key] for key in about}, **each["machine"]}
                           for each in (earlier, self._shown(self.record)))  # fmt: skip
            for name in sorted({*before, *now}):
                if before.get(name) != now.get(name):
                    raise ConfigError(
                        f"{place} holds a suite of {name}={before.get(name)}, this one has {now.get(name)}; set "
                        "another output_dir, or overwrite=true to begin anew"
                    )
            self.rows = earlier["rows"]

    def _shown(self, record: Any) -> Any:
        """It without what is secret."""
        return json.loads(self.secrets.hide(to_json(record)))

    def run(self) -> Finished:
        """Make what is left, and report."""
        left = [row for row in self.plan if not self._is_made(row)]
        done = len(self.plan) - len(left)
        self.terminal.print(
            f"qualify: {len(self.plan)} rows on {self.record['nproc']} x {self.backend.name}"
            + (", SIMULATED" if self.backend.simulate else "")
            + (f"; {done} are there, and stay" if done else "")
            + f"; {self.task.budget_minutes:g} minutes\nfolder: {console.shown(self.place)}",
            soft_wrap=True,
        )
        deadline = time.monotonic() + self.task.budget_minutes * 60
        with handle_signals(lambda number, _: setattr(self, "signal", number)):
            for row in left:
                self._row(row, deadline)
        statuses = [self.rows[row.name]["status"] for row in self.plan]
        unfinished = any(self.rows[row.name]["advice"] == _LATER for row in self.plan)
        code = EXIT_FAILED if FAILED in statuses else EXIT_PREEMPTED if unfinished else EXIT_OK
        if self.signal is not None:
            code = EXIT_PREEMPTED if self.signal == PREEMPT_SIGNAL else 128 + self.signal
        self.record["exit_code"] = code
        self._write()
        counts = ", ".join(f"{statuses.count(each)} {each}" for each in (*_MADE, SKIPPED) if each in statuses)
        later = "\nthe same command goes on with what was skipped" if unfinished else ""
        self.terminal.print(f"{counts}; the page: {console.shown(self.place / 'qualify.md')}{later}", soft_wrap=True)
        return Finished(code, interrupted_by=None if self.signal is None else signal_name(self.signal))

    def _is_made(self, row: Row) -> bool:
        """A row whose folder was removed is made again."""
        return self.rows.get(row.name, {}).get("status") in _MADE and (self.place / "rows" / row.name).is_dir()

    def _row(self, row: Row, deadline: float) -> None:
        """Make a row, unless there is a reason not to."""
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
            answer = self._made(row)
            if self.signal is not None:
                answer = skip(f"ended by {signal_name(self.signal)}", _LATER)
            self._keep(row, answer, started + 1, round(time.monotonic() - begun))

    def _made(self, row: Row) -> Answer:
        folder = self.place / "rows" / row.name
        shutil.rmtree(str(folder), ignore_errors=True)
        folder.mkdir(parents=True)
        deadline = time.monotonic() + self.task.row_minutes * 60

        def run(*more: str, stop: Callable[[], bool] = lambda: False) -> Ended:
            arguments, left_s = [*_search(), *row.overrides, *more], deadline - time.monotonic()
            return run_exp(arguments, folder / "output.log", left_s, lambda: self.signal is not None or stop())

        real = self.backend.exclusive_devices and not self.backend.simulate
        try:
            return MAKERS[row.kind](Making(row, folder, run, self.rows, real))
        except (ExpError, OSError, KeyError, ValueError, TypeError) as error:  # files that are not what a row leaves
            return fail(f"what it left cannot be read: {type(error).__name__}: {error}", "")
        finally:
            tidy(folder, self.secrets)

    def _keep(self, row: Row, answer: Answer, started: int = 0, seconds: int | None = None, tell: bool = True) -> None:
        command = " ".join(["python -m exp", *_search(), *row.overrides])
        about = {"kind": row.kind, **row.about, **asdict(answer)}
        self.rows[row.name] = {**about, "seconds": seconds, "started": started, "command": command}
        self._write()
        if tell:
            took = f"{seconds:5} s" if seconds is not None else "       "
            self.terminal.print(f"{answer.status:8}", style=STYLES[answer.status], end="")
            self.terminal.print(f"{took}  {row.name}: {answer.finding}", soft_wrap=True, markup=False)

    def _write(self) -> None:
        """The record and the page, in the order of the plan; rows of an earlier plan stay, and do not count."""
        rows = {row.name: self.rows[row.name] for row in self.plan if row.name in self.rows}
        verdict = worst(row["status"] for row in rows.values())
        record = {**self.record, "verdict": verdict, "rows": {**rows, **self.rows}}
        write_json(self.place / "qualify.json", self._shown(record))
        write_atomically(self.place / "qualify.md", self.secrets.hide(_page_of(record)).encode())


def _search() -> list[str]:
    """Where the user's own YAML files lie, for the children."""
    state = HydraConfig.get()
    folders = [source.path for source in state.runtime.config_sources if source.provider == "command-line"]
    searched = [each for each in state.overrides.hydra if each.startswith("hydra.searchpath=")]
    return [*(argument for folder in folders for argument in ("--config-dir", folder)), *searched]


def machine(backend: Backend, cards: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What tells a machine from another one, or from itself with other software: versions, variables and cards.

    Args:
        backend: of the machine.
        cards: what the vendor's monitor says.
    """
    facts = {"Python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count(),
             **package_versions(), **backend.packages(), **variables(backend)}  # fmt: skip
    facts.update({name: os.environ[name] for name in backend.visible_variables if name in os.environ})
    facts.update({f"card {card['index']}": " ".join(str(card[key]) for key in _IDENTITY if card.get(key) is not None)
                  for card in cards})  # fmt: skip
    return {name: str(value) for name, value in facts.items() if not name.startswith(_OF_THE_JOB)}


class Secrets:
    """What must not be shown: values of variables and of keys that are called secret, and where the user's home is.

    Args:
        overrides: the user's.
        environment: of the workers, beside this process's.
    """

    def __init__(self, overrides: Sequence[str], environment: Mapping[str, str]) -> None:
        pairs = [*os.environ.items(), *environment.items()]
        pairs += [pair for override in overrides for pair in (override.partition("=")[::2], *_PAIR.findall(override))]
        known = {value.strip("'\"") for name, value in pairs if _SECRET.search(name)}
        found = {form for value in known for form in (value, to_json(value)[1:-1])}
        self._hidden = sorted((each for each in found if len(each) >= _LEAST_CHARACTERS), key=len, reverse=True)
        self._home = re.compile(rf"(?:(?<![\w./-])|(?<=\\n)){re.escape(str(Path.home()))}(?![\w-]|\.\w)")

    def hide(self, text: str) -> str:
        """A text, such as JSON, without them."""
        for each in self._hidden:
            text = text.replace(each, "***")
        text = without_credentials(text)
        return text if Path.home() == Path("/") else self._home.sub("~", text)


def tidy(folder: Path, secrets: Secrets) -> None:
    """Remove what nobody needs for a judgement, checkpoints above all, and hide secrets in the rest.

    Args:
        folder: of a row.
        secrets: of the suite.
    """
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(OSError):  # of a process that is just ending
            if path.is_dir() and not path.is_symlink():
                path.rmdir()  # where it is empty
            elif path.is_symlink() or not _KEPT.fullmatch(path.name):
                path.unlink()
            else:
                path.write_text(secrets.hide(path.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")


def _page_of(record: Mapping[str, Any]) -> str:
    """The page of the content of ``qualify.json``: the machine, a line for each row, and the table of each that has
    one. Of operators, those that are not equal.
    """
    rows: Mapping[str, Any] = record["rows"]
    made_up = " (simulated: speeds say nothing)" if record["simulated"] else ""
    left = sum(row["status"] == SKIPPED for row in rows.values())
    missing = f", {left} of {len(rows)} rows skipped" if left else ""
    lines = [f"# {record['nproc']} x {record['backend']}{made_up}: {record['verdict']}{missing}", ""]
    lines += [f"- {name}: {value}" for name, value in {"exp": record["exp"], **record["machine"]}.items()]
    lines += ["", *table_of([
        {"row": name, "": _MARKS.get(row["status"], row["status"]), "s": row["seconds"], "found": row["finding"],
         "what to do": row["advice"]} for name, row in rows.items()
    ])]  # fmt: skip
    for name, row in rows.items():
        shown = [line for line in row["values"].get("table", ()) if line.get("status") != "equal"]
        if shown and row["status"] != SKIPPED:
            lines += [f"## {name}", "", *table_of(shown)]
    lines.append("Each row's command and all figures are in qualify.json, its logs in rows/.")
    return "\n".join(lines) + "\n"
