"""task=qualify: a suite of checks, run one after the other, each as a command in its own process.

A crash in a driver ends only that process (:mod:`~exp.checks.child`). ``qualify.json`` is written after each check, so
that the same command, started again, continues with the remaining checks. ``qualify.md`` shows the results as a page.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp import __version__, console
from exp.checks.check import FAILED, OK, SKIPPED, WARNING, CheckResult, Journal, fail, print_result, skip, table_of
from exp.checks.child import ChildEnd, config_dir_args, overrides_without, run_exp
from exp.config.compose import sets_output_dir
from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_UNAVAILABLE, ConfigError
from exp.hardware.environment import package_versions, reported_variables
from exp.hardware.registry import create_backend
from exp.launcher.freeze import check_hardware, compose_run
from exp.plugins import installed
from exp.report.formats import Table, as_markdown, count_words
from exp.runs.files import read_json, without_credentials, write_atomically, write_json
from exp.runs.folder import RunFolder
from exp.runs.inputs import git_revision
from exp.runs.lock import RunLock
from exp.task import create_task, task_class

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend


_SHORT = ("plots=false", "logger=none", "debug.eval_batches=1", "max_epochs=null")
_MAY_CHANGE = ("task", "output_dir", "overwrite", "resume")
"""Keys that may change when the same suite continues."""
_SET_BY_SUITE = (
    *_MAY_CHANGE, "experiment", "nproc", "precision", "max_steps", "max_epochs", "logger", "global_batch_size"
)  # fmt: skip
_IDENTITY = ("name", "uuid", "serial", "bus_id", "memory_total")
_JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")
"""Prefixes of environment variables that differ from job to job."""
_LATER = "the same command continues with it"
_BEST_FIRST = (SKIPPED, OK, WARNING, FAILED)  # the last one of them that a check has is the verdict
_MAX_TRIES = 4
"""How often one check is started; after a crash it skips the operators or collectives that crashed."""
_LOG = "look at output.log and logs/ in the check's folder"
_MIN_EFFICIENCY = 0.8
_BATCH_SIZES = {"operators": 4, "parity": 2, "speed": 8}
"""Samples per card, if the user sets no batch size."""


def plan(config: ExpConfig, overrides: Sequence[str], backend: Backend) -> dict[str, list[str]]:
    """All checks, the most important first, because the time budget may end the suite early.

    Args:
        config: configuration, with the backend already chosen.
        overrides: overrides of the user; every check gets them, except those that the suite itself sets.
        backend: the backend of ``config``.

    Returns:
        Overrides of ``python -m exp``, by name of the check. A name starts with the check's task.
    """
    common = [text for text in overrides_without(overrides, *_SET_BY_SUITE) if text != "backend=auto"]
    if not any(override.startswith("backend=") for override in common):
        common.append(f"backend={config.backend.name}")
    not_real_cards = backend.simulate or backend.capabilities.shared_device
    families = [family for plugin in installed().values() for family in plugin.families.values()]
    examples: dict[str, Sequence[str]] = {family.example: family.small for family in families}
    small_form = {name: examples.get(name, ()) for name in config.task.experiments or examples}
    speed_form = small_form if not_real_cards else dict.fromkeys(small_form, ())
    precisions, nproc = backend.capabilities.precisions, config.nproc
    checks: dict[str, list[str]] = {}

    def add(kind: str, suffix: object, steps: int, *extra: str, cards: int = 1, precision: str = "fp32") -> None:
        """Add a check for each experiment, which trains ``steps`` steps."""
        batch = [f"batch_size={_BATCH_SIZES[kind]}", "global_batch_size=null"]
        last = [f"max_steps={steps}", f"precision={precision}", f"nproc={cards}"]
        for name, small in (speed_form if kind == "speed" else small_form).items():
            first = [f"task={kind}", f"experiment={name}", *_SHORT, *small, *batch]
            checks[f"{kind}-{name}-{suffix}"] = [*first, *extra, *common, *last]

    # Overrides may name keys that only the experiment has.
    first = [f"experiment={name}" for name in small_form][:1]
    checks["doctor"] = ["task=doctor", *first, *common, f"nproc={nproc}"]
    add("operators", precisions[0], 1, precision=precisions[0])
    if nproc > 1:
        sizes = ["task.sizes_kib=[4,64,1024]"] * not_real_cards
        checks["collectives"] = ["task=collectives", "launcher.timeout_s=60", *first, *sizes, *common, f"nproc={nproc}"]
    for number in dict.fromkeys((1, nproc)):
        add("parity", number, 5, "task.steps=5", cards=number)
    for precision in precisions[1:]:
        add("operators", precision, 1, precision=precision)
    for number in [*(2**power for power in range(20) if 2**power < nproc), nproc]:
        add("speed", number, config.task.steps, "val_every=10000000", cards=number)
    return checks


def qualify(config: ExpConfig, overrides: list[str]) -> int:
    """Run all checks that have no result yet; see docs/hardware/checks.md.

    Args:
        config: composed configuration; its ``output_dir`` is used only if an override sets it.
        overrides: overrides of the user.

    Returns:
        The exit code.

    Raises:
        ConfigError: a pattern of ``task.checks`` matches no check; the folder has the suite of another machine, or is
            used by another process.
        UnavailableError: the backend is not available, or has fewer cards than ``nproc``.
    """
    config = compose_run(config, overrides)
    create_task(task_class(config), config.task).check(config)
    backend = create_backend(config.backend)
    check_hardware(config, backend)
    planned = plan(config, overrides, backend)
    for pattern in config.task.checks or ():
        if not fnmatch.filter(planned, pattern):
            raise ConfigError(f"task.checks: {pattern} matches no check; the checks are {', '.join(planned)}")
    path = config.output_dir if sets_output_dir(config) else f"outputs/qualify/{backend.name}_{config.nproc}"
    folder, machine = RunFolder(path), machine_of(backend, config.nproc, overrides)
    folder.create()
    lock = RunLock(folder.path)
    lock.acquire()
    try:
        record = (None if config.overwrite else read_json(folder.path / "qualify.json")) or {}
        recorded = record.get("machine", machine)
        differing = [name for name in {**recorded, **machine} if recorded.get(name) != machine.get(name)]
        if differing:
            texts = (f"{name}={recorded.get(name)}, and this one has {machine.get(name)}" for name in differing)
            advice = "set another output_dir, or overwrite=true to start from the beginning"
            raise ConfigError(f"{folder.path} holds a suite of {', '.join(texts)}", advice, file=folder.path)
        return _Suite(config.task, planned, backend, folder.path, machine, record.get("checks", {})).run()
    finally:
        lock.release()


def machine_of(backend: Backend, nproc: int, overrides: Sequence[str]) -> dict[str, str]:
    """Facts that identify the suite: machine, software, environment variables and overrides."""
    kept_overrides = sorted(overrides_without(overrides, *_MAY_CHANGE))
    facts = {"backend": backend.name, "simulated": backend.simulate, "nproc": nproc, "overrides": kept_overrides,
             "Python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count(),
             **package_versions(), **backend.packages(), **reported_variables(backend)}  # fmt: skip
    facts.update({name: os.environ[name] for name in backend.visible_variables if name in os.environ})
    for card in backend.monitor():
        facts[f"card {card['index']}"] = " ".join(str(card[key]) for key in _IDENTITY if card.get(key) is not None)
    identifying = {name: value for name, value in facts.items() if not name.startswith(_JOB_VARIABLES)}
    return {name: without_credentials(str(value)) for name, value in identifying.items()}


@dataclass
class _Suite:
    """The checks of a machine and their results.

    Attributes:
        task: the task of the configuration.
        plan: overrides of all checks, by name.
        backend: the backend under test.
        folder: folder of the suite.
        machine: facts from :func:`machine_of`.
        results: for each check, by its name, the fields of its result and its ``command``, as in ``qualify.json``.
        interrupted: how a check ended for which this process received a signal; None: no signal.
    """

    task: Any
    plan: Mapping[str, list[str]]
    backend: Backend
    folder: Path
    machine: Mapping[str, str]
    results: dict[str, dict[str, Any]]
    interrupted: ChildEnd | None = None

    def run(self) -> int:
        """Run the remaining checks; returns the exit code."""
        task, terminal = self.task, console.make_console()
        remaining = [name for name in self.plan if self.results.get(name, {}).get("status", SKIPPED) == SKIPPED]
        simulated = ", SIMULATED" * self.backend.simulate
        terminal.print(
            f"qualify: {len(self.plan)} checks on {self.machine['nproc']} x {self.backend.name}{simulated}; "
            f"{len(self.plan) - len(remaining)} are done already; time budget {task.budget_minutes:g} minutes\n"
            f"folder: {console.display_path(self.folder)}", soft_wrap=True
        )  # fmt: skip
        deadline = time.monotonic() + task.budget_minutes * 60
        for name in remaining:
            started = time.monotonic()
            if task.checks is not None and not any(fnmatch.fnmatch(name, pattern) for pattern in task.checks):
                check = skip("left out by task.checks")
            elif self.interrupted is not None:
                check = skip("the suite was interrupted", _LATER)
            elif started > deadline:
                check = skip("the time budget was used up", _LATER)
            else:
                self._store(name, skip("started, but not finished", _LATER))
                check = self._run_check(name)
                check.seconds = round(time.monotonic() - started)
            self._store(name, check)
            duration = "" if check.seconds is None else f", {check.seconds:g} s"
            print_result(CheckResult(check.status, f"{name}{duration}: {check.finding}"))
        statuses = [self.results[name]["status"] for name in self.plan]
        unfinished = any(self.results[name]["advice"] == _LATER for name in self.plan)
        later = "\nthe same command continues with the skipped checks" if unfinished else ""
        page = console.display_path(self.folder / "qualify.md")
        terminal.print(f"{count_words(statuses)}; the page: {page}{later}", soft_wrap=True)
        if self.interrupted is not None:
            return self.interrupted.code
        return EXIT_FAILED if FAILED in statuses else EXIT_PREEMPTED if unfinished else EXIT_OK

    def _run_check(self, name: str) -> CheckResult:
        """Run a check; after a crash start it again, without the operators or collectives that crashed."""
        folder, kind = self.folder / "checks" / name, name.partition("-")[0]
        shutil.rmtree(str(folder), ignore_errors=True)
        folder.mkdir(parents=True)
        deadline = time.monotonic() + self.task.check_minutes * 60
        for _ in range(_MAX_TRIES):
            arguments = [*self.plan[name], f"output_dir={folder}", "overwrite=true"]
            ended = run_exp(arguments, folder / "output.log", deadline - time.monotonic())
            timed_out, (lines, _) = time.monotonic() > deadline, Journal.read(folder / f"{kind}.jsonl")
            if not (lines and "crash" in lines[-1]) or timed_out or ended.interrupted_by:
                break
        if ended.interrupted_by:
            self.interrupted = ended
            return skip(f"ended by {ended.interrupted_by}", _LATER)
        result = (read_json(folder / "result.json") or {}).get("check")
        if result is not None:
            return self._with_efficiency(name, CheckResult(**result))
        if timed_out:
            return fail(f"{kind}: exceeded its time limit", f"{_LOG}; if it is only slow, raise task.check_minutes")
        return fail(f"{kind}: {ended.why}", "install what is missing" if ended.code == EXIT_UNAVAILABLE else _LOG)

    def _with_efficiency(self, name: str, check: CheckResult) -> CheckResult:
        """The result of a check; that of a speed on several cards with the efficiency of scaling."""
        prefix, _, number = name.rpartition("-")
        one_card_rate = self.results.get(f"{prefix}-1", {}).get("values", {}).get("samples_per_second")
        if one_card_rate and number != "1":
            efficiency = check.values.get("samples_per_second", 0) / one_card_rate / int(number)
            check.values["efficiency"] = efficiency
            check.finding += f", {efficiency:.0%} of {number} times one card"
            real_cards = not self.backend.capabilities.shared_device and not self.backend.simulate
            if efficiency < _MIN_EFFICIENCY and real_cards:
                check.status = WARNING
                check.advice = "check the bandwidth of the collectives and the speed of loading (data.num_workers)"
        return check

    def _store(self, name: str, check: CheckResult) -> None:
        """Store a result, and write ``qualify.json`` and ``qualify.md``, in the order of the plan.

        Checks of an earlier plan stay in ``qualify.json``, but do not count for the verdict.
        """
        command = " ".join(["python -m exp", *config_dir_args(), *self.plan[name]])
        self.results[name] = {**asdict(check), "command": command}
        results = {name: self.results[name] for name in self.plan if name in self.results}
        verdict = max((result["status"] for result in results.values()), key=_BEST_FIRST.index)
        version = f"{__version__}, {git_revision(Path(__file__).parent)}"
        record = {"exp": version, "machine": self.machine, "verdict": verdict}
        write_json(self.folder / "qualify.json", {**record, "checks": {**results, **self.results}})
        write_atomically(self.folder / "qualify.md", without_credentials(_page_of(record, results)).encode())


def _page_of(record: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """The page: the machine, one line per check, and the tables of the checks, without operators that are equal."""
    machine = record["machine"]
    lines = [f"# {machine['nproc']} x {machine['backend']}: {record['verdict']}", ""]
    lines += [f"- {name}: {value}" for name, value in {"exp": record["exp"], **machine}.items()]
    columns = {"status": "status", "s": "seconds", "finding": "finding", "advice": "advice"}
    overview = [{"check": name, **{title: result[key] for title, key in columns.items()}}
                for name, result in results.items()]  # fmt: skip
    lines += ["", as_markdown([Table.of(overview)])]
    for name, result in results.items():
        table = table_of(result["values"])
        lines += [f"## {name}", "", as_markdown([table])] if table is not None else []
    lines.append("Each check's command and all numbers are in qualify.json, its logs in checks/.")
    return "\n".join(lines) + "\n"
