"""The command line: parse, freeze, launch, report.

Nothing here imports torch: help, completion, ``--cfg`` and every configuration error answer at once, and the parent of
a distributed run never holds a device.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins

from exp import __version__, console
from exp.config import compose
from exp.config.command_line import Options, explain_error, help_text, is_composition_error, read_options
from exp.config.resolve import user
from exp.config.sources import register
from exp.errors import (
    EXIT_FAILED,
    EXIT_OK,
    ConfigError,
    ExpError,
    SignalReceived,
    as_exp_error,
    format_user_error,
    user_traceback,
)
from exp.launcher.base import Classes, launcher_class
from exp.launcher.execute import execute
from exp.launcher.freeze import compose_run, validate_run
from exp.runs.files import UMASK, write_json
from exp.runs.folder import RunFolder
from exp.runs.job import NOTE_VARIABLE
from exp.task import ParentTask, create_task, rerun_command, task_class
from hydra_plugins import exp_sweeps  # not its class, which Hydra's search makes anew if exp is installed

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig


def main() -> int:
    """Run the command line in ``sys.argv``, and return the exit code (docs/concepts/run.md lists the codes)."""
    os.umask(UMASK)
    if os.environ.get("PYTHONPATH"):  # relative paths would lead elsewhere in a child that starts in another folder
        paths = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
    note = os.environ.pop(NOTE_VARIABLE, None)
    ended = _End(EXIT_OK)
    error: BaseException | None = None
    full_error = os.environ.get("HYDRA_FULL_ERROR", "")
    user.sweep, started = None, False

    def job(config: ExpConfig) -> None:
        nonlocal ended, error, started
        started = True
        try:
            ended = _run(config, list(HydraConfig.get().overrides.task), tracebacks=bool(full_error))
        except Exception as caught:  # noqa: BLE001 - reported below, since Hydra would print a line of its own
            error = caught

    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints its errors and exits with 1
    try:
        _check_folder()
        arguments = _parse(sys.argv[1:])
        if arguments is not None:
            primary, overrides, _ = compose.primary_config(arguments.overrides)
            sys.argv[1:] = [*arguments.flags, *overrides]
            with console.stdout_errors() if arguments.prints else contextlib.nullcontext():
                if arguments.prints or arguments.multirun:
                    hydra.main(version_base="1.3", config_path="pkg://exp.conf", config_name=primary)(job)()
                else:
                    with hydra.initialize_config_module("exp.conf", job_name="exp", version_base="1.3"):
                        job(compose.compose_job(primary, overrides))
        with console.stdout_errors():
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of --help or --cfg has closed the pipe, as head does
        console.redirect_to_devnull(sys.stdout)
    except (Exception, KeyboardInterrupt) as caught:  # noqa: BLE001 - reported below, or raised again
        error = caught
    finally:
        os.environ["HYDRA_FULL_ERROR"] = full_error
    if user.sweep is not None:
        error = error if isinstance(error, KeyboardInterrupt) else user.sweep.translate_error(error)
        ended = _End(*user.sweep.close(rerun_command))
    try:
        if error is not None:
            code, text = _report(error, bool(full_error), usage=not started)
            ended = _End(code, ended.runs, text)
    finally:
        if note is not None:
            first_line = ended.error and ended.error.partition("\n")[0]
            write_json(Path(note), {"runs": [str(path) for path in ended.runs], "error": first_line})
    return ended.code


class _End(NamedTuple):
    """How a command ended: its exit code, its run folders, and the text of the last error that it has printed."""

    code: int
    runs: Sequence[Path] = ()
    error: str | None = None


def _check_folder() -> None:
    """Refuse a current folder that was deleted, or whose path cannot be written into ``config.yaml``."""
    try:
        Path.cwd().as_posix().encode()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted", "change to another one (cd)") from None
    except UnicodeEncodeError:
        raise ConfigError(
            f"the path of the current folder, {Path.cwd()}, is not UTF-8", "change to another one (cd)"
        ) from None


def _parse(arguments: list[str]) -> Options | None:
    """The arguments for Hydra; None if this function has answered the command (``--version``, ``--help``)."""
    if "--version" in arguments:  # Hydra would print its own version
        print(f"exp {__version__}")  # noqa: T201
        return None
    options = read_options(arguments)
    # Overrides last, where further ones can follow.
    user.arguments = sorted(arguments, key=options.written.__contains__)
    register(options.folders)
    Plugins.instance().register(exp_sweeps.ExpLauncher)  # Hydra finds it if exp is installed, but not in a checkout
    if options.help:
        with console.stdout_errors():
            print(help_text())  # noqa: T201
        return None
    return options


def _run(config: ExpConfig, overrides: list[str], tracebacks: bool) -> _End:
    """Freeze and launch the run, or run a task that needs no workers.

    Its run folders are the run's own, if it was written, or those that the task has compared.
    """
    compose.check_not_empty("output_dir", config.output_dir)
    cls = task_class(config)
    if issubclass(cls, ParentTask):
        compose.replace_dict_overrides(config, overrides)
        config = compose.typed(config)
        task: Any = create_task(cls, config.task)
        code, folder, text = task.run_in_parent(config, overrides), RunFolder(config.output_dir), None
        if task.runs:
            return _End(code, task.runs)
    else:
        config = compose_run(config, overrides, cls)
        classes = Classes(cls, launcher_class(config))
        classes.launcher.adopt_rank_environment(config, overrides)
        run = validate_run(config, overrides, classes)
        outcome, folder = execute(run, tracebacks), run.folder
        code, text = outcome.exit_code, outcome.reported
    return _End(code, [folder.path] * folder.config.is_file(), text)


def _report(error: BaseException, full: bool, usage: bool = False) -> tuple[int, str | None]:
    """Report on stderr the error that has ended a command; an unexpected error is raised again, with its traceback.

    Args:
        error: the error.
        full: whether to print the traceback (HYDRA_FULL_ERROR).
        usage: whether nothing had been started when the error was raised.

    Returns:
        The exit code, and the text; None: a signal, which is no error.
    """
    if not isinstance(error, Exception):
        return (error if isinstance(error, SignalReceived) else SignalReceived()).report(), None
    if full and not isinstance(error, ExpError):
        traceback.print_exception(type(error), error, error.__traceback__)
    exp_error = explain_error(error) if is_composition_error(error) else as_exp_error(error, usage=usage)
    message = exp_error or format_user_error(error)
    if message is None:
        raise error
    console.error(str(message))
    if exp_error is None:
        print(user_traceback(error), end="", file=sys.stderr)  # noqa: T201
    return EXIT_FAILED if exp_error is None else exp_error.exit_code, str(message)
