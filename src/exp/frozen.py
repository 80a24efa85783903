"""The frozen configuration of a run, and the parent's work: write the folder, launch, print and record the end.

:func:`freeze` validates the configuration that Hydra has composed, and fills in derived values. Later changes of YAML
files do not change a frozen run.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from exp import console
from exp.config import check as checks
from exp.config import compose, differences
from exp.config.differences import text_of
from exp.config.resolve import allow, distrust
from exp.config.schema import ExpConfig
from exp.console import format_flops
from exp.errors import EXIT_OK, EXIT_PREEMPTED, REFUSAL_CODES, ConfigError, ExpError, RunError
from exp.hardware.registry import choose, create_backend
from exp.hub import bring
from exp.launcher.base import Outcome, describe_failure, launcher_class, resolve
from exp.runs.files import file_digest, read_json, read_yaml
from exp.runs.folder import FolderSnapshot, RunFolder, empty_result, last_progress
from exp.runs.lock import RunLock, read_holder
from exp.task import call, create_task, task_class, to_continue
from exp.trackers import check as check_trackers

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["FrozenRun", "complete", "freeze", "prepare"]

_WRITTEN_WITHIN_S = 60.0  # an NFS client may show a new file late


def freeze(config: ExpConfig, overrides: list[str]) -> FrozenRun:
    """Validate the configuration that Hydra has composed, and fill in derived values. Writes nothing.

    Args:
        config: composed by Hydra, without the node ``hydra``.
        overrides: the user's overrides.

    Raises:
        ConfigError: a value is wrong, two values contradict each other, or a file is missing.
        UnavailableError: the hardware or a package is not available.
    """
    return complete(prepare(config, overrides), overrides)


def prepare(config: ExpConfig, overrides: list[str]) -> ExpConfig:
    """The first half of :func:`freeze`; jobs of a sweep that differ only in plain values can share its result.

    A task that needs weights takes model and data from the run in ``init_from``. :func:`exp.config.compose.base_of` has
    usually composed the configuration so. It is composed again here in two cases: in a sweep over ``init_from``, where
    it knew only one run; and if only a YAML file names the task, which it did not know.

    Returns:
        The typed configuration, with the chosen backend.

    Raises:
        ConfigError: a key or a type is wrong, or the configuration names code that the user has not chosen.
        UnavailableError: the backend is not available.
    """
    allow(config.plugins, overrides)
    primary, wanted, folder = compose.base_of(overrides, task_class(config).needs_weights)
    if "," in config.backend._target_:  # backend=auto: the candidates
        config = _with_backend(config, primary, wanted)
    elif folder != OmegaConf.select(config, "record.trained_in"):  # type: ignore[arg-type]
        config = compose.compose(primary, wanted)
    config = compose.typed(config)  # checks what +KEY=VALUE added, too
    compose.replace_given(config, overrides)
    _note_choices(config)
    return config


def complete(config: ExpConfig, overrides: list[str], output_dir: Path | None = None) -> FrozenRun:
    """The second half of :func:`freeze`: everything that depends on values; changes ``config`` in place.

    Args:
        config: the result of :func:`prepare`.
        overrides: the user's overrides.
        output_dir: the run folder; None: that of the configuration.
    """
    launcher = launcher_class(config)
    if config.launcher.nnodes > 1 and not launcher.is_elsewhere(config.launcher) and not compose.sets_folder(config):
        raise ConfigError("launcher.nnodes>1 needs output_dir=<a folder that all nodes share>, the same on every node")
    compose.expand(config)
    checks.validate(config, overrides, create_backend(config.backend), create_task(config), launcher)
    output_dir = (
        Path(output_dir or config.output_dir).expanduser().absolute()
    )  # after the checks: a task may set the name in it
    config.output_dir = str(output_dir)
    check_trackers(config.logger)
    _note_differences(config, overrides)
    return FrozenRun(config, overrides, RunFolder(output_dir))


def _with_backend(config: ExpConfig, primary: str, overrides: list[str]) -> ExpConfig:
    """The configuration with the first available backend in place of ``backend=auto``."""
    name = choose(config.backend._target_.split(","))
    kept = [each for each in overrides if not each.startswith(("backend=", "backend._target_="))]
    try:
        return compose.compose(primary, [*kept, f"backend={name}"])
    except MissingConfigException:  # a backend of another package, without a YAML file
        return compose.compose(primary, [*kept, f"backend._target_={name}", f"backend.name={name}"])


def _note_choices(config: ExpConfig) -> None:
    """Record the choices of config groups, and which keys follow others."""
    record = config.record
    choices = HydraConfig.get().runtime.choices.items()
    # The record has the choices of the run in init_from already.
    chosen = {group: name for group, name in choices if "/" not in group and name not in (None, compose.OF_RUN)}
    record.chosen = {**record.chosen, **chosen, "backend": config.backend.name}
    record.follows = compose.follows(config)


def _note_differences(config: ExpConfig, overrides: list[str]) -> None:
    """Record how the configuration differs from the run in ``init_from``, and from the experiment as published."""
    record = config.record
    folder = compose.run_folder_of(config.init_from) if task_class(config).needs_weights else None
    if folder is not None:
        record.trained_in = str(folder)
        earlier = compose.load(RunFolder(folder).config)
        checks.check_weights(config, earlier, folder)
        altered = RunFolder(folder).modified_files(read_json(RunFolder(folder).result) or {})
        record.differs = [f"{name} was changed after that run" for name in altered if name == "config.yaml"]
        record.differs += differences.different(config, earlier, "trained with")
    changed = folder is not None or any(re.match(r"[+~]*(data|model)\b", each) for each in overrides)
    if changed and config.data.get("horizon") in config.published:  # else there is nothing to compare
        experiment = record.chosen.get("experiment")
        shipped, left_out = _as_shipped(experiment, config.data.horizon), ("data.root", "seed", "precision")
        record.published_differs = (
            [f"experiment={experiment} is not here to compare with"]
            if shipped is None
            else differences.different(config, shipped, "there", left_out)
        )


@functools.lru_cache(maxsize=None)
def _as_shipped(experiment: str | None, horizon: int) -> ExpConfig | None:
    """The configuration of an experiment without other overrides; None: there is no such experiment here."""
    try:
        return compose.compose("config", [f"experiment={experiment}", f"data.horizon={horizon}"])
    except MissingConfigException:
        return None


@dataclass
class FrozenRun:
    """A frozen run, the argument of a launcher.

    Attributes:
        config: the whole configuration (:class:`exp.config.schema.ExpConfig`), with all interpolations resolved.
        overrides: the user's overrides.
        folder: the run folder.
        snapshot: content of the folder before :meth:`write`; None: this process has not written the folder.
        lock: the lock of the folder; None: this process does not hold it.
    """

    config: ExpConfig
    overrides: list[str]
    folder: RunFolder
    snapshot: FolderSnapshot | None = None
    lock: RunLock | None = None

    def execute(self, tracebacks: bool = False) -> Outcome:
        """Write the run folder, launch, wait, print and record the end; a run that is refused leaves no folder.

        Args:
            tracebacks: if workers refuse the run, print their logs, which have the tracebacks.

        Returns:
            The outcome, with the exit code of the command.

        Raises:
            ExpError: the run cannot be started.
        """
        config, folder, begun = self.config, self.folder, False
        try:
            chosen = resolve(config.launcher, config.nproc)
            script = chosen.preflight([self], folder.path / "slurm")
            if script is not None:
                console.make_console().out(script, highlight=False)
                return Outcome()
            backend = create_backend(config.backend)
            bring(config)
            if chosen.leads:
                self.write(chosen.job_token())
                self.announce(backend)
            begun = True
            try:
                outcome = chosen.launch(self)
            finally:
                self.check_folder()  # if it is lost, SIGTERM may end the run after the launcher
            if chosen.leads:
                outcome.exit_code = self.tell_end(outcome)
            if outcome.exit_code in REFUSAL_CODES:
                for file in sorted(folder.logs.glob("rank*.error.json")) if tracebacks else ():
                    log = file.with_name(file.name.replace(".error.json", ".log"))
                    print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)  # noqa: T201
                self.rollback()
            return outcome
        except (ExpError, KeyboardInterrupt) as error:
            if error.exit_code in REFUSAL_CODES if isinstance(error, ExpError) else not begun:
                self.rollback()
            raise
        finally:
            self.release()

    def write(self, token: str | None = None) -> None:
        """Take the lock of the run folder, and write the configuration there.

        The records of an earlier run in the folder stay until this run begins.

        Args:
            token: name of the job, equal in all processes that start it together; None: only this process starts it.

        Raises:
            ConfigError: another run uses the folder, the folder cannot be written, or the run to resume is another one.
            RunError: the disk is full.
        """
        if self.lock is not None:
            return  # the process that started this one has written the folder
        folder = self.folder
        contents = {
            folder.config.name: OmegaConf.to_yaml(self.config, resolve=True).encode(),
            folder.overrides.name: OmegaConf.to_yaml(OmegaConf.create(list(self.overrides))).encode(),
        }
        digest = hashlib.sha256(contents[folder.config.name]).hexdigest()
        self.lock, joined = RunLock(folder.path, token), False
        try:
            joined = self.lock.acquire(config=digest)
            if joined:
                self._check_as_first(digest)
                return
            checks.check_folder(self.config, task_class(self.config).saves_state)
        except ConfigError:
            self.lock.release(keep_file=joined)
            raise
        self.snapshot = FolderSnapshot(folder)
        folder.create()
        folder.clear_error_files()
        folder.write_pending(contents)
        if task_class(self.config).diagnoses:  # begins at once, since its session never does
            folder.commit_pending(self.config.overwrite)

    def _check_as_first(self, digest: str) -> None:
        """Check that this node has the configuration of the first, which all workers read; the path may differ.

        Args:
            digest: SHA-256 of this node's configuration.

        Raises:
            ConfigError: a key has another value there.
        """
        assert self.lock is not None, "it has been acquired"
        deadline = time.monotonic() + _WRITTEN_WITHIN_S
        while True:
            first, config = read_holder(self.lock.path), self.folder.current_file(self.folder.config)
            if first is not None and config.is_file() and file_digest(config) == first.config:
                break
            if time.monotonic() > deadline:
                raise ConfigError(f"{first or 'the first node'} has not written {config}; start all nodes again")
            time.sleep(0.1)
        changed = [] if digest == first.config else differences.between(compose.load(config), self.config)
        # The path of the folder may be another one here, and records change nothing.
        texts = [
            f"{key}={text_of(new)} (there: {text_of(old)})"
            for key, old, new in changed
            if key != "output_dir" and not key.startswith("record.")
        ]
        if texts:
            more = f" and {len(texts) - 4} more keys" if len(texts) > 4 else ""
            raise ConfigError(
                f"this node has another configuration than the first, {first}: {', '.join(texts[:4])}{more}; start "
                "the same command on every node, with as many processes (nproc) on each"
            )

    def announce(self, backend: Backend) -> None:
        """Print what will run, and the run folder."""
        config = self.config
        processes = config.nproc * config.launcher.nnodes

        if config.backend.simulate:
            _say(
                f"SIMULATED: no {config.backend.name} card is used. Every device of this run is made up in host memory;"
                " its speed says nothing about a real one.",
                "bold yellow",
            )
        task = task_class(config)
        if task.begin:
            call(task.begin, config, self.folder)
        if task.begin or task.diagnoses:
            return
        batch = ""
        if config.global_batch_size is not None:
            batch = f", global batch {config.global_batch_size}"
            if processes > 1 or config.accumulate > 1:
                batch += f" = {config.batch_size} x {processes} processes x {config.accumulate} micro-batches"
        _say(f"{config.name}: {config.task.name} on {backend}, {config.precision}{batch}")
        _say(f"run folder: {console.display_path(self.folder.path)}")
        launcher = launcher_class(config)
        if backend.exclusive_devices and not (launcher.joins or launcher.is_elsewhere(config.launcher)):
            count = backend.device_count()
            if count > config.nproc:
                _say(f"{count - config.nproc} of {count} devices stay idle; nproc={count} uses all", "yellow")
        if config.record.trained_in is not None:
            _say(f"as trained in {console.display_path(Path(config.record.trained_in))}")
            for line in config.record.differs:
                _say(f"  but {line}", "yellow")

    def tell_end(self, outcome: Outcome) -> int:
        """Print how the run ended, record an end without success in ``result.json``, and return the exit code."""
        config, folder = self.config, self.folder
        if outcome.left or outcome.reported:
            return outcome.exit_code
        task = task_class(config)
        judged = call(task.end, config, folder, outcome) if task.end and outcome.interrupted_by is None else None
        if judged is not None or (task.diagnoses and outcome.exit_code == EXIT_OK):
            return judged or EXIT_OK
        if outcome.exit_code == EXIT_OK:
            result = read_json(folder.result)
            if result is not None:  # None on a node without rank 0
                if outcome.restarts != result["restarts"]:
                    result["restarts"] = outcome.restarts
                    folder.write_result(result)
                _print_table(config, folder, result)
            return EXIT_OK
        record = {**empty_result(config), "restarts": outcome.restarts}
        if outcome.preempted is not None:
            step: int | None = outcome.preempted["step"]
            record.update(status="preempted", steps=step or 0)
            text = f"preempted: task={config.task.name} has no state to save; run it again"
            if step is not None:
                text = f"preempted after step {step}, which is saved; to continue: {to_continue(config, folder)}"
            _say(text + self._record(record, outcome))
            return EXIT_PREEMPTED
        record.update(last_progress(folder))
        text = describe_failure(outcome, folder)
        rank, kind, said = None, "RunError", outcome.detail
        if outcome.interrupted_by is not None:
            kind, said = "Interrupted", f"by {outcome.interrupted_by}"
            command = to_continue(config, folder)
            text += f"\n  to continue from the last checkpoint: {command}" if command else "; nothing has been saved"
        elif outcome.failures:
            rank, kind, said = (getattr(outcome.failures[0], name) for name in ("rank", "type", "message"))
        if said is not None:
            record["error"] = {"rank": rank, "type": kind, "message": said}
        console.error(text + self._record(record, outcome))
        return outcome.exit_code

    def _record(self, result: dict[str, Any], outcome: Outcome) -> str:
        """Write ``result.json``; if the run has not begun, keep the records of the earlier run in the folder instead.

        Returns:
            A line for the user if the file cannot be written; otherwise empty.
        """
        try:
            if not outcome.recorded and (self.config.launcher.nnodes == 1 or self.folder.claim_end()):
                self.folder.discard_pending() if self.folder.has_pending else self.folder.write_result(result)
        except OSError as error:
            return f"\n  {self.folder.result} could not be written: {error.strerror}"
        return ""

    def rollback(self) -> bool:
        """Undo :meth:`write` after a refused run, unless the run has results.

        Returns:
            Whether the folder is as it was before. On several nodes that were started by hand nothing is undone, since
            the other nodes may be writing there; nor after a diagnosis.
        """
        if self.snapshot is None:
            return True
        settings = self.config.launcher
        alone = settings.nnodes == 1 or launcher_class(self.config).is_elsewhere(settings)
        done = alone and not task_class(self.config).diagnoses and self.snapshot.rollback()
        self.release()
        return done

    def check_folder(self) -> None:
        """Check that the run folder still exists, and that this run still holds its lock.

        Raises:
            RunError: the folder is gone, or another run has taken it.
        """
        lost = None if self.lock is None else self.lock.check()
        if lost is not None:
            raise RunError(f"{lost}; what it computed is lost")

    def release(self) -> None:
        """Release the lock of the folder: the run has ended, or another process has taken it over."""
        if self.lock is not None:
            self.lock.release()

    @classmethod
    def load(cls, folder: RunFolder, of_others: bool = False) -> FrozenRun:
        """Read a run that :meth:`write` has written.

        Args:
            folder: the run folder.
            of_others: whether somebody else may have written the folder, so that names of code in it must be checked
                (:func:`exp.config.resolve.distrust`); otherwise they were checked before they were written.
        """
        config = compose.load(folder.current_file(folder.config))
        distrust(config, groups=("launcher", "task")) if of_others else allow(config.plugins)
        task_class(config)  # refuses a class that only the folder names
        return cls(config, list(map(str, read_yaml(folder.current_file(folder.overrides)) or ())), folder)


def _say(text: str, style: str | None = None) -> None:
    console.make_console().print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def _print_table(config: ExpConfig, folder: RunFolder, result: dict[str, Any]) -> None:
    from exp.report.tables import Table, as_rich

    published = result.get("published") or {}
    rows = []
    for name, value in result["metrics"].items():
        first, *more = name.split("_")
        short = len(first) <= 3 or (len(first) == 4 and first.isalpha() and first.islower())
        title = " ".join([first.upper() if short else first, *more])  # MSE and MASE, but mIoU and accuracy
        unit = result.get("metric_units", {}).get(name)
        shown = "-" if value is None else f"{value:,}" if isinstance(value, int) else console.format_metric(value)
        known = f"{published[name]:.3f}" if name in published else ""
        rows.append([title + (f" ({unit})" if unit else ""), shown, *[known] * bool(published)])
    heads = [result["measured_on"], "this run", *["published"] * bool(published)]
    terminal = console.make_console()
    terminal.print()
    terminal.print(as_rich(Table(heads, rows, [False, True, True])))
    if published:
        _say(f"published: {published['source']}, horizon {config.data.horizon}", "dim")
        if published["differs"]:
            unlike = ", ".join(published["differs"])
            _say(f"this run is not as experiment={config.record.chosen['experiment']}: {unlike}", "yellow")
    for line in (result.get("data") or {}).get("warnings", ()):
        _say(line, "yellow")
    left = result.get("left_device")
    if left is not None and left["calls_per_step"]:
        few = ", ".join(list(left["operators"])[:3])
        _say(
            f"CPU fallbacks per step: {left['calls_per_step']:.3g} calls, mostly {few}; see docs/guide/train.md", "red"
        )
    speed = f", {result['samples_per_second']:,.0f} samples/s" if result.get("samples_per_second") else ""
    if result.get("flops_per_second"):
        speed += (
            f", {format_flops(result['flops_per_second'])}FLOP/s ({result['flops_share']:.0%} of plain matrix products)"
        )
    steps = f"{result['steps']} steps, " if result["steps"] else ""
    _say(f"{steps}{result['wall_s']:.0f} s{speed}; results in {console.display_path(folder.path)}")
