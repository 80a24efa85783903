"""The task interface: one thing to do with an experiment, ``task=<name>``; and the command that goes on with it.

A task is work for ranks (:class:`Task`) or work for the process of the command line (:class:`ParentTask`).
"""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Sequence, TypeVar

from omegaconf import MISSING, OmegaConf

from exp import console
from exp.config.compose import task_type

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.runs.folder import RunFolder
    from exp.session import Session

__all__ = ["ParentTask", "Task", "call", "create_task", "given", "named", "task_class", "to_continue", "to_go_on"]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class Task:
    """Work for ranks. A task is a dataclass: its fields are the keys of ``task`` in the configuration, typed.

    The parent asks a task, too, before anything starts: its module imports neither torch nor what it works with.

    Attributes:
        work: dotted path of the function that every rank calls with its session, such as
            ``exp.engine.outputs.evaluate``; empty where the task has a method :meth:`run`.
        begin: dotted path of a function that prints what is about to run, in place of the usual lines; called in the
            parent with the configuration and the run folder.
        end: likewise of a function that judges and prints how it ended; called also with the
            :class:`exp.launcher.outcome.Outcome`, unless a signal ended the run; returns the exit code, or None: as
            usual.
        trains: it trains with an optimizer: batch sizes and the wrapper matter.
        saves_state: it saves its state on the way, and goes on from there (``resume``); others can only be run again.
        needs_weights: it uses a model as it is: it needs ``init_from``, and takes model and data of a run from there.
        uses_data: it uses model and data of the configuration; without, the files of the data need not be here.
        uses_hardware: the devices have to be here.
        compared: its results can be compared with other runs.
        paths: its keys that are paths: relative ones begin where exp was started.
        isolated: its worker is a process of its own, even if it is the only one.
        diagnoses: it examines what others need, and prints all itself: the parent checks nothing that ranks could
            report, and ``work`` opens its session by itself. It is called with the configuration, the run folder, the
            :class:`exp.launcher.rank.RankInfo` and the backend.
        counts_fallbacks: its workers count what leaves the device, however slow that makes them
            (:meth:`exp.hardware.backend.Backend.run_env`).
    """

    _target_: str = MISSING
    name: str = MISSING

    work: ClassVar[str] = ""
    begin: ClassVar[str] = ""
    end: ClassVar[str] = ""
    trains: ClassVar[bool] = False
    saves_state: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    uses_data: ClassVar[bool] = True
    uses_hardware: ClassVar[bool] = True
    compared: ClassVar[bool] = True
    paths: ClassVar[Sequence[str]] = ()
    isolated: ClassVar[bool] = False
    diagnoses: ClassVar[bool] = False
    counts_fallbacks: ClassVar[bool] = False

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
        result: dict[str, Any] = call(self.work, session)
        return result


@dataclass
class ParentTask(Task):
    """Work for the process of the command line, such as a report; ``work`` is called as :meth:`run_in_parent` is."""

    uses_data: ClassVar[bool] = False
    uses_hardware: ClassVar[bool] = False
    compared: ClassVar[bool] = False
    runs: ClassVar[Sequence[Path]] = ()
    """Folders of other runs, where it has made a table of them."""

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Do it, and return the exit code.

        Args:
            config: as it was composed, with its types.
            overrides: the user's.
        """
        return int(call(self.work, config, list(overrides), self))


_T = TypeVar("_T", bound=Task)


def named(cls: type[_T]) -> type[_T]:
    """Make a dataclass of a task, with its path as ``_target_``, and its name in lower case as ``name``."""
    keys = [("_target_", str, f"{cls.__module__}.{cls.__name__}"), ("name", str, cls.__name__.lower())]
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return dataclasses.make_dataclass(cls.__name__, keys, bases=(dataclass(cls),), namespace=namespace)


def call(path: str, *arguments: Any) -> Any:
    """Call the function with this dotted path, and import its module first."""
    module, _, function = path.rpartition(".")
    return getattr(importlib.import_module(module), function)(*arguments)


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


given: list[str] = []
"""Arguments of the command line, in its process alone; among them may be Hydra's, which are in no configuration."""


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
    arguments, written = given, folder.in_use(folder.overrides)
    if not given or {"-m", "--multirun"} & {*given}:
        if not written.is_file():
            return None
        arguments = [str(override) for override in OmegaConf.load(written)]
    return to_go_on(f"output_dir={console.shown(folder.path)}", "resume=auto", *changes, without=("overwrite",),
                    arguments=arguments)  # fmt: skip


def to_go_on(*changes: str, without: Sequence[str] = (), arguments: Sequence[str] | None = None) -> str:
    """A command line with other values.

    Args:
        *changes: overrides; of those with the same key the last one counts.
        without: keys that it is not to have.
        arguments: of the command line; None: of this one.
    """
    new = dict(change.split("=", 1) for change in changes)
    kept = [each for each in (given if arguments is None else arguments)
            if each.lstrip("+").partition("=")[0] not in (*new, *without)]  # fmt: skip
    program = ["exp"] if Path(sys.argv[0]).name == "exp" else ["python", "-m", "exp"]
    return " ".join(map(shlex.quote, [*program, *kept, *(f"{key}={value}" for key, value in new.items())]))
