"""task=qualify: checks one after the other, each a command in a process of its own, and one record of their answers.

Nothing that a driver does can end this process (:mod:`~exp.checks.child`). What is known is in ``qualify.json`` after
each check; the same command goes on with what is left. ``qualify.md`` is the page of it.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException

from exp import __version__, console
from exp.checks.check import FAILED, OK, SKIPPED, STYLES, WARNING, Answer, cell, fail, ok, read_journal, skip, worst
from exp.checks.child import Ended, run_exp
from exp.config.check import check_hardware
from exp.config.compose import compose
from exp.config.explain import explain
from exp.console import size
from exp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_UNAVAILABLE, ConfigError, ExpError
from exp.frozen import check, prepare
from exp.hardware.registry import create_backend
from exp.plugins import installed
from exp.runs.files import read_json, without_credentials, write_atomically, write_json
from exp.runs.lock import RunLock
from exp.runs.record import git_revision, package_versions, variables
from exp.runs.status import PREEMPT_SIGNAL, handle_signals, signal_name
from exp.summary import Finished
from exp.task import create_task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.tasks.checks import Qualify

__all__ = ["Row", "Suite", "qualify"]

_SHORT = ("plots=false", "logger=none", "debug.val_batches=1", "debug.test_batches=1", "max_epochs=null")
_OWN = re.compile(
    r"[+~]*(?:task|experiment|nproc|precision|output_dir|overwrite|resume|max_steps|max_epochs|logger)(?:[.=].*)?"
)
_IDENTITY = ("name", "uuid", "serial", "bus_id", "memory_total")
_OF_THE_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")
"""Variables that are others each time."""
_KEPT = re.compile(r".*\.(?:json|jsonl|log|csv)")
_MARKS = {FAILED: "**failed**", WARNING: "*warning*"}
_MADE = (OK, WARNING, FAILED)
_LATER = "the same command goes on with it"
_STARTS = 2
"""So often a check may end this process itself, or the machine."""
_TRIES = 4
"""So often a check begins anew without what has ended its process."""
_LOG = "look at output.log and logs/ in the row's folder"
_EFFICIENT = 0.8
_SPEED = ("step_seconds", "samples_per_second", "batch_size", "memory_by_rank")


@dataclass(frozen=True)
class Row:
    """One check of the suite.

    Attributes:
        name: what it is called, and its folder.
        kind: ``doctor``, ``operators``, ``collectives``, ``parity`` or ``speed``.
        overrides: of ``python -m exp``, without ``output_dir``.
        about: what it varies: ``experiment``, ``precision``, ``nproc``.
    """

    name: str
    kind: str
    overrides: Sequence[str]
    about: Mapping[str, Any]


def plan(config: ExpConfig, overrides: Sequence[str], task: Qualify, backend: Backend) -> Iterator[Row]:
    """All checks in the order of their worth: what fits into the budget is made first to last.

    Args:
        config: with the backend that was chosen.
        overrides: the user's; what concerns hardware and data holds for every check.
        task: of ``config``.
        backend: likewise.

    Raises:
        ConfigError: an experiment cannot be trained as the user has it.
    """
    kept = [each for each in overrides if not _OWN.fullmatch(each) and each != "backend=auto"]
    if not any(override.startswith("backend=") for override in kept):
        kept.append(f"backend={config.backend.name}")
    made_up = backend.simulate or not backend.exclusive_devices
    plugins = installed().values()
    examples = {family.example: family.small for plugin in plugins for family in plugin.families.values()}
    small = {name: tuple(examples.get(name, ())) for name in task.experiments or examples}
    in_small = made_up if task.small is None else task.small
    usual: Mapping[str, Sequence[str]] = small if in_small else dict.fromkeys(small, ())
    by_card = any(override.lstrip("+").startswith("batch_size=") for override in kept)
    precisions, nproc = backend.capabilities.precisions, config.nproc

    @functools.lru_cache(maxsize=None)
    def batch_alone(experiment: str, form: tuple[str, ...]) -> int:
        """The batch on a single card; what cannot be trained is found before the first check."""
        given = [*kept, f"experiment={experiment}", *_SHORT, "task=speed", "max_steps=100", "nproc=1", *form]
        try:
            config = prepare(compose(given), given)
            check(config, given, backend)
        except (HydraException, ConfigError) as error:
            found = str(error) if isinstance(error, ConfigError) else explain(error, [])
            raise ConfigError(f"the rows of {experiment} cannot be made: {found}") from error
        return int(config.batch_size or 1)

    def row(name: str, *settings: str, **varied: Any) -> Row:
        about = {"precision": "fp32", "nproc": 1, **varied}
        own = [f"precision={about['precision']}", f"nproc={about['nproc']}"]
        return Row(name, name.partition("-")[0], [*kept, *settings, *own], about)

    def trained(kind: str, experiment: str, form: Sequence[str], cards: int, *settings: str, **varied: Any) -> Row:
        """It trains an experiment in a form of it; so many cards share the batch that a single one has."""
        bare = tuple(each for each in form if not each.startswith("global_batch_size="))
        alone = batch_alone(experiment, bare if by_card else tuple(form))
        batch = () if by_card else ("global_batch_size=null", f"batch_size={-(-alone // cards)}")
        name = "-".join([kind, experiment, *map(str, varied.values())])
        return row(name, f"experiment={experiment}", *_SHORT, *settings, *bare, *batch, experiment=experiment, **varied)

    def operators(precisions: Sequence[str]) -> Iterator[Row]:
        for precision in precisions:
            for name, form in small.items():
                yield trained("operators", name, form, 1, "task=operators", "max_steps=1", precision=precision)

    first = [f"experiment={name}" for name in small][:1]  # keys of the user's may be of his experiment alone
    yield row("doctor", "task=doctor", *first, nproc=nproc)
    yield from operators(precisions[:1])
    if nproc > 1:
        sizes = ["task.sizes_kib=[4,64,1024]"] * made_up
        yield row("collectives", "task=collectives", "launcher.timeout_s=60", *first, *sizes, nproc=nproc)
    for number in dict.fromkeys((1, nproc)):
        for name, form in small.items():
            steps = ("task=parity", "task.steps=5", "max_steps=5")
            yield trained("parity", name, form, number, *steps, nproc=number)
    yield from operators(precisions[1:])
    for name, settings in usual.items():
        for number in [*(2**power for power in range(20) if 2**power < nproc), nproc]:
            steps = ("task=speed", f"max_steps={task.steps}", "val_every=10000000")
            yield trained("speed", name, settings, 1, *steps, nproc=number)


def qualify(config: ExpConfig, overrides: list[str]) -> Finished:
    """Make all checks that are not made yet; see docs/hardware/checks.md.

    Args:
        config: composed; ``output_dir`` counts where the user gives one.
        overrides: the user's.

    Raises:
        ConfigError: the checks cannot be planned, the folder holds another suite, or somebody is at work there.
        UnavailableError: the backend is not there, or has fewer cards than ``nproc``.
    """
    config = prepare(config, overrides)
    task: Any = create_task(config)
    task.check(config)
    backend = create_backend(config.backend)
    check_hardware(config, backend)
    rows = list(plan(config, overrides, task, backend))
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
        earlier = None if config.overwrite else read_json(place / "qualify.json")
        return Suite(task, rows, backend, place, _machine(backend, config.nproc, overrides), earlier).run()
    finally:
        lock.release()


def _machine(backend: Backend, nproc: int, overrides: Sequence[str]) -> dict[str, str]:
    """What tells a suite from that of another machine, or of this one with other software or keys."""
    own = sorted(each for each in overrides if not re.match(r"task[.=]|output_dir=|resume=|over", each))
    facts = {"backend": backend.name, "simulated": backend.simulate, "nproc": nproc, "overrides": own,
             "Python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count(),
             **package_versions(), **backend.packages(), **variables(backend)}  # fmt: skip
    facts.update({name: os.environ[name] for name in backend.visible_variables if name in os.environ})
    facts.update({f"card {card['index']}": " ".join(str(card[key]) for key in _IDENTITY if card.get(key) is not None)
                  for card in backend.monitor()})  # fmt: skip
    known = {name: value for name, value in facts.items() if not name.startswith(_OF_THE_JOB)}
    return {name: without_credentials(str(value)) for name, value in known.items()}


class Suite:
    """The checks of a machine, and what is known of them.

    Args:
        task: of the configuration.
        rows: all checks.
        backend: of the machine.
        place: folder of the suite.
        machine: its facts.
        earlier: content of ``qualify.json``; None: the suite begins anew.

    Raises:
        ConfigError: the folder is that of another machine.
    """

    def __init__(
        self, task: Qualify, rows: Sequence[Row], backend: Backend, place: Path, machine: Mapping[str, str],
        earlier: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.task, self.plan, self.backend, self.place, self.machine = task, rows, backend, place, machine
        self.signal: int | None = None
        self.version = f"{__version__}, {git_revision(Path(__file__).parent)}"
        self.terminal = console.make_console()
        self.rows: dict[str, dict[str, Any]] = {} if earlier is None else dict(earlier["rows"])
        before = machine if earlier is None else earlier["machine"]
        for name in sorted({*before, *machine}):
            if before.get(name) != machine.get(name):
                raise ConfigError(
                    f"{place} holds a suite of {name}={before.get(name)}, this one has {machine.get(name)}; set "
                    "another output_dir, or overwrite=true to begin anew"
                )

    def run(self) -> Finished:
        """Make what is left, and report."""
        left = [row for row in self.plan if not self._is_made(row)]
        self.terminal.print(
            f"qualify: {len(self.plan)} rows on {self.machine['nproc']} x {self.backend.name}"
            f"{', SIMULATED' * self.backend.simulate}; {len(self.plan) - len(left)} are there, and stay; "
            f"{self.task.budget_minutes:g} minutes\nfolder: {console.shown(self.place)}",
            soft_wrap=True,
        )
        deadline = time.monotonic() + self.task.budget_minutes * 60
        with handle_signals(lambda number, _: setattr(self, "signal", number)):
            for row in left:
                self._row(row, deadline)
        made = [self.rows[row.name] for row in self.plan]
        statuses = [each["status"] for each in made]
        unfinished = any(each["advice"] == _LATER for each in made)
        code = EXIT_FAILED if FAILED in statuses else EXIT_PREEMPTED if unfinished else EXIT_OK
        if self.signal is not None:
            code = EXIT_PREEMPTED if self.signal == PREEMPT_SIGNAL else 128 + self.signal
        self._write(code)
        counts = ", ".join(f"{statuses.count(each)} {each}" for each in (*_MADE, SKIPPED) if each in statuses)
        later = "\nthe same command goes on with what was skipped" if unfinished else ""
        self.terminal.print(f"{counts}; the page: {console.shown(self.place / 'qualify.md')}{later}", soft_wrap=True)
        return Finished(code, interrupted_by=None if self.signal is None else signal_name(self.signal))

    def _is_made(self, row: Row) -> bool:
        """A check whose folder was removed is made again."""
        return self.rows.get(row.name, {}).get("status") in _MADE and (self.place / "rows" / row.name).is_dir()

    def _row(self, row: Row, deadline: float) -> None:
        """Make a check, unless there is a reason not to."""
        started = self.rows.get(row.name, {}).get("started", 0)
        if self.task.rows is not None and not any(fnmatch(row.name, pattern) for pattern in self.task.rows):
            self._keep(row, skip("left out by task.rows"))
        elif self.signal is not None or time.monotonic() > deadline:
            self._keep(row, skip("the budget was spent" if self.signal is None else "the suite ended before", _LATER))
        elif started >= _STARTS:
            finding = f"the suite itself ended in this row, {started} times"
            self._keep(row, fail(finding, "see the machine's own log: dmesg, the driver's"), started)
        else:
            self._keep(row, skip("begun", _LATER), started + 1, tell=False)
            begun = time.monotonic()
            answer = self.answer(row)
            if self.signal is not None:
                answer = skip(f"ended by {signal_name(self.signal)}", _LATER)
            self._keep(row, answer, started + 1, round(time.monotonic() - begun))

    def answer(self, row: Row) -> Answer:
        """Run a check, and keep of what it leaves what tells how it went."""
        folder = self.place / "rows" / row.name
        shutil.rmtree(str(folder), ignore_errors=True)
        folder.mkdir(parents=True)
        deadline = time.monotonic() + self.task.row_minutes * 60
        try:
            for _ in range(_TRIES):
                arguments = [*_search(), *row.overrides, f"output_dir={folder}", "overwrite=true"]
                left_s = deadline - time.monotonic()
                ended = run_exp(arguments, folder / "output.log", left_s, lambda: self.signal is not None)
                lines, _ = read_journal(folder / f"{row.kind}.jsonl")
                if not (lines and "crash" in lines[-1]) or ended.late:
                    break
            result = read_json(folder / "result.json")
            if row.kind == "speed" and result and ended.code == EXIT_OK:
                return self._speed(row, result)
            return Answer(**result["answer"]) if result and result.get("answer") else _broken_off(row.kind, ended)
        except (ExpError, OSError, KeyError, ValueError, TypeError) as error:  # files that are not what a check leaves
            return fail(f"what it left cannot be read: {type(error).__name__}: {error}", "")
        finally:
            for path in sorted(folder.rglob("*"), reverse=True):  # checkpoints above all go
                with suppress(OSError):  # of a process that is just ending
                    if path.is_dir() and not path.is_symlink():
                        path.rmdir()  # where it is empty
                    elif not _KEPT.fullmatch(path.name):
                        path.unlink()

    def _speed(self, row: Row, result: Mapping[str, Any]) -> Answer:
        """See :func:`exp.checks.training.measure_speed`; the efficiency of several cards."""
        values: dict[str, Any] = {key: result[key] for key in _SPEED}
        memory = max((each for each in values["memory_by_rank"] if each), default=None)
        finding = f"{values['step_seconds'] * 1e3:.4g} ms a step, {values['samples_per_second']:.4g} samples/s"
        finding += f", {size(memory)} of memory" if memory else ""
        advice, nproc = "", row.about["nproc"]
        alone = self.rows.get(f"speed-{row.about['experiment']}-1", {}).get("values", {})
        if nproc > 1 and alone.get("samples_per_second"):
            efficiency = values["efficiency"] = values["samples_per_second"] / alone["samples_per_second"] / nproc
            finding += f", {efficiency:.0%} of {nproc} times one card"
            if efficiency < _EFFICIENT and self.backend.exclusive_devices and not self.backend.simulate:
                advice = "compare the collectives' bandwidth, and that of the loaders (data.num_workers)"
        return ok(finding, advice, **values)

    def _keep(self, row: Row, answer: Answer, started: int = 0, seconds: int | None = None, tell: bool = True) -> None:
        command = " ".join(["python -m exp", *_search(), *row.overrides])
        about = {"kind": row.kind, **row.about, **answer.__dict__}
        self.rows[row.name] = {**about, "seconds": seconds, "started": started, "command": command}
        self._write(None)
        if tell:
            took = f"{seconds:5} s" if seconds is not None else "       "
            self.terminal.print(f"{answer.status:8}", style=STYLES[answer.status], end="")
            self.terminal.print(f"{took}  {row.name}: {answer.finding}", soft_wrap=True, markup=False)

    def _write(self, code: int | None) -> None:
        """The record and the page, in the order of the plan; rows of an earlier plan stay, and do not count."""
        rows = {row.name: self.rows[row.name] for row in self.plan if row.name in self.rows}
        verdict = worst(row["status"] for row in rows.values())
        about = {"exp": self.version, "machine": self.machine, "verdict": verdict}
        record = {**about, "exit_code": code, "rows": {**rows, **self.rows}}
        write_json(self.place / "qualify.json", record)
        write_atomically(self.place / "qualify.md", without_credentials(_page_of(about, rows)).encode())


def _search() -> list[str]:
    """Where the user's own YAML files lie, for the children."""
    state = HydraConfig.get()
    folders = [source.path for source in state.runtime.config_sources if source.provider == "command-line"]
    searched = [each for each in state.overrides.hydra if each.startswith("hydra.searchpath=")]
    return [*(argument for folder in folders for argument in ("--config-dir", folder)), *searched]


def _broken_off(what: str, ended: Ended) -> Answer:
    """A command that did not do what it should."""
    if ended.late:
        return fail(f"{what}: its time was over", f"{_LOG}; where it is only slow, raise task.row_minutes")
    how = ended.error or (f"killed by {signal_name(-ended.code)}" if ended.code < 0 else f"exit code {ended.code}")
    if ended.code == EXIT_CONFIG and "is not supported by" in how:
        return skip(how)
    return fail(f"{what}: {how}", "install what is missing" if ended.code == EXIT_UNAVAILABLE else _LOG)


def _page_of(about: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    """The machine, a line for each row, and the table of each that has one. Of operators, those that are not equal."""
    machine = about["machine"]
    made_up = " (simulated: speeds say nothing)" * (machine["simulated"] == "True")
    left = sum(row["status"] == SKIPPED for row in rows.values())
    missing = f", {left} of {len(rows)} rows skipped" * bool(left)
    lines = [f"# {machine['nproc']} x {machine['backend']}{made_up}: {about['verdict']}{missing}", ""]
    lines += [f"- {name}: {value}" for name, value in {"exp": about["exp"], **machine}.items()]
    lines += ["", *_table_of([
        {"row": name, "": _MARKS.get(row["status"], row["status"]), "s": row["seconds"], "found": row["finding"],
         "what to do": row["advice"]} for name, row in rows.items()
    ])]  # fmt: skip
    for name, row in rows.items():
        shown = [line for line in row["values"].get("table", ()) if line.get("status") != "equal"]
        if shown and row["status"] != SKIPPED:
            lines += [f"## {name}", "", *_table_of(shown)]
    lines.append("Each row's command and all figures are in qualify.json, its logs in rows/.")
    return "\n".join(lines) + "\n"


def _table_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of equal keys as lines of Markdown, with an empty one at the end."""
    titles = [title for title in rows[0] if title != "not_finite"]  # which JSON adds to some of them
    cells = [[cell(row[title]).replace("|", "\\|").replace("\n", " ") for title in titles] for row in rows]
    return [*(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *cells)), ""]
