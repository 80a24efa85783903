"""The interface of tasks (``task=<name>``), and the commands that resume a run or a sweep.

A task is work for ranks (:class:`Task`) or work for the process of the command line (:class:`ParentTask`).
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Optional, Sequence, TypeVar

from omegaconf import MISSING

from exp import console
from exp.config.resolve import resolve, to_plain, user
from exp.runs.files import read_yaml

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.runs.folder import RunFolder
    from exp.session import RankInfo, Session

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class Task:
    """The base class of tasks, such as training or evaluation: work for ranks.

    A task is a dataclass whose fields are the typed keys of ``task`` in the configuration. The parent process uses it
    before anything starts, so its module must not import torch, MMEngine and the like at the top.

    Attributes:
        trains: trains with an optimizer, so batch sizes and the wrapper matter.
        saves_state: saves its state during the run, and can resume (``resume``); other tasks start again.
        needs_weights: uses a trained model as it is: needs ``init_from``, and takes model and data from that run.
        uses_data: uses model and data of the configuration; if not, the data files may be missing.
        uses_hardware: needs the devices of this machine.
        has_comparable_result: its results can be compared with those of other runs.
        paths: its keys that are paths; relative paths start at the current folder.
        is_diagnostic: examines the machine or the data: the parent leaves out all checks that the workers can report,
            and ranks call :meth:`diagnose` instead of :meth:`run`.
        counts_fallbacks: counts the operators that run on the CPU instead of the device, even if that is slow
            (:meth:`exp.hardware.backend.Backend.run_env`).
    """

    _target_: str = MISSING
    name: str = MISSING

    trains: ClassVar[bool] = False
    saves_state: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    uses_data: ClassVar[bool] = True
    uses_hardware: ClassVar[bool] = True
    has_comparable_result: ClassVar[bool] = True
    paths: ClassVar[Sequence[str]] = ()
    is_diagnostic: ClassVar[bool] = False
    counts_fallbacks: ClassVar[bool] = False

    def check(self, config: ExpConfig) -> None:
        """Check the configuration for this task, and fill in derived values. Called in the parent, before any output.

        Args:
            config: the whole configuration; may be changed in place.

        Raises:
            ConfigError: the task cannot run with this configuration.
        """

    def run(self, session: Session) -> dict[str, Any]:
        """Run the task; called on every rank.

        Args:
            session: device, process group, configuration and run folder (:class:`exp.session.Session`).

        Returns:
            The content of ``result.json``; that of rank 0 is written.
        """
        raise NotImplementedError

    def diagnose(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        """Run a diagnostic task on a rank. It opens a session step by step, and goes on if a step fails."""
        raise NotImplementedError

    def print_header(self, config: ExpConfig, folder: RunFolder) -> bool:
        """Print what will run; called in the parent. False: the usual lines are printed."""
        del config, folder
        return False

    def report_outcome(self, config: ExpConfig, folder: RunFolder, outcome: Any) -> Optional[int]:
        """Print and record how the workers ended; called in the parent, unless a signal ended the run.

        Args:
            config: the configuration.
            folder: the run folder.
            outcome: an :class:`exp.launcher.outcome.Outcome`.

        Returns:
            The exit code; None: the outcome is reported as usual.
        """
        del config, folder, outcome
        return None


@dataclass
class ParentTask(Task):
    """A task without workers, such as a report."""

    has_comparable_result: ClassVar[bool] = False
    runs: ClassVar[Sequence[Path]] = ()
    """Folders of the runs that the task has compared in a table; empty: none."""

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Run the task in the process of the command line, and return the exit code.

        Args:
            config: the composed, typed configuration.
            overrides: the user's overrides.
        """
        raise NotImplementedError


_T = TypeVar("_T", bound=Task)


def named_task(cls: type[_T]) -> type[_T]:
    """Make a dataclass of a task, with its path as ``_target_``, and its name in lower case as ``name``."""
    keys = [("_target_", str, f"{cls.__module__}.{cls.__name__}"), ("name", str, cls.__name__.lower())]
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return dataclasses.make_dataclass(cls.__name__, keys, bases=(dataclass(cls),), namespace=namespace)


def task_class(config: ExpConfig) -> type[Task]:
    """The class that ``config.task`` names, a subclass of :class:`Task`.

    Raises:
        ConfigError: the class does not exist, or is not a task.
        UnavailableError: its module cannot be imported.
    """
    cls: type[Task] = resolve("task._target_", str(config.task.get("_target_")), Task)
    return cls


def create_task(cls: type[Task], section: Any) -> Task:
    """A task with its keys.

    Args:
        cls: the result of :func:`task_class`.
        section: ``config.task``.
    """
    keys = to_plain(section)
    # A family of data sets may add keys to a task (exp.plugins.Plugin.keys); they are not fields of the class.
    return cls(**{field.name: keys[field.name] for field in dataclasses.fields(cls) if field.name in keys})


def resume_command(config: ExpConfig, folder: RunFolder, *changes: str) -> str | None:
    """The command that resumes a run.

    Args:
        config: the configuration of the run.
        folder: the run folder.
        *changes: overrides that replace those of the run.

    Returns:
        The command; None if there is no checkpoint, or the task cannot resume.
    """
    if not task_class(config).saves_state or not folder.has_checkpoint():
        return None
    arguments, written = user.arguments, folder.current_file(folder.overrides)
    if not arguments or {"-m", "--multirun"} & {*arguments}:
        if not written.is_file():
            return None
        arguments = [str(override) for override in read_yaml(written)]
    changes = f"output_dir={console.display_path(folder.path)}", "resume=auto", *changes
    return rerun_command(*changes, without=("overwrite",), arguments=arguments)


def rerun_command(*changes: str, without: Sequence[str] = (), arguments: Sequence[str] | None = None) -> str:
    """A command line with changed overrides.

    Args:
        *changes: overrides to add or replace; of those with the same key the last one counts.
        without: keys to leave out.
        arguments: arguments to change; None: those of this process.
    """
    new = dict(change.split("=", 1) for change in changes)
    unchanged = [
        argument
        for argument in (user.arguments if arguments is None else arguments)
        if argument.lstrip("+").partition("=")[0] not in (*new, *without)
    ]
    program = ["exp"] if Path(sys.argv[0]).name == "exp" else ["python", "-m", "exp"]
    return " ".join(map(shlex.quote, [*program, *unchanged, *(f"{key}={value}" for key, value in new.items())]))
