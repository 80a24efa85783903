"""The command line: compose and validate once, write the run folder, launch, report.

Nothing here imports torch: help, completion, ``--cfg`` and every configuration error answer at once, and the parent of
a distributed run never holds a device.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Iterator

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from exp import __version__, console, early
from exp.advice import remember
from exp.config import choices, explain, fields, paths, structures, trained
from exp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, REFUSED, ConfigError, ExpError, RunError
from exp.execute import execute
from exp.footprint import remove_empty
from exp.freezing import freeze
from exp.launcher.base import launcher_class
from exp.launcher.rank_environment import be_quiet, drop_stale_variables
from exp.raised import frames_of, told
from exp.runfolder import UMASK, RunFolder
from exp.system_errors import as_ours
from exp.task import create_task, task_class
from hydra_plugins.exp_plugins import PluginConfigs
from hydra_plugins.exp_sweeps import ExpLauncher

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.frozen import FrozenRun
    from exp.summary import Finished

__all__ = ["Left", "left", "main"]

_TAKE_A_VALUE = (
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
    "--experimental-rerun",
)  # fmt: skip
"""Hydra's options that are followed by a word."""
_MODES = (("--multirun", "-m"), ("--run", "-r"), ("--cfg", "-c"), ("--info", "-i"))
"""Hydra's options of which it takes one."""
_exit_codes: list[int] = []
_full_error: list[bool] = []
"""Not empty: the user wants tracebacks."""


@dataclass
class Left:
    """What a command line has left, for whoever started it from Python."""

    runs: list[Path] = field(default_factory=list)
    """Run folders: its own, those of a sweep, or those that it reported on."""
    several: bool = False
    """They are to be seen as a table, even if there is only one."""


left = Left()


def main() -> int:
    """Run the command line in ``sys.argv``; returns the exit code (docs/exit-codes.md)."""
    code = EXIT_OK
    try:
        code = _main()
        sys.stdout.flush()
    except BrokenPipeError:  # of --help or --cfg: whoever read it has seen enough
        console.write_nowhere(sys.stdout)
    return code


def _main() -> int:
    os.umask(UMASK)
    if "--version" in sys.argv[1:]:  # Hydra's would tell Hydra's
        print(f"exp {__version__}")  # noqa: T201
        return EXIT_OK
    sys.argv[1:] = _overrides_last(sys.argv[1:])
    be_quiet(sys.argv[1:])
    try:
        _check_usage(sys.argv[1:])
    except ConfigError as error:
        console.error(str(error))
        return EXIT_CONFIG
    remember(sys.argv[1:])
    structures.register()
    choices.register_resolvers()
    for plugin in (ExpLauncher, PluginConfigs):  # found by themselves where exp is installed, but not in a checkout
        Plugins.instance().register(plugin)
    _exit_codes.clear()
    _full_error[:] = [True] * bool(os.environ.get("HYDRA_FULL_ERROR"))
    try:
        if choices.wants_help(sys.argv[1:]):
            print(choices.help_text(sys.argv[1:]))  # noqa: T201
            return EXIT_OK
        sys.argv[1:] = paths.expand_arguments(sys.argv[1:])
        sys.argv[1:] = fields.admit(sys.argv[1:])
        primary, sys.argv[1:] = trained.begin(sys.argv[1:])
        with _errors_reach_us(), _told_of_sweepers():
            hydra.main(version_base="1.3", config_path="pkg://exp.conf", config_name=primary)(_job)()
        if "exp.sweep" in sys.modules:
            from exp import sweep

            sweep.refuse_empty()
        _finish_sweep()
    except (HydraException, OmegaConfBaseException) as error:
        _finish_sweep()
        if _full_error:
            traceback.print_exc()
        console.error(explain.explain(error, choices.default_keys(sys.argv[1:])))
        return EXIT_CONFIG
    except ExpError as error:
        _finish_sweep()
        console.error(str(error))
        return error.exit_code
    except BrokenPipeError:
        raise
    except (OSError, MemoryError, ImportError) as error:
        _finish_sweep()
        ours = as_ours(error, usage=True)
        if ours is None or _full_error:
            traceback.print_exc()
        console.error(str(ours or f"{type(error).__name__}: {error}"))
        return EXIT_FAILED if ours is None else ours.exit_code
    except Exception as error:
        if not _tell_of_user(error):
            raise
        _finish_sweep()
        return EXIT_FAILED
    except KeyboardInterrupt as interrupt:
        code = early.tell(interrupt, _finish_sweep())
        return max([code, *(code for code in _exit_codes if code > 128)])  # a sweep may not have begun any job
    return max(_exit_codes, default=EXIT_OK)


def _tell_of_user(error: Exception, job: str = "") -> bool:
    """Report an error of the user's code: a line that names it, and its traceback; False: it is none."""
    of_user = None if _full_error else told(error)
    if of_user is not None:
        console.error(job + of_user)
        print(frames_of(error), end="", file=sys.stderr)  # noqa: T201
    return of_user is not None


def _check_usage(arguments: list[str]) -> None:
    """Refuse what would end in a traceback.

    Raises:
        ConfigError: the current folder was deleted, or two options exclude each other.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted; change to another one") from None
    given = [each for each in arguments if any(each.partition("=")[0] in mode for mode in _MODES)]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other; leave one out")


def _overrides_last(arguments: list[str]) -> list[str]:
    """Options first: argparse, and so Hydra, refuses overrides on both sides of one (``seed=1,2 -m max_steps=5``)."""
    options: list[str] = []
    overrides: list[str] = []
    for before, argument in zip(["", *arguments], arguments):
        is_override = argument.startswith("~") or ("=" in argument and not argument.startswith("-"))
        (overrides if is_override and before not in _TAKE_A_VALUE else options).append(argument)
    return [*options, *overrides]


def _finish_sweep() -> str | None:
    """The end of a sweep, where there was one; returns the name of the signal that ended it."""
    if "exp.sweep" not in sys.modules:
        return None
    from exp import sweep

    code, number, runs = sweep.finish()
    _exit_codes.append(code)
    left.runs, left.several = [*left.runs, *runs], True
    return number


@contextlib.contextmanager
def _errors_reach_us() -> Iterator[None]:
    """Have Hydra raise its errors instead of printing them and exiting with 1: the switch that it offers for it."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


@contextlib.contextmanager
def _told_of_sweepers() -> Iterator[None]:
    """One line for what a sweeper raises, such as Optuna's where no trial has come to a value."""
    try:
        yield
    except (ExpError, HydraException, OmegaConfBaseException, OSError, MemoryError, ImportError):
        raise  # which are explained
    except Exception as error:
        if "exp.sweep" not in sys.modules:
            raise
        from exp import sweep
        from exp.sweep.sweeper import sweeper_of

        if sweep.is_dry():
            return  # it misses the results
        sweeper = sweeper_of(error)
        if sweeper is None:
            raise
        if _full_error:
            traceback.print_exc()
        kind = ConfigError if sweep.expected else RunError  # before any job it can only be what it was given
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise kind(f"{sweeper} has ended the sweep: {said}; see hydra.sweeper.*") from error


def _job(config: ExpConfig) -> float | None:
    """One job of Hydra's: the run, or one of a sweep's."""
    state = HydraConfig.get()
    of_hydra = Path(state.runtime.output_dir)  # the current folder, unless the user asks Hydra for another one
    try:
        paths.refuse_empty({"output_dir": config.output_dir})
        if task_class(config).in_parent:
            early.begin()
            finished = create_task(config).run_in_parent(config, list(state.overrides.task))
            _exit_codes.append(finished.exit_code)
            _leave(config.output_dir, finished)
            return finished.metric
        folder = Path(config.output_dir) if of_hydra == Path.cwd() else of_hydra
        launcher = launcher_class(config)
        launcher.take_place(config, list(state.overrides.task))
        run = freeze(config, list(state.overrides.task), folder)
        if not launcher.joins:
            drop_stale_variables(config.launcher.nnodes)
        finished = _execute(run)
        _leave(run.folder.path, finished)
    except Exception as error:
        # Told here, not raised: Hydra would print a line of its own, and end the sweep that this job is part of.
        job = f"job {' '.join(state.overrides.task)}: " if state.mode == RunMode.MULTIRUN else ""
        ours = as_ours(error)
        if isinstance(error, OmegaConfBaseException):
            console.error(job + explain.explain(error, []))
            _exit_codes.append(EXIT_CONFIG)
        elif ours is None:
            if not _tell_of_user(error, job):
                raise
            _exit_codes.append(EXIT_FAILED)
        else:
            if ours is not error and _full_error:
                traceback.print_exc()
            console.error(job + str(ours))
            _exit_codes.append(ours.exit_code)
        if of_hydra != Path.cwd():
            remove_empty([of_hydra])
        return float("nan")
    _exit_codes.append(finished.exit_code)
    if finished.interrupted_by is not None and state.mode == RunMode.MULTIRUN:
        raise KeyboardInterrupt  # it was meant for the sweep, not only for this job of it
    return finished.metric


def _leave(folder: str | Path, finished: Finished) -> None:
    """Note what runs there are now."""
    if finished.runs:
        left.runs, left.several = [*finished.runs], True
    elif RunFolder(folder).config.is_file():
        left.runs.append(RunFolder(folder).path)


def _execute(run: FrozenRun) -> Finished:
    """Run it; one that is refused, be it by a worker, leaves no folder."""
    try:
        finished = execute(run)
        if finished.exit_code in REFUSED:
            if _full_error:
                _show_logs(run)
            if not run.take_back():
                print(f"  run folder: {console.shown(run.folder.path)}", file=sys.stderr)  # noqa: T201
    except ExpError as error:
        if error.exit_code in REFUSED:
            run.take_back()
        raise
    except KeyboardInterrupt:
        if not early.has_begun():
            run.take_back()
        raise
    finally:
        run.release()
    return finished


def _show_logs(run: FrozenRun) -> None:
    """What the ranks that failed have written: their tracebacks are there, and nowhere else."""
    for file in sorted(run.folder.logs.glob("rank*.error.json")):
        log = file.with_name(file.name.replace(".error.json", ".log"))
        if log.is_file():
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)  # noqa: T201
