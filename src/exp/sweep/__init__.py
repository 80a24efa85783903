"""The jobs of a sweep: frozen first, then run side by side or as a job array, shown and recorded as they end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Collection

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp import console, launcher
from exp.config import choices, explain
from exp.config.check import runs_elsewhere
from exp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, REFUSED, ConfigError, ExpError
from exp.footprint import remove_empty
from exp.freezing import complete
from exp.frozen import FrozenRun
from exp.hub import bring
from exp.launcher.base import Launcher
from exp.launcher.outcome import Outcome
from exp.launcher.rank_environment import drop_stale_variables
from exp.result import selecting_value
from exp.runfolder import RunFolder, read_json, to_json
from exp.runlock import RunLock
from exp.sweep import records
from exp.sweep.display import SweepDisplay, progress
from exp.sweep.earlier import Finished, find_finished, identity
from exp.sweep.packing import pack
from exp.sweep.sweeper import all_refused, other_folder, refuse_without_run

if TYPE_CHECKING:
    from exp.report.runs import Run
    from exp.sweep.composing import Composer

__all__ = ["Job", "Sweep", "current", "expected", "finish", "is_dry", "refuse_empty"]

_current: list[Sweep] = []
expected: list[Callable[[], None]] = []
"""Not empty: a sweeper has begun, and not asked for any job yet; what says so."""


@dataclass
class Job:
    """One job of a sweep."""

    number: int
    overrides: list[str] = field(default_factory=list)
    run: FrozenRun | None = None
    """None where it was refused."""
    outcome: Outcome | None = None
    metric: float | None = None
    skipped: bool = False
    """It had been completed before."""

    def title(self, common: Collection[str] = ()) -> str:
        """``3 seed=2 optim.lr=0.001``: its folder's number, and the overrides that are not ``common`` to all jobs."""
        number = str(self.number) if self.run is None else self.run.folder.path.name
        return " ".join([number, *(override for override in self.overrides if override not in common)])


class Sweep:
    """All the jobs of one command line; a sweeper may ask for them batch by batch.

    Args:
        folder: the sweep's folder.
        settings: :class:`exp.config.schema.SweepConfig`.
        name: of the experiment.
        missing: folders that were made for it.
    """

    def __init__(self, folder: Path, settings: Any, name: str, missing: list[Path]) -> None:
        self.folder = folder
        self.missing = missing
        self.settings = settings
        self.name = name
        self.jobs: list[Job] = []
        self.batch: list[Job] = []
        self.began = time.monotonic()
        self.interrupted_by: str | None = None
        self.dry = False
        self.launched = False
        self.runs: list[Run] = []
        """As they were after the last batch."""
        self._earlier: dict[str, list[Finished]] = {}
        self._taken: set[str] = set()
        self.lock = RunLock(folder)
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        try:
            self.lock.acquire()
            self._look_back(records.run_folders(folder))
        except ExpError:
            self.lock.release()
            remove_empty(missing)
            raise

    def _look_back(self, existing: list[Path]) -> None:
        """Find the jobs that an earlier sweep has left in the folder."""
        if self.settings.resume:
            self._earlier = find_finished(existing)
        elif existing:
            raise ConfigError(
                f"output_dir={self.folder} holds a sweep already; sweep.resume=true goes on with it, or use another one"
            )
        self._taken.update(path.name for path in existing)

    def add(self, number: int, overrides: list[str], composer: Composer, master: Any) -> None:
        """Freeze a job of the next batch; one whose configuration is refused counts as failed.

        Args:
            number: Hydra's, from 0.
            overrides: of the job.
            composer: makes its configuration.
            master: the configuration of the whole sweep.

        Raises:
            ConfigError: it would lie elsewhere than in the sweep's folder.
        """
        job = Job(number)
        self.batch.append(job)
        elsewhere = None
        try:
            job.overrides = composer.task_overrides(overrides)
            config = composer.prepared(master, overrides, number)
            refuse_without_run(config)
            given = [each for each in job.overrides if each.lstrip("+").startswith("output_dir=")]
            elsewhere = given[-1] if given and str(config.output_dir) != str(master.output_dir) else None
            # Where it goes depends on what it is: a folder of its own, or that of the same job in an earlier sweep.
            job.run = complete(config, job.overrides, self.folder / "new")
            self._place(job, job.run)
        except ExpError as error:
            job.outcome = Outcome(error.exit_code, detail=str(error))
        except (HydraException, OmegaConfBaseException) as error:
            job.outcome = Outcome(EXIT_CONFIG, detail=explain.explain(error, choices.default_keys()))
        if elsewhere is not None:
            raise other_folder(elsewhere)

    def _place(self, job: Job, run: FrozenRun) -> None:
        same = self._earlier.get(identity(run.config)) if self._earlier else None
        if not same:
            path = self.folder / str(self._free_number(job.number))
        else:
            earlier = same.pop(0)  # a job that is there twice has been run twice
            path = earlier.folder
            job.skipped, job.metric = earlier.completed, earlier.metric
            run.config.resume = run.config.resume or "auto"
        run.config.output_dir = str(path)
        run.folder = RunFolder(path)

    def _free_number(self, wanted: int) -> int:
        while str(wanted) in self._taken:
            wanted += 1
        self._taken.add(str(wanted))
        return wanted

    def run_batch(self) -> list[float | None]:
        """Run what has been added since the last batch; returns the metrics, nan for what failed.

        Raises:
            KeyboardInterrupt: a signal has ended the sweep.
            ExpError: nothing of it can be run.
        """
        batch, self.batch = self.batch, []
        refused = [job.outcome for job in batch if job.run is None and job.outcome is not None]
        if len(refused) == len(batch) and not self.jobs:
            raise all_refused(refused)
        drop_stale_variables()
        self.jobs += batch
        to_run = [job for job in batch if job.run is not None and not job.skipped]
        chosen = _common_launcher(to_run)
        if chosen is not None:
            script = chosen.preflight([job.run for job in to_run if job.run is not None], self.folder / "slurm")
            if script is not None:
                console.make_console().out(script, highlight=False)
                self.dry = True
                return [None for _ in batch]
        self._launch(batch, to_run, chosen)
        for job in batch:
            if job.outcome is not None and not job.outcome.left:
                job.metric = _metric_of(job)
        records.write(self)
        if self.interrupted_by is not None:
            raise KeyboardInterrupt
        return [job.metric for job in batch]

    def _launch(self, batch: list[Job], to_run: list[Job], chosen: Launcher | None) -> None:
        self.launched = True
        runs = [job.run for job in to_run if job.run is not None]
        with progress("writing", len(runs)) as advance:
            for job, run in zip(to_run, runs):
                try:
                    bring(run.config)
                    run.write()
                except ExpError as error:  # somebody else is at work in its folder
                    job.outcome = Outcome(error.exit_code, detail=str(error))
                advance()
        to_run = [job for job in to_run if job.outcome is None]
        runs = [job.run for job in to_run if job.run is not None]
        with SweepDisplay(self, to_run) as display:
            for job in batch:
                if job.run is None or job.outcome is not None:
                    display.refused(job)
            if not runs:
                return
            if chosen is not None:
                outcomes = chosen.launch_all(runs, display, self.folder / "slurm")
            else:
                outcomes = pack(runs, self.settings.parallel_jobs, display)
        for run in runs:
            run.release()
        for job, outcome in zip(to_run, outcomes):
            job.outcome = outcome
            self.interrupted_by = self.interrupted_by or outcome.interrupted_by

    def common_overrides(self) -> set[str]:
        """Those that all jobs have."""
        return set.intersection(*(set(job.overrides) for job in self.jobs)) if len(self.jobs) > 1 else set()

    def exit_code(self) -> int:
        """0: all is well; 75: jobs were preempted, and none failed; else 1, or the code of all jobs."""
        for job in self.jobs:
            if job.outcome is not None and job.outcome.interrupted_by is not None:
                return job.outcome.exit_code
        codes = {job.outcome.exit_code for job in self.jobs if job.outcome is not None} - {EXIT_OK}
        if not codes or self.dry:
            return EXIT_OK
        failed = codes - {EXIT_PREEMPTED}
        if not failed:
            return EXIT_PREEMPTED
        everyone = all(job.outcome is not None and job.outcome.exit_code != EXIT_OK for job in self.jobs)
        return failed.pop() if everyone and len(codes) == 1 else EXIT_FAILED


def _common_launcher(jobs: list[Job]) -> Launcher | None:
    """The cluster's launcher, if that is where these jobs run.

    Raises:
        ConfigError: some would run there and others not, or they ask for different resources.
    """
    configs = [job.run.config for job in jobs if job.run is not None]
    if not any(runs_elsewhere(config) for config in configs):
        return None
    asked = {to_json([OmegaConf.to_container(c.launcher, resolve=True), c.nproc]) for c in configs}
    if len(asked) > 1:
        raise ConfigError(
            "a sweep on Slurm is one job array, whose jobs all ask for the same; sweep launcher.* and nproc in "
            "commands of their own"
        )
    return launcher.resolve(configs[0].launcher, configs[0].nproc)


def _metric_of(job: Job) -> float | None:
    assert job.outcome is not None
    if job.outcome.exit_code != EXIT_OK or job.run is None:
        return float("nan")
    return selecting_value(read_json(job.run.folder.result))


def current(config: Any, missing: list[Path]) -> Sweep:
    """The sweep of this command line; made with the first batch.

    Args:
        config: composed for the whole sweep, Hydra's part included.
        missing: of its folder and those above it, what was not there when the command began.

    Raises:
        ConfigError: its folder holds another one.
    """
    if not _current:
        if config.sweep.resume and "output_dir" not in str(list(config.hydra.overrides.task)):
            raise ConfigError("sweep.resume=true needs output_dir=<the folder of the sweep to go on with>")
        _current.append(Sweep(Path(str(config.hydra.sweep.dir)).absolute(), config.sweep, config.name, missing))
    return _current[0]


def is_dry() -> bool:
    """Whether the sweep only shows what it would submit."""
    return any(sweep.dry for sweep in _current)


def refuse_empty() -> None:
    """After a sweeper has ended.

    Raises:
        ConfigError: it has not asked for a single job.
    """
    if expected:
        expected.pop()()


def finish() -> tuple[int, str | None, list[Path]]:
    """After the last batch: the table, the files, the report.

    Returns:
        The exit code, the name of the signal that ended the sweep, and the run folders that there are.
    """
    if not _current:
        return EXIT_OK, None, []
    sweep = _current.pop()
    lost = sweep.lock.check()
    if lost is not None:
        console.error(lost)
    sweep.lock.release()
    if not (sweep.launched or sweep.dry):  # it was refused, or ended before its first job
        records.remove_unused(sweep.folder, sweep.missing)
        return EXIT_OK, None, []
    code = sweep.exit_code()
    taken_back = [job.run is None or job.run.take_back() for job in sweep.jobs if code in REFUSED]
    refused = code in REFUSED and all(taken_back)
    runs = records.run_folders(sweep.folder)
    if sweep.dry or refused or not runs:
        records.remove_unused(sweep.folder, sweep.missing)
        return code, sweep.interrupted_by, []
    records.finish(sweep, console.make_console())
    return code, sweep.interrupted_by, runs
