"""The jobs of a sweep: frozen first, then run side by side or as a Slurm job array, and reported as they end."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Collection, Sequence

from hydra.errors import HydraException
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp import console, launcher
from exp.config import explain
from exp.config.compose import load, refuse_empty, task_type
from exp.config.differences import as_plain
from exp.config.schema import ExpConfig
from exp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PREEMPTED,
    REFUSED,
    ConfigError,
    Ended,
    ExpError,
    RunError,
)
from exp.frozen import FrozenRun, complete
from exp.hub import bring
from exp.launcher.base import Launcher, launcher_class
from exp.launcher.outcome import Outcome
from exp.launcher.rank import drop_stale_variables
from exp.runs.files import read_json, to_json
from exp.runs.folder import RunFolder, missing_folders, read_result, remove_empty
from exp.runs.lock import RunLock
from exp.runs.record import selecting_value
from exp.runs.status import PREEMPT_SIGNAL
from exp.sweep.display import SweepDisplay
from exp.sweep.packing import pack

if TYPE_CHECKING:
    from exp.report.runs import Run
    from exp.sweep.composing import Composer

__all__ = ["Job", "NoMetric", "Sweep", "begin", "explained", "finish", "require_jobs"]

_OF_HYDRA = "multirun.yaml"
_ELSEWHERE = ("figures", "launcher", "output_dir", "overwrite", "plots", "record", "report_placement", "resume",
              "resume_changed_data", "sweep")  # fmt: skip
"""Configuration keys that do not change what a run computes."""

_current: list[Sweep] = []


class NoMetric(float):
    """The metric of a job without one: nan in calculations, but ``float(...)`` of it raises.

    Nevergrad and Ax treat nan as a failed job. Optuna's sweeper marks a trial as failed if its value is no number, but
    ends the whole search if the value is nan.
    """

    def __new__(cls) -> NoMetric:
        """Make the value nan."""
        return super().__new__(cls, "nan")

    def __float__(self) -> float:
        """Raise ValueError."""
        raise ValueError("the job has no metric")


@dataclass
class Job:
    """One job of a sweep, and what is known of it."""

    number: int
    overrides: list[str] = field(default_factory=list)
    run: FrozenRun | None = None
    """None if the configuration of the job was refused."""
    outcome: Outcome | None = None
    skipped: bool = False
    """Whether an earlier sweep has completed the job."""

    @property
    def metric(self) -> float:
        """The value for the sweeper; :class:`NoMetric` if the job has not completed or has no finite metric."""
        done = self.skipped or (
            self.outcome is not None and self.outcome.exit_code == EXIT_OK and not self.outcome.left
        )
        value = selecting_value(read_json(self.run.folder.result)) if self.run is not None and done else None
        return NoMetric() if value is None or value != value else value

    def title(self, common: Collection[str] = ()) -> str:
        """Number of the job's folder and its overrides that are not ``common``, such as ``3 seed=2 optim.lr=0.001``."""
        number = str(self.number) if self.run is None else self.run.folder.path.name
        return " ".join([number, *(override for override in self.overrides if override not in common)])


class Sweep:
    """All jobs of one command line; a sweeper may ask for them batch by batch.

    Args:
        config: composed for the whole sweep, including the node ``hydra``.

    Raises:
        ConfigError: the folder has another sweep, or another process uses it.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.folder = folder = Path(str(config.hydra.sweep.dir)).absolute()
        self.settings = config.sweep
        self.jobs: list[Job] = []
        self.began = time.monotonic()
        self.interrupted_by: str | None = None
        self.asked = self.busy = self.dry = self.launched = self.preempted = False
        self.runs: list[Run] = []
        """The runs that can be compared, read after the last batch."""
        self._missing = missing_folders(folder)
        self._earlier: dict[str, list[tuple[Path, bool]]] = {}
        self.lock = RunLock(folder)
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        try:
            self.lock.acquire()
            existing = _run_folders(folder)
            if existing and not self.settings.resume:
                raise ConfigError(
                    f"output_dir={folder} has a sweep already; set sweep.resume=true to continue it, or use another one"
                )
            self._earlier = _find_earlier(existing)
        except ExpError:
            self.lock.release()
            remove_empty(self._missing)
            raise
        self._taken = {path.name for path in existing}

    def run(self, overrides: Sequence[Sequence[str]], first: int, composer: Composer) -> list[float]:
        """Freeze the jobs of a batch, run them, and wait until all have ended.

        Args:
            overrides: a list for each job.
            first: Hydra's number of the first job, from 0.
            composer: makes the configurations.

        Returns:
            The metric of each job; :class:`NoMetric` for one that failed.

        Raises:
            KeyboardInterrupt: a signal has ended the sweep.
            ExpError: all jobs of the first batch were refused, or the sweeper searches in the wrong direction.
        """
        self.asked = self.asked or bool(overrides)
        self.busy = True  # until this method returns: an error raised meanwhile is not the sweeper's
        require_jobs()
        if self.preempted:  # a sweeper that goes by results would search on without those
            raise Ended(PREEMPT_SIGNAL, EXIT_PREEMPTED)
        batch = self._freeze(list(map(list, overrides)), first, composer)
        self._run(batch)
        self._check_direction()
        self.busy = False
        return [job.metric for job in batch]

    def _freeze(self, overrides: list[list[str]], first: int, composer: Composer) -> list[Job]:
        """The jobs of a batch, frozen; a job whose configuration is refused counts as failed."""
        master = self.config
        batch = [Job(number) for number in range(first, first + len(overrides))]
        for job, given in zip(batch, overrides):
            try:
                job.overrides = composer.task_overrides(given)
                config = composer.prepared(master, given, job.number)
                in_parent = hasattr(task_type(config.task.get("_target_")), "run_in_parent")
                if in_parent or launcher_class(config).joins:
                    what = f"task={config.task.name}" if in_parent else "launcher=external"
                    raise ConfigError(f"{what} cannot be swept; start it without -m (several runs as 'run=[a,b]')")
                sets_folder = any(each.lstrip("+").startswith("output_dir=") for each in job.overrides)
                if sets_folder and str(config.output_dir) != str(master.output_dir):
                    raise ConfigError(
                        "output_dir is the folder of the whole sweep, with a subfolder for each job; it cannot differ "
                        "between jobs. Sweep other keys, or start a sweep for each folder"
                    )
                # _place sets the folder: a new one, or that of the same job in an earlier sweep.
                job.run = complete(config, job.overrides, self.folder / "new")
                self._place(job, job.run)
            except ExpError as error:
                job.outcome = Outcome(error.exit_code, detail=str(error))
            except (HydraException, OmegaConfBaseException) as error:
                job.outcome = Outcome(EXIT_CONFIG, detail=explain.explain(error, explain.default_keys()))
        return batch

    def _place(self, job: Job, run: FrozenRun) -> None:
        same = self._earlier and self._earlier.get(_identity(run.config))
        if same:
            path, job.skipped = same.pop(0)  # of two equal jobs, each continues a folder of its own
            run.config.resume = run.config.resume or "auto"
        else:
            name = next(str(number) for number in itertools.count(job.number) if str(number) not in self._taken)
            self._taken.add(name)
            path = self.folder / name
        run.config.output_dir = str(path)
        run.folder = RunFolder(path)

    def _run(self, batch: list[Job]) -> None:
        refused = [job.outcome for job in batch if job.run is None and job.outcome is not None]
        if len(refused) == len(batch) and not self.jobs:
            error = ExpError("\n".join(dict.fromkeys(outcome.detail or "" for outcome in refused)))
            error.exit_code = max(outcome.exit_code for outcome in refused)
            raise error
        drop_stale_variables()
        first, self.jobs = not self.jobs, [*self.jobs, *batch]
        runs = [job.run for job in batch if job.run is not None and not job.skipped]
        chosen = _common_launcher(runs)
        script = None if chosen is None else chosen.preflight(runs, self.folder / "slurm")
        if script is not None:
            console.make_console().out(script, highlight=False)
            self.dry = True
            return
        self._launch(batch, chosen, first)
        self.runs = _results(self.folder)
        if self.runs:
            from exp.report.tables import write_rows

            write_rows(self.runs, self.folder)
        if self.interrupted_by is not None:
            raise KeyboardInterrupt

    def _launch(self, batch: list[Job], chosen: Launcher | None, first: bool) -> None:
        self.launched = True
        to_run: list[Job] = []
        for job in batch:
            if job.run is not None and not job.skipped:
                try:
                    bring(job.run.config)
                    job.run.write()
                    to_run.append(job)
                except ExpError as error:  # for example, another process uses the folder
                    job.outcome = Outcome(error.exit_code, detail=str(error))
        runs = [job.run for job in to_run if job.run is not None]
        display = SweepDisplay(self, to_run)
        with display:
            if first:
                done = sum(job.skipped for job in batch)
                display.say(f"{done} of {len(batch)} jobs are done already") if done else None
                jobs = "1 job" if len(to_run) == 1 else f"{len(to_run)} jobs"
                display.say(f"{jobs} to run; sweep folder: {console.shown(self.folder)}")
            for job in batch:
                if job.outcome is not None:
                    display.refused(job)
            if chosen is not None and runs:
                outcomes = chosen.launch_all(runs, display, self.folder / "slurm")
            else:
                outcomes = pack(runs, self.settings.parallel_jobs, display)
                self.preempted = any(outcome.preempted is not None for outcome in outcomes)
        for job, run, outcome in zip(to_run, runs, outcomes):
            run.release()
            job.outcome = outcome
            self.interrupted_by = self.interrupted_by or outcome.interrupted_by

    def _check_direction(self) -> None:
        """Refuse a sweeper that minimizes a metric of which larger is better, or the reverse."""
        direction = self.config.hydra.sweeper.get("direction")
        direction = direction[0] if isinstance(direction, ListConfig) and direction else direction
        direction = getattr(direction, "name", direction)  # it may be an enum member
        for run in self.runs:
            greater = bool(run.result.get("greater_is_better"))
            right = "maximize" if greater else "minimize"
            if run.metric is not None and direction in ("minimize", "maximize") and direction != right:
                raise ConfigError(
                    f"hydra.sweeper.direction={direction} looks for the worst {run.metric_name}, of which "
                    f"{'larger' if greater else 'smaller'} is better; set hydra.sweeper.direction={right}"
                )

    def common_overrides(self) -> set[str]:
        """The overrides that all jobs have."""
        return set.intersection(*(set(job.overrides) for job in self.jobs)) if len(self.jobs) > 1 else set()

    def exit_code(self) -> int:
        """Exit code of the sweep.

        Returns:
            0: no job failed; 75: jobs were preempted, and none failed; 128 + n: interrupted by signal n; the common
            code if all jobs failed with the same one; otherwise 1.
        """
        outcomes = [job.outcome for job in self.jobs if job.outcome is not None]
        interrupted = [outcome.exit_code for outcome in outcomes if outcome.interrupted_by is not None]
        codes = {outcome.exit_code for outcome in outcomes} - {EXIT_OK}
        if interrupted or self.dry or not codes:
            return interrupted[0] if interrupted else EXIT_OK
        if codes == {EXIT_PREEMPTED}:
            return EXIT_PREEMPTED
        everyone = len(outcomes) == len(self.jobs) and all(outcome.exit_code for outcome in outcomes)
        return codes.pop() if everyone and len(codes) == 1 else EXIT_FAILED

    def remove(self) -> None:
        """Remove the files and folders of a sweep of which no job has begun."""
        if _run_folders(self.folder):
            return
        if self.folder in self._missing:
            shutil.rmtree(str(self.folder), ignore_errors=True)
        elif (self.folder / _OF_HYDRA).is_file():
            (self.folder / _OF_HYDRA).unlink()
        remove_empty(self._missing)

    def report(self, rest: Callable[[Path], str | None]) -> None:
        """Print the table of results and the number of jobs by state; write the report with its plots.

        Args:
            rest: gives the command that does what is left of the sweep in a folder.
        """
        from exp.report.tables import as_rich, results_tables

        terminal = console.make_console()
        terminal.print()
        for table in results_tables(self.runs):
            terminal.print(as_rich(table))
        states = [_state(job) for job in self.jobs]
        text = ", ".join(f"{states.count(state)} {state}" for state in _STATES if state in states)
        seconds, place = time.monotonic() - self.began, console.shown(self.folder)
        terminal.print(f"{text}; {seconds:.0f} s; results in {place}", soft_wrap=True)
        if {"interrupted", "preempted", "not begun"} & set(states):
            terminal.print(f"to do the rest: {rest(self.folder)}", soft_wrap=True, markup=False)
        completed = any(run.status == "completed" for run in self.runs)
        if completed and self.settings.plots and "submitted" not in states and self.interrupted_by is None:
            from exp.report.page import write_report

            page = write_report(self.runs, self.folder, self.config.name)
            terminal.print(f"report: {console.shown(page)}", soft_wrap=True)


_STATES = ("completed", "done before", "submitted", "failed", "interrupted", "preempted", "not begun")


def _state(job: Job) -> str:
    """The state of a job, one of ``_STATES``."""
    outcome = job.outcome
    if job.skipped:
        return "done before"
    if outcome is None or not outcome.begun:
        return "not begun"
    if outcome.left or outcome.interrupted_by is not None:
        return "submitted" if outcome.left else "interrupted"
    return {EXIT_OK: "completed", EXIT_PREEMPTED: "preempted"}.get(outcome.exit_code, "failed")


def _common_launcher(runs: list[FrozenRun]) -> Launcher | None:
    """The launcher of all jobs, if they run on a cluster; None if they run on this machine.

    Raises:
        ConfigError: the jobs have different launchers or ask for different resources.
    """
    configs = [run.config for run in runs]
    if not any(launcher_class(config).is_elsewhere(config.launcher) for config in configs):
        return None
    if len({to_json([OmegaConf.to_container(c.launcher, resolve=True), c.nproc]) for c in configs}) > 1:
        raise ConfigError(
            "a sweep on Slurm is one job array, whose jobs all ask for the same resources; start a command of its own "
            "for each value of launcher.* and nproc"
        )
    return launcher.resolve(configs[0].launcher, configs[0].nproc)


def _run_folders(folder: Path) -> list[Path]:
    """The run folders of a sweep, sorted by path."""
    return [path.parent for path in sorted(folder.glob("*/config.yaml"))]


def _identity(config: ExpConfig) -> str:
    """A digest of a configuration without the keys that do not change what a run computes."""
    kept = {key: value for key, value in as_plain(config).items() if key not in _ELSEWHERE}
    return hashlib.sha256(to_json(kept, sort_keys=True, default=str).encode()).hexdigest()


def _find_earlier(folders: Sequence[Path]) -> dict[str, list[tuple[Path, bool]]]:
    """The run folders of an earlier sweep, by :func:`_identity`, each with whether it is completed (these first)."""
    found: dict[str, list[tuple[Path, bool]]] = {}
    for path in folders:
        try:
            key = _identity(load(RunFolder(path).config))  # typed, so that newer keys have their defaults
        except OmegaConfBaseException:
            continue  # written by another version of exp, with keys that no longer exist
        result = read_result(RunFolder(path)) or {}
        found.setdefault(key, []).append((path, result.get("status") == "completed"))
    return {key: sorted(jobs, key=lambda job: not job[1]) for key, jobs in found.items()}


def _results(folder: Path) -> list[Run]:
    """The runs of a sweep that can be compared; empty if no task of theirs has comparable results (``task=doctor``)."""
    from exp.report.runs import find_runs

    try:
        return find_runs([folder]) if _run_folders(folder) else []
    except ConfigError:
        return []


def begin(config: Any) -> Sweep:
    """The sweep of this command line; the first call makes it and its folder, before Hydra writes there.

    Args:
        config: composed for the whole sweep, including the node ``hydra``.

    Raises:
        ConfigError: the path of the folder is empty, the folder has another sweep, or ``hydra.sweep.subdir`` is set.
    """
    if not _current:
        refuse_empty("output_dir", config.get("output_dir"))
        refuse_empty("hydra.sweep.dir", config.hydra.sweep.dir)
        written: Any = OmegaConf.to_container(config.hydra.sweep)
        if written["subdir"] != "${hydra.job.num}":
            raise ConfigError(
                "hydra.sweep.subdir cannot be set: jobs of a sweep are in <output_dir>/0, 1, 2, ...; leave it out "
                "(sweep.csv has the overrides of each job)"
            )
        if config.sweep.resume and "output_dir" not in str(list(config.hydra.overrides.task)):
            raise ConfigError("sweep.resume=true needs output_dir=<the folder of the sweep to go on with>")
        _current.append(Sweep(config))
    return _current[0]


def require_jobs() -> None:
    """Refuse a sweep whose sweeper has not asked for any job.

    Raises:
        ConfigError: the sweep has no job.
    """
    for sweep in _current:
        if not sweep.asked:
            raise ConfigError(
                f"the sweep has no job: {' '.join(sweep.config.hydra.overrides.task)}; correct the range, choice or "
                "glob() that has no value (glob() is for the choices of a config group), or hydra.sweeper.*"
            )


def explained(error: Exception) -> Exception | None:
    """Turn an error of the sweeper, such as Optuna's if no trial has a value, into one of exp's.

    Returns:
        The new error; ``error`` itself if it was raised while jobs ran, so that the sweeper is not its cause; None
        after a dry run, in which the sweeper only misses the results.
    """
    sweep = _current[0] if _current else None
    if sweep is None or sweep.busy or sweep.dry:
        return None if sweep is not None and sweep.dry else error
    kind = RunError if sweep.asked else ConfigError  # before the first job, only the sweeper's settings can be wrong
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return kind(f"the sweeper has ended the sweep: {first}; see hydra.sweeper.*")


def finish(rest: Callable[[Path], str | None]) -> tuple[int, str | None, list[Path]]:
    """End the sweep after its last batch: release the lock, print the table, write the report.

    Args:
        rest: of :meth:`Sweep.report`.

    Returns:
        The exit code, the name of the signal that ended the sweep (or None), and the run folders.
    """
    if not _current:
        return EXIT_OK, None, []
    sweep = _current.pop()
    lost = sweep.lock.check()
    if lost is not None:
        console.error(lost)
    sweep.lock.release()
    code = sweep.exit_code() if sweep.launched or sweep.dry else EXIT_OK  # it may have ended before its first job
    taken_back = [job.run is None or job.run.take_back() for job in sweep.jobs if code in REFUSED]
    runs = _run_folders(sweep.folder) if sweep.launched and not (code in REFUSED and all(taken_back)) else []
    if runs:
        sweep.report(rest)
    else:
        sweep.remove()
    return code, sweep.interrupted_by if sweep.launched else None, runs
