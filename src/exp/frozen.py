"""A run as it is written down, and what the parent does with it: folder, launch, what is printed and recorded.

It is made of what Hydra has composed, validated and completed by what follows from it (:func:`freeze`); nothing that
happens to YAML files later changes it. A few lines are printed before a run, and a table after it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from exp import console, trackers
from exp.config import check as checks
from exp.config import compose, differences
from exp.config.compose import is_of_hub
from exp.config.resolve import allow, check_names, distrust
from exp.config.schema import ExpConfig
from exp.console import flops, size
from exp.errors import EXIT_OK, EXIT_PREEMPTED, REFUSED, ConfigError, ExpError, RunError
from exp.hardware.registry import choose, create_backend
from exp.hub import bring, parse
from exp.launcher.base import Outcome, describe_failure, launcher_class, resolve
from exp.runs.files import read_json
from exp.runs.folder import (
    RunFolder,
    Snapshot,
    blank_result,
    last_known,
    missing_folders,
    number_text,
    read_result,
    remove_empty,
)
from exp.runs.lock import RunLock
from exp.runs.status import Failures
from exp.task import call, create_task, task_class, to_continue

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["FrozenRun", "complete", "freeze", "prepare"]


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
    if "," in config.backend._target_:  # of backend=auto
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
    if config.logger.trackers:
        trackers.check(config.logger)
    if is_of_hub(config.init_from):
        parse(str(config.init_from))
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

    def execute(self, tracebacks: bool = False) -> Outcome:
        """Write the run folder, launch, wait, print and record the end; a run that is refused leaves no folder.

        Args:
            tracebacks: the user wants them: those of workers that refuse the run stand in its logs alone.

        Returns:
            The outcome, with the exit code of the command.

        Raises:
            ExpError: it cannot be started.
        """
        config, folder, begun = self.config, self.folder, False
        try:
            chosen = resolve(config.launcher, config.nproc)
            script = chosen.preflight([self], folder.path / "slurm")
            if script is not None:
                console.make_console().out(script, highlight=False)
                return Outcome()
            backend = create_backend(config.backend)
            if is_of_hub(config.init_from):
                bring(config)
            if chosen.leads:
                self.write(chosen.job_token())
                self.announce(backend)
                Failures(folder).forget()
            begun = True
            try:
                outcome = chosen.launch(self)
            finally:
                self.check_folder()  # its loss may end the run by a signal, when no launcher listens any more
            if chosen.leads:
                outcome.exit_code = self.tell_end(outcome)
            if outcome.exit_code in REFUSED:
                for file in sorted(folder.logs.glob("rank*.error.json")) if tracebacks else ():
                    log = file.with_name(file.name.replace(".error.json", ".log"))
                    print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)  # noqa: T201
                if not self.take_back():
                    print(f"  run folder: {console.shown(folder.path)}", file=sys.stderr)  # noqa: T201
            return outcome
        except (ExpError, KeyboardInterrupt) as error:
            if error.exit_code in REFUSED if isinstance(error, ExpError) else not begun:
                self.take_back()
            raise
        finally:
            self.release()

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

    def announce(self, backend: Backend) -> None:
        """Say what is about to run, and where it goes."""
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
        _say(f"run folder: {console.shown(self.folder.path)}")
        if config.record.trained_in is not None:
            _say(f"as trained in {console.shown(Path(config.record.trained_in))}")
            for line in config.record.differs:
                _say(f"  but {line}", "yellow")
        devices = backend.device_count() if backend.exclusive_devices else 0
        if devices > config.nproc:
            idle = devices - config.nproc
            _say(f"{idle} of {devices} {config.backend.name} devices stay idle; nproc={devices} uses all", "dim")

    def tell_end(self, outcome: Outcome) -> int:
        """Print how it ended, and record an end that is no success; returns the exit code."""
        config, folder = self.config, self.folder
        if outcome.left or outcome.reported:
            return outcome.exit_code
        task = task_class(config)
        judged = call(task.end, config, folder, outcome) if task.end and outcome.interrupted_by is None else None
        if judged is not None or (task.diagnoses and outcome.exit_code == EXIT_OK):
            return judged or EXIT_OK
        if outcome.exit_code == EXIT_OK:
            result = read_json(folder.result)
            if result is not None:  # else a node other than rank 0's
                if outcome.restarts != result["restarts"]:
                    result["restarts"] = outcome.restarts
                    folder.write_result(result)
                _print_table(config, folder, result)
            return EXIT_OK
        record = {**blank_result(config), "restarts": outcome.restarts}
        if outcome.preempted is not None:
            step: int | None = outcome.preempted["step"]
            record.update(status="preempted", steps=step or 0)
            text = f"preempted: task={config.task.name} has no state to save; run it again"
            if step is not None:
                text = f"preempted after step {step}, which is saved; to continue: {to_continue(config, folder)}"
            text += self._record(record, outcome)
            console.make_console().print(text, soft_wrap=True, markup=False)
            return EXIT_PREEMPTED
        record.update(last_known(folder))
        text = describe_failure(outcome)
        if outcome.interrupted_by is not None:
            record["error"] = {"rank": None, "type": "Interrupted", "message": f"by {outcome.interrupted_by}"}
            command = to_continue(config, folder)
            text += f"\n  to continue from the last checkpoint: {command}" if command else "; nothing has been saved"
        elif outcome.failures:
            first = outcome.failures[0]
            record["error"] = {"rank": first.rank, "type": first.type, "message": first.message}
        elif outcome.detail is not None:
            record["error"] = {"rank": None, "type": "RunError", "message": outcome.detail}
        console.error(text + self._record(record, outcome))
        return outcome.exit_code

    def _record(self, result: dict[str, Any], outcome: Outcome) -> str:
        """Write ``result.json``; but a start that has not begun changes nothing of the record of the run before.

        Returns:
            A line to add where it cannot be written.
        """
        folder = self.folder
        try:
            if folder.pending and not outcome.recorded:
                folder.drop_start()
            elif not outcome.recorded:
                folder.write_result(result)
        except OSError as error:
            return f"\n  {folder.result} could not be written: {error.strerror}"
        return ""

    def take_back(self) -> bool:
        """Leave the folder as it was before :meth:`write`, where the run was refused and nothing has come of it.

        Returns:
            Whether it is so now. Not on several nodes that were started by hand: others may be writing there.
        """
        if self.snapshot is None:
            return True
        alone = self.config.launcher.nnodes == 1 or launcher_class(self.config).submits
        done = alone and not task_class(self.config).diagnoses and self.snapshot.take_back()
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


def _say(text: str, style: str | None = None) -> None:
    console.make_console().print(text, style=style, highlight=False, soft_wrap=True)


def _print_table(config: ExpConfig, folder: RunFolder, result: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    terminal = console.make_console()

    published = result.get("published")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(result["measured_on"])
    for column in ("this run", *["published"] * bool(published)):
        table.add_column(column, justify="right")
    for name, value in result["metrics"].items():
        first, *more = name.split("_")
        short = len(first) <= 3 or (len(first) == 4 and first.isalpha() and first.islower())
        title = " ".join([first.upper() if short else first, *more])  # MSE and MASE, but mIoU and accuracy
        unit = result.get("metric_units", {}).get(name)
        shown = "-" if value is None else f"{value:,}" if isinstance(value, int) else number_text(value)
        known = [f"{published[name]:.3f}" if name in published else ""] if published else []
        table.add_row(title + (f" ({unit})" if unit else ""), shown, *known)
    terminal.print()
    terminal.print(table)
    if published:
        _say(f"published: {published['source']}, horizon {config.data.horizon}", "dim")
        if published["differs"]:
            unlike = ", ".join(published["differs"])
            _say(f"this run is not as experiment={config.record.chosen['experiment']}: {unlike}", "yellow")
    for line in (result.get("data") or {}).get("warnings", ()):
        _say(line, "yellow")
    left = result.get("left_device")
    if left is not None and left["calls_per_step"]:
        moved = "" if left["bytes_per_step"] is None else f", {size(left['bytes_per_step'])}"
        _say(
            f"left the device at each step, for the CPU and back: {left['calls_per_step']:.3g}x{moved}, most of it "
            f"{', '.join(list(left['operators'])[:3])}; docs/guide/train.md has what to do about it",
            "yellow",
        )
    speed = f", {result['samples_per_second']:,.0f} samples/s" if result.get("samples_per_second") else ""
    if result.get("flops_per_second"):
        speed += f", {flops(result['flops_per_second'])}FLOP/s ({result['flops_share']:.0%} of plain matrix products)"
    steps = f"{result['steps']} steps, " if result["steps"] else ""
    _say(f"{steps}{result['wall_s']:.0f} s{speed}; results in {console.shown(folder.path)}")
