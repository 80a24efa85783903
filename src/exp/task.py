"""The task interface: one thing to do with an experiment, ``task=<name>``; and the command that goes on with it."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

from omegaconf import MISSING, OmegaConf

from exp import console
from exp.config.compose import task_type

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.launcher.base import Outcome
    from exp.runs.folder import RunFolder
    from exp.session import RankInfo, Session

__all__ = ["ParentTask", "Task", "create_task", "remember", "task_class", "to_continue", "to_continue_sweep"]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class Task:
    """One thing to do. A task is a dataclass: its fields are the keys of ``task`` in the configuration, typed.

    The parent asks a task, too, before anything starts: its module imports neither torch nor what it works with; its
    methods that run on the ranks do.

    Attributes:
        trains: it trains with an optimizer: batch sizes and the wrapper matter.
        saves_state: it saves its state on the way, and goes on from there (``resume``); others can only be run again.
        needs_weights: it uses a model as it is: it wants ``init_from``, and takes model and data of a run from there.
        diagnoses: it examines what others need: its workers call :meth:`diagnose`, and the parent checks nothing that
            they could report.
        isolated: its worker is a process of its own, even if it is the only one.
        counts_fallbacks: its workers count what leaves the device, however slow that makes them
            (:meth:`exp.hardware.backend.Backend.run_env`).
        compared: what it leaves can be compared with other runs.
        uses_hardware: the devices have to be here.
        uses_data: model and data of the configuration play a part; without, the files of the data need not be here.
        paths: its keys that are paths: relative ones begin where exp was started.
        work: path of the function that does it, such as ``exp.engine.outputs.evaluate``: ranks call it with the
            session, those of a task that ``diagnoses`` with the arguments of :meth:`diagnose`, the parent with those
            of :meth:`ParentTask.run_in_parent` and the task; empty where the task has such a method of its own.
    """

    _target_: str = MISSING
    name: str = MISSING

    trains: ClassVar[bool] = False
    saves_state: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    diagnoses: ClassVar[bool] = False
    isolated: ClassVar[bool] = False
    counts_fallbacks: ClassVar[bool] = False
    compared: ClassVar[bool] = True
    uses_data: ClassVar[bool] = True
    uses_hardware: ClassVar[bool] = True
    paths: ClassVar[Sequence[str]] = ()
    work: ClassVar[str] = ""

    def check(self, config: ExpConfig) -> None:
        """In the parent, before anything is written: refuse what does not go together, fill in what follows.

        Args:
            config: the whole configuration; may be changed.

        Raises:
            ConfigError: it cannot be done.
        """

    def run(self, session: Session) -> dict[str, Any]:
        """On every rank: do it, and return the content of ``result.json``, which rank 0's is written of.

        Args:
            session: device, process group, configuration and run folder (:class:`exp.session.Session`).
        """
        result: dict[str, Any] = self._work()(session)
        return result

    def diagnose(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        """On every rank, instead of :meth:`run`, for tasks that open their session themselves."""
        self._work()(config, folder, info, backend)

    def _work(self) -> Any:
        if not self.work:
            raise NotImplementedError(
                f"{type(self).__name__} has neither a method for what it does, nor its path in work"
            )
        module, _, function = self.work.rpartition(".")
        return getattr(importlib.import_module(module), function)

    def announce(self, config: ExpConfig, folder: RunFolder) -> bool:
        """Say what is about to run; False: the usual lines are printed."""
        return False

    def tell_end(self, config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
        """Say and record how it ended; returns the exit code. None: as usual."""
        return None


@dataclass
class ParentTask(Task):
    """A task that needs no workers, such as a report. It looks at no hardware, and at no files of the data.

    Attributes:
        runs: folders of other runs, where it has made a table of them.
    """

    compared: ClassVar[bool] = False
    uses_data: ClassVar[bool] = False
    uses_hardware: ClassVar[bool] = False
    runs: ClassVar[Sequence[Any]] = ()

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Do it, in the process of the command line; returns its exit code.

        Args:
            config: as it was composed, with its types.
            overrides: the user's.
        """
        return int(self._work()(config, list(overrides), self))


def task_class(config: ExpConfig) -> type[Task]:
    """The class that ``config.task`` names; see :func:`exp.config.compose.task_type`."""
    cls: type[Task] = task_type(config.task.get("_target_"))
    return cls


def create_task(config: ExpConfig) -> Task:
    """The task of a configuration, with its keys.

    Raises:
        ConfigError: as :func:`task_class`.
    """
    cls = task_class(config)
    plain: Any = OmegaConf.to_container(config.task, resolve=True)
    # Data may bring keys of their own to a task, such as how many windows are to be predicted.
    return cls(**{field.name: plain[field.name] for field in dataclasses.fields(cls) if field.name in plain})


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
