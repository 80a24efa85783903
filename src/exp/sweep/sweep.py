"""The jobs of a sweep: frozen first, then run side by side or as a Slurm job array, and reported as they end."""

from __future__ import annotations

import itertools
import shutil
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Collection, Sequence

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp import console
from exp.config.compose import check_not_empty, load, sets_output_dir, typed
from exp.config.resolve import to_plain
from exp.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PREEMPTED,
    REFUSAL_CODES,
    ConfigError,
    ExpError,
    RunError,
    SignalReceived,
    first_line,
)
from exp.hub import download
from exp.launcher.base import Classes, FrozenRun, Launcher
from exp.launcher.freeze import validate_run
from exp.launcher.outcome import Outcome, ProgressDisplay, describe_failure
from exp.launcher.rank_environment import check_stale_environment
from exp.report.formats import as_rich
from exp.report.runs import Run, is_compared, natural_key, read_run
from exp.report.tables import results_tables, write_rows
from exp.runs.files import read_json, to_json
from exp.runs.folder import RunFolder, validation_metric
from exp.runs.lock import RunLock
from exp.sweep.composing import Composer
from exp.sweep.scheduler import run_locally
from exp.task import ParentTask, Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig


_MULTIRUN_FILE = "multirun.yaml"
_IGNORED_KEYS = ("figures", "launcher", "output_dir", "overwrite", "plots", "record", "report_placement", "resume",
                 "resume_changed_data", "sweep")  # fmt: skip
"""Configuration keys that do not change what a run computes."""
_COUNTS_ROW = -1  # number of the first row of the display


class MissingMetric(float):
    """The metric of a job without one: nan in calculations, but ``float(...)`` of it raises.

    Nevergrad and Ax treat nan as a failed job. Optuna's sweeper marks a trial as failed if its value is no number, but
    ends the whole search if the value is nan.
    """

    def __new__(cls) -> MissingMetric:
        """Make the value nan."""
        return super().__new__(cls, "nan")

    def __float__(self) -> float:
        """Raise ValueError."""
        raise ValueError("the job has no metric")


@dataclass
class Job:
    """One job of a sweep, and its state so far.

    Attributes:
        run: not frozen if its configuration was refused.
        skipped: whether an earlier sweep has completed the job.
    """

    run: FrozenRun
    outcome: Outcome | None = None
    skipped: bool = False

    @property
    def state(self) -> str:
        """The state of the job, in words."""
        outcome = self.outcome
        if self.skipped:
            return "done before"
        if outcome is None:
            return "not begun"
        if outcome.still_running or outcome.interrupted_by is not None:
            return "submitted" if outcome.still_running else "interrupted"
        return {EXIT_OK: "completed", EXIT_PREEMPTED: "preempted"}.get(outcome.exit_code, "failed")

    @property
    def metric(self) -> float:
        """The value for the sweeper; :class:`MissingMetric` if the job has not completed or has no finite metric."""
        has_result = self.state in ("completed", "done before")
        value = validation_metric(read_json(self.run.folder.result)) if has_result else None
        return MissingMetric() if value is None or value != value else value

    def title(self, common: Collection[str] = ()) -> str:
        """Number of the job's folder and its overrides that are not ``common``, such as ``3 seed=2 optim.lr=0.001``."""
        return " ".join([self.run.folder.path.name, *(text for text in self.run.overrides if text not in common)])


class SweepDisplay(ProgressDisplay):
    """Shows one batch of a sweep.

    Args:
        jobs: jobs of the batch to run; ``number`` in the methods is the index in this list.
        common: overrides that all jobs have, which titles leave out.

    Attributes:
        error: the last error that was printed; None: there was none.
    """

    def __init__(self, jobs: Sequence[Job], common: Collection[str]) -> None:
        super().__init__()
        self.jobs, self._common_overrides = jobs, common
        self._ended = self._failed = 0
        self.error: str | None = None

    def state(self, number: int, text: str) -> None:
        """Show the state of a running job, below counts of all; only on a terminal."""
        num_running = len(self.rows.keys() - {_COUNTS_ROW})
        num_waiting = len(self.jobs) - self._ended - num_running
        counts = f"{num_running} under way, {num_waiting} waiting, {self._failed} failed"
        self.draw(_COUNTS_ROW, f"{self._ended} of {len(self.jobs)} ended, {counts}")
        if number in self.rows or text.startswith("running"):
            self.draw(number, f"  {self.jobs[number].title(self._common_overrides)}  {text}")

    def ended(self, number: int, outcome: Outcome) -> None:
        """Print the result or the failure of a job."""
        self._ended += 1
        if number in self.rows:
            self.live.remove_task(self.rows.pop(number))
        job, folder = self.jobs[number], self.jobs[number].run.folder
        if outcome.exit_code not in (EXIT_OK, EXIT_PREEMPTED):
            self.failed(job, describe_failure(outcome, folder))
            return
        result = read_json(folder.result) or {}
        text = "preempted" if outcome.exit_code == EXIT_PREEMPTED else "done"
        if result.get("metric") is not None:
            chosen_by = validation_metric(result)
            text = f"{result['metric_name']} {console.format_metric(result['metric'])}"
            text += "" if chosen_by is None else f" (validation {console.format_metric(chosen_by)})"
        seconds = f"  {result['wall_s']:.0f} s" if result.get("wall_s") else ""
        self.say(f"{job.title(self._common_overrides)}: {text}{seconds}  ({self._ended} of {len(self.jobs)})")

    def failed(self, job: Job, text: str) -> None:
        """Print the error of a job."""
        self._failed += 1
        self.error = f"{job.title(self._common_overrides)}: {text}"
        console.error(self.error)


class Sweep:
    """All jobs of one command line; a sweeper may ask for them batch by batch.

    Args:
        config: composed for the whole sweep, including the node ``hydra``.
        composer: makes the configurations of the jobs.

    Raises:
        ConfigError: the path of the folder is empty, the folder has another sweep, or another process uses it.

    Attributes:
        received: the signal that has ended the jobs of a batch on this machine.
        error: the last error of a job that was printed; None: there was none.
        runs: the runs that can be compared, by folder, as of the last batch.
    """

    def __init__(self, config: Any, composer: Composer) -> None:
        check_not_empty("output_dir", config.get("output_dir"))
        settings = typed(OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])).sweep
        if settings.resume and not sets_output_dir(config):
            raise ConfigError("sweep.resume=true needs output_dir=<the folder of the sweep to continue>")
        self.config, self.composer, self.settings = config, composer, settings
        self.folder = folder = Path(str(config.hydra.sweep.dir)).absolute()
        self.jobs: list[Job] = []
        self.started = time.monotonic()
        self.in_batch = self.dry_run = self.launched = False
        self.received: int | None = None
        self.error: str | None = None
        self.runs: dict[Path, Run] = {}
        self._runs_not_in_table = 0  # runs read that ``sweep.csv`` lacks
        self._common_overrides: set[str] = set()
        self.lock = RunLock(folder)
        try:
            self.lock.acquire()
            existing = _run_folders(folder)
            if existing and not self.settings.resume:
                raise ConfigError(
                    f"output_dir={folder} has a sweep already; set sweep.resume=true to continue it, or use another one"
                )
            self._earlier_jobs = _find_earlier_jobs(existing)
        except ExpError:
            self.lock.release()
            raise
        self._used_folders = {*existing}

    def run(self, overrides: Sequence[Sequence[str]], first: int) -> list[float]:
        """Freeze the jobs of a batch, run them, and wait until all have ended.

        Args:
            overrides: a list for each job.
            first: Hydra's number of the first job, from 0.

        Returns:
            The metric of each job; :class:`MissingMetric` for one that failed.

        Raises:
            SignalReceived: a signal has ended the sweep.
            HydraException: Hydra cannot compose a job.
            ExpError: all jobs of the first batch were refused, or the sweeper searches in the wrong direction.
        """
        if not overrides:
            return []  # a sweep that never has a job is refused at its end
        self.in_batch = True  # until this method returns; errors raised before that are not the sweeper's
        batch = [self._freeze(number, list(job_overrides)) for number, job_overrides in enumerate(overrides, first)]
        refused = [job.outcome for job in batch if job.outcome is not None]
        if len(refused) == len(batch) and not self.jobs:
            error = ExpError("\n".join(dict.fromkeys(outcome.detail or "" for outcome in refused)))
            error.exit_code = max(outcome.exit_code for outcome in refused)
            raise error
        self.jobs += batch
        self._common_overrides = set.intersection(*(set(job.run.overrides) for job in self.jobs))
        check_stale_environment()
        runs = [job.run for job in batch if job.state == "not begun"]
        launcher = _common_launcher(runs)
        script = None if launcher is None else launcher.preflight(runs, self.folder / "slurm")
        if script is not None:
            console.make_console().out(script, highlight=False)
            self.dry_run = True
        else:
            self._launch(batch, launcher)
            self._read_results(batch)
        self.in_batch = False
        return [job.metric for job in batch]

    def _freeze(self, number: int, arguments: list[str]) -> Job:
        """Freeze a job; one whose configuration exp refuses counts as failed, and what Hydra refuses ends the sweep."""
        overrides, folder = self.composer.task_overrides(arguments), RunFolder(self.folder / str(number))
        job = Job(FrozenRun(self.config, overrides, folder, Classes(Task, Launcher)))  # type: ignore[type-abstract]
        try:
            config = self.composer.config_for_job(self.config, arguments, number)
            classes = Classes.of(config)
            in_parent = issubclass(classes.task, ParentTask)
            if in_parent or classes.launcher.is_external:
                subject = f"task={config.task.name}" if in_parent else "launcher=external"
                raise ConfigError(f"{subject} cannot be swept; start it without -m (several runs as 'run=[a,b]')")
            if sets_output_dir(config) and str(config.output_dir) != str(self.config.output_dir):
                raise ConfigError(
                    "output_dir is the folder of the whole sweep, with a subfolder for each job; it cannot differ "
                    "between jobs. Sweep other keys, or start a sweep for each folder"
                )
            job.run = validate_run(config, overrides, classes, folder.path)
            self._assign_folder(job, number)
        except ExpError as error:
            job.outcome = Outcome(error.exit_code, detail=str(error))
        return job

    def _assign_folder(self, job: Job, number: int) -> None:
        """Set the folder of a job: a new one, or that of the same job in an earlier sweep."""
        config = job.run.config
        folders_of_equal_jobs = self._earlier_jobs and self._earlier_jobs.get(_config_key(config))
        if folders_of_equal_jobs:
            path, job.skipped = folders_of_equal_jobs.pop(0)  # of two equal jobs, each continues a folder of its own
            config.resume = config.resume or "auto"
        else:
            paths = (self.folder / str(index) for index in itertools.count(number))
            path = next(path for path in paths if path not in self._used_folders)
            self._used_folders.add(path)
        config.output_dir = str(path)
        job.run.folder = RunFolder(path)

    def _launch(self, batch: list[Job], launcher: Launcher | None) -> None:
        for job in batch:
            if job.state == "not begun":
                try:
                    download(job.run.config)
                    job.run.write()
                except ExpError as error:  # for example, another process uses the folder
                    job.outcome = Outcome(error.exit_code, detail=str(error))
        jobs = [job for job in batch if job.state == "not begun"]
        runs = [job.run for job in jobs]
        display = SweepDisplay(jobs, self._common_overrides if len(self.jobs) > 1 else ())
        with display:
            if not self.launched:
                num_completed = sum(job.skipped for job in batch)
                if num_completed:
                    display.say(f"{num_completed} of {len(batch)} jobs are done already")
                count = "1 job" if len(runs) == 1 else f"{len(runs)} jobs"
                display.say(f"{count} to run; sweep folder: {console.display_path(self.folder)}")
            self.launched = True
            for job in batch:
                if job.outcome is not None:
                    display.failed(job, job.outcome.detail or "refused")
            if launcher is not None and runs:
                outcomes = dict(enumerate(launcher.launch_all(runs, display, self.folder / "slurm")))
            else:
                outcomes, self.received = run_locally(runs, self.settings.parallel_jobs, display)
        self.error = display.error or self.error
        for number, job in enumerate(jobs):
            job.run.release()
            job.outcome = outcomes.get(number)

    def _read_results(self, batch: list[Job]) -> None:
        """Read the runs of a batch that can be compared, and write the table of all.

        Raises:
            SignalReceived: a signal has ended jobs of the sweep. A sweeper that uses results would search on without
                theirs.
            ConfigError: the sweeper minimizes a metric of which larger is better, or the reverse.
        """
        # Those of an earlier sweep are read with the first batch. Then only new ones: a sweeper may ask for one job at
        # a time, and a thousand jobs must not be read a thousand times.
        folders = [job.run.folder.path for job in batch] if self.runs else _run_folders(self.folder)
        runs = [read_run(folder, folder.name) for folder in folders if RunFolder(folder).overrides.is_file()]
        self.runs.update((run.folder, run) for run in runs if is_compared(run))
        self._runs_not_in_table += len(runs)
        if 20 * self._runs_not_in_table >= len(self.runs):
            self._write_table()
        names = [job.outcome.interrupted_by for job in batch if job.outcome is not None]
        number = self.received or next((signal.Signals[name] for name in names if name is not None), None)
        if number is not None:
            raise SignalReceived(number)
        direction = str(self.config.hydra.sweeper.get("direction"))  # may be an enum member, or a list of one
        for run in runs:
            greater_is_better = bool(run.result.get("greater_is_better"))
            right, wrong = ("maximize", "minimize") if greater_is_better else ("minimize", "maximize")
            if run.metric is not None and wrong in direction:
                raise ConfigError(
                    f"hydra.sweeper.direction={wrong} looks for the worst {run.metric_name}, of which "
                    f"{'larger' if greater_is_better else 'smaller'} is better; set hydra.sweeper.direction={right}"
                )

    def _write_table(self) -> None:
        """Write ``sweep.csv`` and the files beside it, if runs were read that they lack."""
        if self._runs_not_in_table and self.runs:
            write_rows(self._sorted_runs(), self.folder)
        self._runs_not_in_table = 0

    def _sorted_runs(self) -> list[Run]:
        """The runs that can be compared, in the order of their folders."""
        return sorted(self.runs.values(), key=lambda run: natural_key(run.name))

    def translate_error(self, error: Exception | None) -> Exception | None:
        """The error to report at the end of the sweep.

        Args:
            error: the error that the sweeper raised; None: none.

        Returns:
            An error of exp or Hydra unchanged; for an error of the sweeper itself, such as Optuna's if no trial has a
            value, one of exp's. None if there is none, also after a dry run, where the sweeper lacks only the results.
        """
        if error is None and not self.jobs:
            return ConfigError(
                f"the sweep has no job: {' '.join(self.config.hydra.overrides.task)}; correct the range, choice or "
                "glob() that has no value (glob() is for the choices of a config group), or hydra.sweeper.*"
            )
        if error is None or self.in_batch or isinstance(error, (ExpError, HydraException, OmegaConfBaseException)):
            return error
        if self.dry_run:
            return None
        # Before the first job, only the sweeper's settings can be wrong.
        error_type = RunError if self.jobs else ConfigError
        frame = traceback.extract_tb(error.__traceback__)[-1]  # some errors, such as of an assert, have no text
        message = first_line(error) or f"in {frame.name} ({frame.filename}, line {frame.lineno})"
        summary = f"{type(error).__name__}: {message}"
        return error_type(f"the sweeper has ended the sweep: {summary}; see hydra.sweeper.*")

    def close(self, rerun_command: Callable[..., str]) -> tuple[int, list[Path], str | None]:
        """End the sweep after its last batch: release the lock, print the table, write the report.

        Args:
            rerun_command: returns the command line of this process with changed overrides
                (:func:`exp.task.rerun_command`).

        Returns:
            The exit code (that of the error, if one has ended the sweep), the run folders, and the last error that was
            printed. Exit code 0: no job failed; 75: jobs were preempted, and none failed; the common code if all jobs
            failed with the same one; otherwise 1.
        """
        lock_error = self.lock.check()
        if lock_error is not None:
            self.error = lock_error
            console.error(lock_error)
        codes = {EXIT_OK if job.outcome is None else job.outcome.exit_code for job in self.jobs}
        failed = codes - {EXIT_OK}
        same_code = len(codes) == 1 or failed <= {EXIT_PREEMPTED}
        code = max(failed, default=EXIT_OK) if same_code else EXIT_FAILED
        taken_back = [job.run.rollback() for job in self.jobs if code in REFUSAL_CODES]
        refused = not self.launched or (code in REFUSAL_CODES and all(taken_back))
        if refused and self.lock.created_dirs:
            shutil.rmtree(str(self.folder), ignore_errors=True)
        elif refused and not _run_folders(self.folder):
            (self.folder / _MULTIRUN_FILE).unlink(missing_ok=True)
        self.lock.release()
        if not refused:
            self._report(rerun_command)
        return code, _run_folders(self.folder), self.error

    def _report(self, rerun_command: Callable[..., str]) -> None:
        """Print the table of results and the number of jobs by state; write the report with its plots."""
        self._write_table()
        terminal, runs = console.make_console(), self._sorted_runs()
        terminal.print()
        for table in results_tables(runs):
            terminal.print(as_rich(table))
        states = Counter(job.state for job in self.jobs)
        text = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
        seconds, shown_folder = time.monotonic() - self.started, console.display_path(self.folder)
        terminal.print(f"{text}; {seconds:.0f} s; results in {shown_folder}", soft_wrap=True)
        if {"interrupted", "preempted", "not begun"} & states.keys():
            command = rerun_command("sweep.resume=true", f"output_dir={shown_folder}")
            terminal.print(f"to do the rest: {command}", soft_wrap=True, markup=False)
        completed = any(run.status == "completed" for run in runs)
        if completed and self.settings.plots and not {"submitted", "interrupted"} & states.keys():
            from exp.report.page import write_report

            page = write_report(runs, self.folder, console.display_path(self.folder))
            terminal.print(f"report: {console.display_path(page)}", soft_wrap=True)


def _common_launcher(runs: list[FrozenRun]) -> Launcher | None:
    """The launcher of all jobs, if they run on a cluster; None if they run on this machine.

    Raises:
        ConfigError: the jobs have different launchers or ask for different resources.
    """
    if not any(run.is_remote for run in runs):
        return None
    configs = [run.config for run in runs]
    if len({to_json([to_plain(config.launcher), config.nproc]) for config in configs}) > 1:
        raise ConfigError(
            "a sweep on Slurm is one job array, whose jobs all ask for the same resources; start a command of its own "
            "for each value of launcher.* and nproc"
        )
    return runs[0].launcher


def _run_folders(folder: Path) -> list[Path]:
    """The run folders of a sweep, sorted by path."""
    return [path.parent for path in sorted(folder.glob("*/config.yaml"))]


def _config_key(config: ExpConfig) -> str:
    """A configuration as text, without the keys that do not change what a run computes."""
    values = {key: value for key, value in to_plain(config).items() if key not in _IGNORED_KEYS}
    return to_json(values, sort_keys=True, default=str)


def _find_earlier_jobs(folders: Sequence[Path]) -> dict[str, list[tuple[Path, bool]]]:
    """The run folders of an earlier sweep, by :func:`_config_key`, each with whether it is completed (these first)."""
    jobs_by_config: dict[str, list[tuple[Path, bool]]] = {}
    for path in folders:
        try:
            key = _config_key(load(RunFolder(path).config))  # typed, so that newer keys have their defaults
        except OmegaConfBaseException:
            continue  # written by another version of exp, with keys that no longer exist
        result = read_json(RunFolder(path).result) or {}
        jobs_by_config.setdefault(key, []).append((path, result.get("status") == "completed"))
    return {key: sorted(jobs, key=lambda job: not job[1]) for key, jobs in jobs_by_config.items()}
