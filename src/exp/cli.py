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
from typing import TYPE_CHECKING, Iterator, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from exp import __version__, console, early
from exp.config import choices, explain, paths, structures, trained
from exp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, REFUSED, ConfigError, ExpError, as_ours
from exp.execute import execute
from exp.freezing import freeze
from exp.launcher.base import launcher_class
from exp.launcher.rank import be_quiet, drop_stale_variables
from exp.runs.files import UMASK
from exp.runs.folder import RunFolder
from exp.runs.snapshot import remove_empty
from exp.summary import Finished, remember
from exp.task import ParentTask, create_task, task_class
from exp.user_code import frames_of, told
from hydra_plugins.exp_plugins import PluginConfigs
from hydra_plugins.exp_sweeps import ExpLauncher

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.frozen import FrozenRun

__all__ = ["Left", "left", "main"]

_TAKE_A_VALUE = (
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
    "--experimental-rerun",
)  # fmt: skip
"""Hydra's options that are followed by a word."""
_MODES = (("--multirun", "-m"), ("--run", "-r"), ("--cfg", "-c"), ("--info", "-i"))
"""Hydra's options of which it takes one."""
_finished: list[Finished] = []
"""How the jobs of this command line have ended."""
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
    """Run the command line in ``sys.argv``; returns the exit code (docs/concepts/exit-codes.md)."""
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
    remember(sys.argv[1:])
    _finished.clear()
    _full_error[:] = [True] * bool(os.environ.get("HYDRA_FULL_ERROR"))
    try:
        _check_usage(sys.argv[1:])
        structures.register()
        choices.register_resolvers()
        for plugin in (ExpLauncher, PluginConfigs):  # found by themselves where exp is installed, but not in a checkout
            Plugins.instance().register(plugin)
        if choices.wants_help(sys.argv[1:]):
            print(choices.help_text(sys.argv[1:]))  # noqa: T201
            return EXIT_OK
        sys.argv[1:] = paths.expand_arguments(sys.argv[1:])
        primary, sys.argv[1:] = trained.begin(sys.argv[1:])
        with _errors_reach_us():
            hydra.main(version_base="1.3", config_path="pkg://exp.conf", config_name=primary)(_job)()
        if "exp.sweep" in sys.modules:
            from exp import sweep

            sweep.refuse_empty()
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - raised again where nobody can tell
        explained = _of_sweeper(error)
        _finish_sweep()
        if explained is not None:
            return _tell(explained, usage=True)
    except KeyboardInterrupt as interrupt:
        code = early.tell(interrupt, _finish_sweep())
        return max([code, *(each.exit_code for each in _finished if each.exit_code > 128)])
    _finish_sweep()
    return max((each.exit_code for each in _finished), default=EXIT_OK)


def _tell(error: Exception, usage: bool = False) -> int:
    """Say on stderr what has ended a command; what nobody foresees is raised again, with its traceback.

    Args:
        error: as it was caught.
        usage: nothing had been started when it was raised.

    Returns:
        The exit code.
    """
    if _full_error and not isinstance(error, ExpError):
        traceback.print_exception(type(error), error, error.__traceback__)
    if explain.is_of_composition(error):
        console.error(explain.explain(error, choices.default_keys(sys.argv[1:]) if usage else []))
        return EXIT_CONFIG
    ours = as_ours(error, usage=usage)
    if ours is not None:
        console.error(str(ours))
        return ours.exit_code
    of_user = told(error)
    if of_user is None:
        raise error
    console.error(of_user)
    print(frames_of(error), end="", file=sys.stderr)  # noqa: T201
    return EXIT_FAILED


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


def _of_sweeper(error: Exception) -> Exception | None:
    """An error, as one of ours if a sweeper has raised it, such as Optuna's where no trial has come to a value.

    Returns:
        None where it only misses the results of a sweep that is shown, and not run.
    """
    if "exp.sweep" not in sys.modules or isinstance(error, (ExpError, HydraException, OmegaConfBaseException)):
        return error
    from exp import sweep
    from exp.sweep.sweeper import explained

    return None if sweep.is_dry() else explained(error, asked=not sweep.expected)


def _finish_sweep() -> str | None:
    """The end of a sweep, where there was one; returns the name of the signal that ended it."""
    if "exp.sweep" not in sys.modules:
        return None
    from exp import sweep

    code, number, runs = sweep.finish()
    _finished.append(Finished(code))
    left.runs, left.several = [*left.runs, *runs], True
    return number


def _job(config: ExpConfig) -> None:
    """The one job of a command line; those of a sweep are :mod:`exp.sweep`'s."""
    overrides = list(HydraConfig.get().overrides.task)
    try:
        finished = _run(config, overrides)
    except Exception as error:  # noqa: BLE001 - told here, not raised: Hydra would print a line of its own
        finished = Finished(_tell(error))
    _finished.append(finished)


def _run(config: ExpConfig, overrides: list[str]) -> Finished:
    """Freeze, launch, and note what runs there are now."""
    of_hydra = Path(HydraConfig.get().runtime.output_dir)
    if of_hydra != Path.cwd():
        remove_empty([of_hydra])
        raise ConfigError(f"hydra.run.dir={of_hydra}: the run folder is set with output_dir")
    paths.refuse_empty({"output_dir": config.output_dir})
    if issubclass(task_class(config), ParentTask):
        early.begin()
        finished = cast(ParentTask, create_task(config)).run_in_parent(config, overrides)
        folder = RunFolder(config.output_dir)
    else:
        launcher = launcher_class(config)
        launcher.take_place(config, overrides)
        run = freeze(config, overrides, Path(config.output_dir))
        if not launcher.joins:
            drop_stale_variables(config.launcher.nnodes)
        finished = _execute(run)
        folder = run.folder
    if finished.runs:
        left.runs, left.several = [*finished.runs], True
    elif folder.config.is_file():
        left.runs.append(folder.path)
    return finished


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
