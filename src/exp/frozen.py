"""A run as it is written down: from what Hydra has composed, validated and completed by what follows from it.

Nothing that happens to YAML files later changes it. A launcher runs it (:meth:`FrozenRun.execute`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from exp import console, early, hub, launcher, summary, trackers
from exp.config import check as checks
from exp.config import compose, differences
from exp.config.resolve import allow, check_names, distrust
from exp.config.schema import ExpConfig
from exp.errors import ConfigError, RunError
from exp.hardware.registry import choose, create_backend
from exp.launcher.base import launcher_class
from exp.runs.folder import RunFolder, Snapshot, missing_folders, read_result, remove_empty
from exp.runs.lock import RunLock
from exp.summary import Finished
from exp.task import create_task, task_class

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["FrozenRun", "check", "complete", "freeze", "prepare"]


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

    Args:
        config: composed by Hydra, without its own part.
        overrides: the user's.

    Returns:
        The configuration with its types, of the backend that was chosen.

    Raises:
        ConfigError: a key or a type is wrong, or the user has not chosen code that is named.
        UnavailableError: the backend is not there.
    """
    check_names(config, overrides)
    config = compose.typed(_choose_backend(*_as_trained(config, overrides)))  # checks what +KEY=VALUE added, too
    compose.replace_given(config, overrides)
    _note_choices(config, overrides)
    return config


def complete(config: ExpConfig, overrides: list[str], output_dir: Path) -> FrozenRun:
    """The second half of :func:`freeze`: everything that depends on values.

    Args:
        config: of :func:`prepare`; changed in place.
        overrides: the user's.
        output_dir: the run folder.

    Raises:
        ConfigError: a value is wrong, two do not go together, or a file is missing.
        UnavailableError: the hardware or a package is not there.
    """
    check_names(config, overrides)
    config.output_dir = str(output_dir.absolute())
    compose.expand(config)
    check(config, overrides, create_backend(config.backend))
    _note_differences(config, overrides)
    return FrozenRun(config, overrides, RunFolder(output_dir))


def check(config: ExpConfig, overrides: list[str], backend: Backend) -> None:
    """Check every value, and fill in what is derived; errors as of :func:`complete`."""
    checks.validate(config, overrides, backend, create_task(config), launcher_class(config))
    trackers.check(config.logger)
    if compose.is_of_hub(config.init_from):
        hub.parse(str(config.init_from))


def _as_trained(config: ExpConfig, overrides: list[str]) -> tuple[ExpConfig, list[str], str | None]:
    """The configuration on top of that of the run in ``init_from``, where it is to be used as it was trained.

    The command line has seen to that already (:func:`exp.config.compose.begin`), but in a sweep over runs it knew only
    one of them, and of a task that only a file names it did not know that it needs weights.

    Returns:
        It, and what it was composed of, should it be composed once more: overrides and primary configuration.
    """
    folder = compose.run_folder_of(config.init_from) if task_class(config).needs_weights else None
    begun_with = None if config.record is None else config.record.trained_in
    if folder is None or str(folder) == begun_with:
        return config, overrides, None
    if begun_with is not None:
        compose.offer(folder)
        return compose.compose(overrides), overrides, None
    primary, kept = compose.begin(overrides, needs_weights=True)
    return (compose.compose(kept, primary), kept, primary) if primary == compose.OF_RUN else (config, overrides, None)


def _choose_backend(config: ExpConfig, overrides: list[str], primary: str | None) -> ExpConfig:
    """Replace ``backend=auto`` by the first that is available, with that backend's own configuration."""
    if config.backend._target_ != "auto":
        return config
    if config.backend.simulate:
        raise ConfigError("backend.simulate=true with backend=auto: say which backend's devices are to be simulated")
    name = choose(list(config.backend.options["candidates"]))
    kept = [each for each in overrides if not each.startswith(("backend=", "backend.options.candidates="))]
    try:
        return compose.compose([*kept, f"backend={name}"], primary)
    except MissingConfigException:
        # Installed by another package, and no YAML file of its own in the search path: the class's own defaults.
        config.backend._target_ = config.backend.name = name
        config.backend.options = {}
        return config


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
        return compose.compose([f"experiment={experiment}", f"data.horizon={horizon}"], "config")
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
        summary.begin(config, folder, backend)
        early.begin()
        if not chosen.submits:
            console.wait_for("starting the worker" if config.nproc == 1 else f"starting {config.nproc} workers")
        try:
            try:
                outcome = chosen.launch(self)
            finally:
                console.waited()
            self.check_folder()
            return summary.end(config, folder, outcome)
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
                # Another run may have left it meanwhile.
                checks.check_folder(self.config, task_class(self.config).saves_state)
            self._check_resumed()
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

    def _check_resumed(self) -> None:
        """Whether the run that is to be continued is this one, by its record.

        Raises:
            ConfigError: it is not.
        """
        resume = self.config.resume
        if resume is None:
            return
        folder = self.folder if resume == "auto" else compose.run_folder_of(resume)
        folder = RunFolder(folder) if isinstance(folder, Path) else folder
        if folder is None or not folder.has_checkpoint() or not folder.config.is_file():
            return
        old = compose.load(folder.config)
        if task_class(old).saves_state:
            refused = differences.changes(differences.as_plain(old), differences.as_plain(self.config)).refused
            if refused:
                raise ConfigError(differences.refusal(refused, console.shown(folder.path)))

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
