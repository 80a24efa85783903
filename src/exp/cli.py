"""The command line: parse, freeze, launch, report.

Nothing here imports torch: help, completion, ``--cfg`` and every configuration error answer at once, and the parent of
a distributed run never holds a device.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from exp import __version__, console
from exp.config import compose, explain
from exp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    REFUSED,
    ConfigError,
    Ended,
    ExpError,
    as_ours,
    frames_of,
    told,
)
from exp.frozen import Finished, freeze, remember
from exp.launcher.base import launcher_class
from exp.launcher.rank import be_quiet, drop_stale_variables
from exp.runs.files import UMASK
from exp.runs.folder import RunFolder, remove_empty
from exp.task import ParentTask, create_task, task_class
from hydra_plugins.exp_sweeps import ExpLauncher, PluginConfigs

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["Left", "left", "main"]

_OVERRIDE = re.compile(r"~|[^-].*=")
_MODES = ("--multirun", "-m", "--run", "-r", "--cfg", "-c", "--info", "-i")
"""Hydra's options of which it takes one."""


@dataclass
class Left:
    """What a command line has left, for whoever started it from Python."""

    runs: list[Path] = field(default_factory=list)
    """Run folders: its own, those of a sweep, or those that it reported on."""
    several: bool = False
    """They are to be seen as a table, even if there is only one."""


left = Left()


def main() -> int:
    """Run the command line in ``sys.argv``; returns the exit code (docs/concepts/run.md)."""
    os.umask(UMASK)
    finished: list[Finished] = []
    wanted = os.environ.get("HYDRA_FULL_ERROR", "")  # tracebacks
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them and exiting with 1
    try:
        arguments = _parse(sys.argv[1:])
        if arguments is not None:
            _compose_and_run(arguments, finished, bool(wanted))
        sys.stdout.flush()
    except BrokenPipeError:  # of --help or --cfg: whoever read it has seen enough
        console.write_nowhere(sys.stdout)
    except Exception as error:  # noqa: BLE001 - raised again where nobody can tell
        explained = _of_sweeper(error)
        _finish_sweep(finished)
        if explained is not None:
            finished = [Finished(_report(explained, bool(wanted), usage=True))]
    except KeyboardInterrupt as interrupt:
        by = _finish_sweep(finished)
        if isinstance(interrupt, Ended):
            code = interrupt.tell()
        else:
            code = 128 + signal.SIGINT
            console.error(f"interrupted by {by}" if by else "interrupted")
        return max([code, *(each.exit_code for each in finished if each.exit_code > 128)])
    finally:
        os.environ["HYDRA_FULL_ERROR"] = wanted
    _finish_sweep(finished)
    return max((each.exit_code for each in finished), default=EXIT_OK)


def _parse(arguments: list[str]) -> list[str] | None:
    """What Hydra is to read; None: the answer is printed already."""
    if "--version" in arguments:  # Hydra's would tell Hydra's
        print(f"exp {__version__}")  # noqa: T201
        return None
    # Options first: argparse, and so Hydra, refuses overrides on both sides of one (``seed=1,2 -m max_steps=5``).
    arguments = sorted(arguments, key=lambda each: _OVERRIDE.match(each) is not None)
    given = [each for each in arguments if each.partition("=")[0] in _MODES]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other; leave one out")
    be_quiet(arguments)
    remember(arguments)
    compose.register()
    for plugin in (ExpLauncher, PluginConfigs):  # found by themselves where exp is installed, but not in a checkout
        Plugins.instance().register(plugin)
    if {"--help", "-h"} & {*arguments}:
        print(explain.help_text(arguments))  # noqa: T201
        return None
    return compose.expand_arguments(arguments)


def _compose_and_run(arguments: list[str], finished: list[Finished], full: bool) -> None:
    """Have Hydra compose the configuration, and run its one job, or those of a sweep (:mod:`exp.sweep`)."""

    def job(config: ExpConfig) -> None:
        try:
            finished.append(_run(config, list(HydraConfig.get().overrides.task), full))
        except Exception as error:  # noqa: BLE001 - reported here: Hydra would print a line of its own
            finished.append(Finished(_report(error, full)))

    base = compose.begin(arguments)
    sys.argv[1:] = base.overrides
    hydra.main(version_base="1.3", config_path="pkg://exp.conf", config_name=base.primary)(job)()
    sweep = _sweep()
    if sweep is not None:
        sweep.require_jobs()


def _run(config: ExpConfig, overrides: list[str], full: bool) -> Finished:
    """Freeze, launch, and note what runs there are now."""
    of_hydra = Path(HydraConfig.get().runtime.output_dir)
    if of_hydra != Path.cwd():
        remove_empty([of_hydra])
        raise ConfigError(f"hydra.run.dir={of_hydra}: the run folder is set with output_dir")
    compose.refuse_empty("output_dir", config.output_dir)
    if issubclass(task_class(config), ParentTask):
        Ended.begun = True
        finished = cast(ParentTask, create_task(config)).run_in_parent(config, overrides)
        folder = RunFolder(config.output_dir)
    else:
        launcher = launcher_class(config)
        launcher.take_place(config, overrides)
        run = freeze(config, overrides, Path(config.output_dir))
        if not launcher.joins:
            drop_stale_variables(config.launcher.nnodes)
        folder = run.folder
        try:
            finished = run.execute()
            if finished.exit_code in REFUSED:  # be it by a worker: it leaves no folder
                for file in sorted(folder.logs.glob("rank*.error.json")) if full else ():  # tracebacks are there alone
                    log = file.with_name(file.name.replace(".error.json", ".log"))
                    print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)  # noqa: T201
                if not run.take_back():
                    print(f"  run folder: {console.shown(folder.path)}", file=sys.stderr)  # noqa: T201
        except (ExpError, KeyboardInterrupt) as error:
            if error.exit_code in REFUSED if isinstance(error, ExpError) else not Ended.begun:
                run.take_back()
            raise
        finally:
            run.release()
    if finished.runs:
        left.runs, left.several = [*finished.runs], True
    elif folder.config.is_file():
        left.runs.append(folder.path)
    return finished


def _report(error: Exception, full: bool, usage: bool = False) -> int:
    """Say on stderr what has ended a command; what nobody foresees is raised again, with its traceback.

    Args:
        error: as it was caught.
        full: the user wants tracebacks.
        usage: nothing had been started when it was raised.

    Returns:
        The exit code.
    """
    if full and not isinstance(error, ExpError):
        traceback.print_exception(type(error), error, error.__traceback__)
    if explain.is_of_composition(error):
        console.error(explain.explain(error, explain.default_keys(sys.argv[1:])))
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


def _of_sweeper(error: Exception) -> Exception | None:
    """An error, as one of ours if a sweeper has raised it, such as Optuna's where no trial has come to a value.

    Returns:
        None where it only misses the results of a sweep that is shown, and not run.
    """
    sweep = _sweep()
    if sweep is None or isinstance(error, (ExpError, HydraException, OmegaConfBaseException)):
        return error
    explained: Exception | None = sweep.explained(error)
    return explained


def _finish_sweep(finished: list[Finished]) -> str | None:
    """The end of a sweep, where there was one; returns the name of the signal that ended it."""
    sweep = _sweep()
    if sweep is None:
        return None
    code, number, runs = sweep.finish()
    finished.append(Finished(code))
    left.runs, left.several = [*left.runs, *runs], True
    name: str | None = number
    return name


def _sweep() -> Any:
    """The module of sweeps where this command line is one: Hydra's launcher has imported it."""
    return sys.modules.get("exp.sweep")
