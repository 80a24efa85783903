"""The interface of tasks (``task=<name>``), and the commands that resume a run or a sweep."""

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
    """The base class of tasks, such as training or evaluation.

    A task is a dataclass whose fields are the typed keys of ``task`` in the configuration. The parent process uses it
    before anything starts, so its module must not import torch, MMEngine and the like at the top; methods that run on
    the ranks import what they need.

    Attributes:
        trains: trains with an optimizer, so batch sizes and the wrapper matter.
        saves_state: saves its state during the run, and can resume (``resume``); other tasks start again.
        needs_weights: uses a trained model as it is: needs ``init_from``, and takes model and data from that run.
        diagnoses: examines the machine or the data: workers call :meth:`diagnose` instead of :meth:`run`, and the
            parent leaves out all checks that the workers can report.
        isolated: runs its worker in a process of its own, even if there is only one.
        counts_fallbacks: counts the operators that run on the CPU instead of the device, even if that is slow
            (:meth:`exp.hardware.backend.Backend.run_env`).
        compared: its results can be compared with those of other runs.
        uses_hardware: needs the devices of this machine.
        uses_data: uses model and data of the configuration; if not, the data files may be missing.
        paths: its keys that are paths; relative paths start at the current folder.
        work: dotted path of the function that does the work, such as ``exp.engine.outputs.evaluate``; empty if the
            task overrides the method instead. Arguments: the session; those of :meth:`diagnose` for a task that
            ``diagnoses``; those of :meth:`ParentTask.run_in_parent` and the task for a :class:`ParentTask`.
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

        Raises:
            NotImplementedError: the task has neither ``work`` nor its own :meth:`run`.
        """
        result: dict[str, Any] = self._work()(session)
        return result

    def diagnose(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        """Run a task that ``diagnoses``; called on every rank instead of :meth:`run`, without a session."""
        self._work()(config, folder, info, backend)

    def _work(self) -> Any:
        if not self.work:
            raise NotImplementedError(
                f"{type(self).__name__} must override the method that does its work, or set work to a function's path"
            )
        module, _, function = self.work.rpartition(".")
        return getattr(importlib.import_module(module), function)

    def announce(self, config: ExpConfig, folder: RunFolder) -> bool:
        """Print what will run; called in the parent. Return False to print the usual lines instead."""
        return False

    def tell_end(self, config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
        """Print and record the outcome, and return the exit code; called in the parent. None: do this as usual."""
        return None


@dataclass
class ParentTask(Task):
    """A task without workers, such as a report; it needs neither devices nor data files.

    Attributes:
        runs: folders of other runs, if the task has made a table of them.
    """

    compared: ClassVar[bool] = False
    uses_data: ClassVar[bool] = False
    uses_hardware: ClassVar[bool] = False
    runs: ClassVar[Sequence[Any]] = ()

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Run the task in the process of the command line, and return the exit code.

        Args:
            config: the composed, typed configuration.
            overrides: the user's overrides.
        """
        return int(self._work()(config, list(overrides), self))


def task_class(config: ExpConfig) -> type[Task]:
    """The class that ``config.task`` names; raises the errors of :func:`exp.config.compose.task_type`."""
    cls: type[Task] = task_type(config.task.get("_target_"))
    return cls


def create_task(config: ExpConfig) -> Task:
    """The task of a configuration, with its keys; raises the errors of :func:`task_class`."""
    cls = task_class(config)
    plain: Any = OmegaConf.to_container(config.task, resolve=True)
    # A family of data sets may add keys to a task (exp.plugins.Plugin.keys); they are not fields of the class.
    return cls(**{field.name: plain[field.name] for field in dataclasses.fields(cls) if field.name in plain})


_given: list[str] = []
"""Arguments of the command line; empty in other processes."""


def remember(arguments: Sequence[str]) -> None:
    """Keep the arguments of the command line, which may contain options of Hydra that no configuration has."""
    _given[:] = arguments


def to_continue(config: ExpConfig, folder: RunFolder, *changes: str) -> str | None:
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
    """The command that resumes a sweep; None outside the process of the command line."""
    if not _given:
        return None
    new = [f"output_dir={console.shown(folder)}", "sweep.resume=true"]
    return _command(_given, ("sweep.resume", "output_dir"), new)


def _command(arguments: Sequence[str], without: Sequence[str], new: Sequence[str]) -> str:
    kept = [word for word in arguments if word.lstrip("+").partition("=")[0] not in without]
    program = ["exp"] if Path(sys.argv[0]).name == "exp" else ["python", "-m", "exp"]
    return " ".join(map(shlex.quote, [*program, *kept, *new]))
