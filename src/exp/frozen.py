"""A run as it is written down, and what the parent does with it: folder, launch, what is printed and recorded.

It is made of what Hydra has composed, validated and completed by what follows from it (:func:`freeze`); nothing that
happens to YAML files later changes it. A few lines are printed before a run, a table after it, and commands to go on
with, which work as they stand.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from exp import console, hub, launcher
from exp.config import check as checks
from exp.config import compose, differences
from exp.config.resolve import allow, check_names, distrust
from exp.config.schema import ExpConfig
from exp.console import flops, size
from exp.errors import EXIT_OK, EXIT_PREEMPTED, REFUSED, ConfigError, Ended, RunError
from exp.hardware.registry import choose, create_backend
from exp.launcher.base import launcher_class
from exp.runs.files import read_json
from exp.runs.folder import RunFolder, Snapshot, last_known, missing_folders, read_result, remove_empty
from exp.runs.lock import RunLock
from exp.runs.record import blank_result, number_text, selecting_value
from exp.task import create_task, task_class
from exp.trackers import reporting

if TYPE_CHECKING:
    from exp.hardware.backend import Backend
    from exp.launcher.outcome import Outcome

__all__ = [
    "Finished", "FrozenRun", "announce", "complete", "freeze", "prepare", "remember", "tell_end", "to_continue",
    "to_continue_sweep",
]  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """What became of a run, for the command line and for a sweeper."""

    exit_code: int = EXIT_OK
    metric: float | None = None
    """What a sweeper is given, measured on validation; nan where the run failed."""
    interrupted_by: str | None = None
    """Name of the signal that ended it."""
    runs: Sequence[Path] = ()
    """Folders of other runs, of which it has made a table."""


def freeze(config: ExpConfig, overrides: list[str], output_dir: Path) -> FrozenRun:
    """Validate what Hydra has composed, and fill in what is derived. Writes nothing.

    Args:
        config: composed by Hydra, without its own part.
        overrides: the user's.
        output_dir: the run folder.

    Raises:
        ConfigError: a value is wrong, two do not go together, or a file is missing.
        UnavailableError: the hardware or a package is not there.
    """
    return complete(prepare(config, overrides), overrides, output_dir)


def prepare(config: ExpConfig, overrides: list[str]) -> ExpConfig:
    """The first half of :func:`freeze`, which jobs of a sweep that differ in plain values can share.

    Returns:
        The configuration with its types, of the backend that was chosen, and of the run in ``init_from`` where it is to
        be used as it was trained. The command line has seen to that already (:func:`exp.config.compose.begin`); but in
        a sweep over runs it knew only one of them, and of a task that only a file names not that it needs weights.

    Raises:
        ConfigError: a key or a type is wrong, or the user has not chosen code that is named.
        UnavailableError: the backend is not there.
    """
    check_names(config, overrides)
    base = compose.base_of(overrides, task_class(config).needs_weights)
    if config.backend.name == "auto":
        config = _with_backend(config, base)
    elif base.folder != (config.record and config.record.trained_in):
        config = compose.compose(base.primary, base.overrides)
    config = compose.typed(config)  # checks what +KEY=VALUE added, too
    compose.replace_given(config, overrides)
    _note_choices(config, overrides)
    return config


def complete(config: ExpConfig, overrides: list[str], output_dir: Path) -> FrozenRun:
    """The second half of :func:`freeze`: everything that depends on values; ``config`` is changed in place."""
    check_names(config, overrides)
    config.output_dir = str(output_dir.absolute())
    compose.expand(config)
    checks.validate(config, overrides, create_backend(config.backend), create_task(config), launcher_class(config))
    reporting.check(config.logger)
    if compose.is_of_hub(config.init_from):
        hub.parse(str(config.init_from))
    _note_differences(config, overrides)
    return FrozenRun(config, overrides, RunFolder(output_dir))


def _with_backend(config: ExpConfig, base: compose.Base) -> ExpConfig:
    """The configuration with the first backend that is available in the place of ``backend=auto``."""
    if config.backend.simulate:
        raise ConfigError("backend.simulate=true with backend=auto: say which backend's devices are to be simulated")
    name = choose(config.backend._target_.split(","))
    kept = [each for each in base.overrides if not each.startswith(("backend=", "backend._target_="))]
    try:
        return compose.compose(base.primary, [*kept, f"backend={name}"])
    except MissingConfigException:  # another package's, without a file of its own in the search path
        return compose.compose(base.primary, [*kept, f"backend._target_={name}", f"backend.name={name}"])


def _note_choices(config: ExpConfig, overrides: list[str]) -> None:
    """Fill in what was chosen, and which keys follow others."""
    record: Any = config.record
    groups = {"experiment", *(field.name for field in dataclasses.fields(ExpConfig))}
    if record.trained_in is not None:  # the run's choices stand in the record; only the user's count beside them
        groups -= {group for group in compose.TRAINED if not any(each.startswith(f"{group}=") for each in overrides)}
    chosen = {
        group: choice for group, choice in HydraConfig.get().runtime.choices.items() if group in groups and choice
    }
    record.chosen = {**record.chosen, **chosen, "backend": config.backend.name}
    record.follows = compose.follows(config)


def _note_differences(config: ExpConfig, overrides: list[str]) -> None:
    """Fill in what is not as in the run that is used, and as in the experiment that published figures are of."""
    record = config.record
    folder = compose.run_folder_of(config.init_from) if task_class(config).needs_weights else None
    if folder is not None:
        record.trained_in = str(folder)
        earlier = compose.load(RunFolder(folder).config)
        checks.check_weights(config, earlier, folder)
        altered = RunFolder(folder).altered(read_result(RunFolder(folder)) or {})
        record.differs = [f"{name} is not as it was written" for name in altered if name == "config.yaml"]
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
    """An experiment as its file has it; None: there is no such file here."""
    try:
        return compose.compose("config", [f"experiment={experiment}", f"data.horizon={horizon}"])
    except MissingConfigException:
        return None


@dataclass
class FrozenRun:
    """What a launcher is given.

    Attributes:
        config: the whole configuration (:class:`exp.config.schema.ExpConfig`), without interpolations to come.
        overrides: what the user gave on the command line.
        folder: the run folder.
        snapshot: of :meth:`write`.
        lock: of the folder, once it is taken.
    """

    config: ExpConfig
    overrides: list[str]
    folder: RunFolder
    snapshot: Snapshot | None = None
    lock: RunLock | None = None

    def execute(self) -> Finished:
        """Write the run folder, launch, wait, print and record the end.

        Raises:
            ExpError: it cannot be started; what goes wrong later is in the answer.
        """
        config, folder = self.config, self.folder
        chosen = launcher.resolve(config.launcher, config.nproc)
        script = chosen.preflight([self], folder.path / "slurm")
        if script is not None:
            console.make_console().out(script, highlight=False)
            return Finished()
        backend = create_backend(config.backend)
        hub.bring(config)
        if not chosen.leads:
            return Finished(chosen.launch(self).exit_code)
        self.write(chosen.job_token())
        announce(config, folder, backend)
        Ended.begun = True
        if not chosen.submits:
            console.wait_for("starting the worker" if config.nproc == 1 else f"starting {config.nproc} workers")
        try:
            try:
                outcome = chosen.launch(self)
            finally:
                console.waited()
            self.check_folder()
            return tell_end(config, folder, outcome)
        except KeyboardInterrupt:
            self.check_folder()  # its loss ends the run by a signal, which may come when no launcher listens any more
            raise

    def write(self, token: str | None = None) -> None:
        """Take the run folder, and put the configuration into it: beside an earlier record, until the run has begun.

        Args:
            token: what all the processes of a job that share the folder know it by; None: this process is alone.

        Raises:
            ConfigError: somebody else is at work there, or the run that is to be continued was another one.
            RunError: the folder cannot be written.
        """
        if self.lock is not None:
            return  # whoever started this process has written it
        folder = self.folder
        missing = missing_folders(folder.logs)
        lock = RunLock(folder.path, token)
        folder.create()
        try:
            joined = lock.acquire()
            self.lock = lock
            if not joined:
                checks.check_folder(self.config, task_class(self.config).saves_state)
        except ConfigError:
            self.release()  # its lock is a file of the folder
            remove_empty(missing)
            raise
        self.snapshot = Snapshot(folder, missing)
        contents = {
            folder.config.name: OmegaConf.to_yaml(self.config, resolve=True).encode(),
            folder.overrides.name: OmegaConf.to_yaml(OmegaConf.create(list(self.overrides))).encode(),
        }
        config = folder.in_use(folder.config)
        if not (joined and config.is_file() and config.read_bytes() == contents[config.name]):
            folder.stage(contents)
        if task_class(self.config).diagnoses:  # what it leaves is no record of a run that could be lost
            folder.begin(self.config.overwrite)
            folder.drop_earlier()

    def take_back(self) -> bool:
        """Leave the folder as it was before :meth:`write`, where the run was refused and nothing has come of it.

        Returns:
            Whether it is so now. Not on several nodes that were started by hand: others may be writing there.
        """
        if self.snapshot is None:
            return True
        alone = self.config.launcher.nnodes == 1 or launcher_class(self.config).submits
        done = alone and not task_class(self.config).diagnoses and self.snapshot.take_back()
        self.folder.drop_earlier()
        self.release()
        if done:
            remove_empty(self.snapshot.missing)
        return done

    def check_folder(self) -> None:
        """Whether the run folder is still there, and this run's.

        Raises:
            RunError: it is not.
        """
        lost = None if self.lock is None else self.lock.check()
        if lost is not None:
            raise RunError(f"{lost}; what it computed is lost")

    def release(self) -> None:
        """Let go of the folder: the run has ended, or has been handed to another process."""
        if self.lock is not None:
            self.lock.release()

    @classmethod
    def load(cls, folder: RunFolder, of_others: bool = False) -> FrozenRun:
        """Read what :meth:`write` has written.

        Args:
            folder: the run folder.
            of_others: it may be a stranger's; else its names were checked before they were written.
        """
        config = compose.load(folder.in_use(folder.config))
        distrust(config, groups=("launcher", "task")) if of_others else allow(config.plugins)
        task_class(config)  # refuses what only the folder names
        overrides: Any = OmegaConf.to_container(OmegaConf.load(folder.in_use(folder.overrides)))
        return cls(config, overrides, folder)


def announce(config: ExpConfig, folder: RunFolder, backend: Backend) -> None:
    """Say what is about to run, and where it goes."""
    processes = config.nproc * config.launcher.nnodes
    terminal = console.make_console()
    if config.backend.simulate:
        terminal.print(
            f"SIMULATED: no {config.backend.name} card is used. Every device of this run is made up in host memory; "
            "its speed says nothing about a real one.",
            style="bold yellow",
            soft_wrap=True,
        )
    if create_task(config).announce(config, folder):
        return
    batch = ""
    if config.global_batch_size is not None:
        batch = f", global batch {config.global_batch_size}"
        if processes > 1 or config.accumulate > 1:
            batch += f" = {config.batch_size} x {processes} processes x {config.accumulate} micro-batches"
    terminal.print(
        f"{config.name}: {config.task.name} on {backend}, {config.precision}{batch}\n"
        f"run folder: {console.shown(folder.path)}",
        highlight=False,
        soft_wrap=True,
    )
    if config.record.trained_in is not None:
        terminal.print(f"as trained in {console.shown(Path(config.record.trained_in))}", soft_wrap=True)
        for line in config.record.differs:
            terminal.print(f"  but {line}", style="yellow", soft_wrap=True)
    devices = backend.device_count() if backend.exclusive_devices else 0
    if devices > config.nproc:
        terminal.print(
            f"{devices - config.nproc} of {devices} {config.backend.name} devices stay idle; nproc={devices} uses all",
            style="dim",
            soft_wrap=True,
        )


def tell_end(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> Finished:
    """Print the outcome, and record one that is no success."""
    if outcome.left or outcome.reported:
        metric = selecting_value(read_json(folder.result)) if outcome.reported else None
        return Finished(outcome.exit_code, metric, outcome.interrupted_by)
    told = create_task(config).tell_end(config, folder, outcome)
    if told is not None:
        return Finished(told)
    result = read_json(folder.result)
    if outcome.exit_code == EXIT_OK and result is not None:
        if outcome.restarts != result["restarts"]:
            result["restarts"] = outcome.restarts
            folder.write_result(result)
        _print_table(config, folder, result)
        return Finished(metric=selecting_value(result))
    if outcome.preempted is not None:
        return _preempted(config, folder, outcome)
    if outcome.exit_code != EXIT_OK:
        first = outcome.failures[0] if outcome.failures else None
        failed = blank_result(config)
        failed.update(restarts=outcome.restarts, **last_known(folder))
        if outcome.interrupted_by is not None:
            failed["error"] = {"rank": None, "type": "Interrupted", "message": f"by {outcome.interrupted_by}"}
        elif first is not None:
            failed["error"] = {"rank": first.rank, "type": first.type, "message": first.message}
        elif outcome.detail is not None:
            failed["error"] = {"rank": None, "type": "RunError", "message": outcome.detail}
        unwritten = _record(folder, failed, outcome)
        text = launcher.describe_failure(outcome) + unwritten
        if outcome.interrupted_by is not None:
            command = to_continue(config, folder)
            text += f"\n  to continue from the last checkpoint: {command}" if command else "; nothing has been saved"
        console.error(text)
        return Finished(outcome.exit_code, float("nan"), outcome.interrupted_by)
    return Finished()  # a node other than rank 0's


def _record(folder: RunFolder, result: dict[str, Any], outcome: Outcome) -> str:
    """Write ``result.json``; but a start that has not begun changes nothing of the record of the run before.

    Returns:
        A line to add where it cannot be written.
    """
    if outcome.recorded:
        return ""
    try:
        if folder.pending:
            folder.drop_start()
        else:
            folder.write_result(result)
            if outcome.exit_code not in REFUSED:
                folder.drop_earlier()
    except OSError as error:
        return f"\n  {folder.result} could not be written: {error.strerror}"
    return ""


def _preempted(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> Finished:
    """The record of a run that ended on notice, and how it goes on."""
    assert outcome.preempted is not None
    step: int | None = outcome.preempted["step"]
    record = blank_result(config)
    record.update(status="preempted", steps=step or 0, restarts=outcome.restarts)
    unwritten = _record(folder, record, outcome)
    if step is None:
        text = f"preempted: task={config.task.name} has no state to save; run it again"
    else:
        text = f"preempted after step {step}, which is saved; to continue: {to_continue(config, folder)}"
    console.make_console().print(text + unwritten, soft_wrap=True, markup=False)
    return Finished(EXIT_PREEMPTED, float("nan"))


def _print_table(config: ExpConfig, folder: RunFolder, result: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    terminal = console.make_console()
    published = result.get("published")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(result["measured_on"])
    table.add_column("this run", justify="right")
    if published:
        table.add_column("published", justify="right")
    for name, value in result["metrics"].items():
        first, *more = name.split("_")
        short = len(first) <= 3 or (len(first) == 4 and first.isalpha() and first.islower())
        title = " ".join([first.upper() if short else first, *more])  # MSE and MASE, but mIoU and accuracy
        unit = result.get("metric_units", {}).get(name)
        title += f" ({unit})" if unit else ""
        row = [title, _shown(value)]
        if published:
            row.append(f"{published[name]:.3f}" if name in published else "")
        table.add_row(*row)
    terminal.print()
    terminal.print(table)
    if published:
        terminal.print(f"published: {published['source']}, horizon {config.data.horizon}", style="dim", soft_wrap=True)
        if published["differs"]:
            experiment = config.record.chosen["experiment"]
            unlike = ", ".join(published["differs"])
            terminal.print(f"this run is not as experiment={experiment}: {unlike}", style="yellow", soft_wrap=True)
    for line in (result.get("data") or {}).get("warnings", ()):
        terminal.print(line, style="yellow", highlight=False, soft_wrap=True)
    left = _left_device(result.get("left_device"))
    if left is not None:
        terminal.print(left, style="yellow", highlight=False, soft_wrap=True)
    speed = f", {result['samples_per_second']:,.0f} samples/s" if result.get("samples_per_second") else ""
    if result.get("flops_per_second"):
        speed += f", {flops(result['flops_per_second'])}FLOP/s ({result['flops_share']:.0%} of plain matrix products)"
    steps = f"{result['steps']} steps, " if result["steps"] else ""
    terminal.print(f"{steps}{result['wall_s']:.0f} s{speed}; results in {console.shown(folder.path)}", soft_wrap=True)


def _left_device(left: dict[str, Any] | None) -> str | None:
    """What to say of operators that have left the device at each step; None: nothing."""
    if left is None or not left["calls_per_step"]:
        return None

    def told(figures: dict[str, Any]) -> str:
        moved = figures["bytes_per_step"]
        return f"{figures['calls_per_step']:.3g}x" + ("" if moved is None else f", {size(moved)}")

    worst = ", ".join(f"{name} ({told(figures)})" for name, figures in list(left["operators"].items())[:3])
    return (
        f"left the device at each step, for the CPU and back: {told(left)}, most of it {worst}; "
        "docs/guide/train.md has what to do about it"
    )


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else number_text(value)


_given: list[str] = []
"""Arguments of the command line, where this is its process."""


def remember(arguments: Sequence[str]) -> None:
    """Keep what the user has typed: among it may be options of Hydra's, which are in no configuration."""
    _given[:] = arguments


def to_continue(config: ExpConfig, folder: RunFolder, *changes: str) -> str | None:
    """The command that continues a run.

    Args:
        config: of the run.
        folder: the run folder.
        *changes: overrides that it is to go on with, in place of those given.

    Returns:
        None where nothing is saved, or the task cannot go on.
    """
    if not task_class(config).saves_state or not folder.has_checkpoint():
        return None
    arguments = _given
    if not _given or {"-m", "--multirun"} & set(_given):
        written = folder.in_use(folder.overrides)
        if not written.is_file():
            return None
        content: Any = OmegaConf.to_container(OmegaConf.load(written))
        arguments = [str(override) for override in content]
    new = {"output_dir": console.shown(folder.path), "resume": "auto", **dict(each.split("=", 1) for each in changes)}
    return _command(arguments, (*new, "overwrite"), [f"{key}={value}" for key, value in new.items()])


def to_continue_sweep(folder: Path) -> str | None:
    """The command that does what is left of a sweep; None outside its process."""
    if not _given:
        return None
    new = [f"output_dir={console.shown(folder)}", "sweep.resume=true"]
    return _command(_given, ("sweep.resume", "output_dir"), new)


def _command(arguments: Sequence[str], without: Sequence[str], new: Sequence[str]) -> str:
    kept = [word for word in arguments if word.lstrip("+").partition("=")[0] not in without]
    program = ["exp"] if Path(sys.argv[0]).name == "exp" else ["python", "-m", "exp"]
    return " ".join(map(shlex.quote, [*program, *kept, *new]))
