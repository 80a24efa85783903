"""What lies between a sweep and whoever asks for its jobs: Hydra's basic sweeper, Optuna's, or any other."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import ListConfig, OmegaConf

from exp.config.paths import refuse_empty
from exp.errors import ConfigError, ExpError, RunError
from exp.task import task_class

if TYPE_CHECKING:
    from exp.launcher.outcome import Outcome
    from exp.report.runs import Run

__all__ = [
    "NoMetric", "all_refused", "check_direction", "check_settings", "explained", "no_job", "other_folder",
    "refuse_without_run",
]  # fmt: skip


class NoMetric(float):
    """The metric of a job that has none: nan in any calculation, and no number to whoever asks ``float(...)``.

    Nevergrad and Ax take a nan for a failed job. Optuna's sweeper has a trial fail whose value is no number, and
    raises, for the whole search, at one that is nan.
    """

    def __new__(cls) -> NoMetric:
        """It has no arguments."""
        return super().__new__(cls, "nan")

    def __float__(self) -> float:
        """Raise ValueError."""
        raise ValueError("the job has no metric")


def check_settings(config: Any) -> None:
    """Refuse what Hydra offers and a sweep does not do.

    Args:
        config: composed for the whole sweep, Hydra's part included.

    Raises:
        ConfigError: the folder is empty, jobs are to lie elsewhere, or several metrics are to be searched for.
    """
    refuse_empty({"output_dir": config.get("output_dir"), "hydra.sweep.dir": config.hydra.sweep.dir})
    written: Any = OmegaConf.to_container(config.hydra.sweep)
    if written["subdir"] != "${hydra.job.num}":
        raise ConfigError(
            "hydra.sweep.subdir is not for sweeps of exp, whose jobs lie in <output_dir>/0, 1, 2, ...; leave it out "
            "(sweep.csv tells which is which)"
        )
    directions = config.hydra.sweeper.get("direction")
    if isinstance(directions, ListConfig) and len(directions) > 1:
        raise ConfigError(
            f"hydra.sweeper.direction names {len(directions)} directions, and a job has one metric that sweeps are "
            "judged by; give one, and metric=<name>"
        )


def check_direction(config: Any, runs: Sequence[Run]) -> None:
    """Whether a sweeper looks for the end of the metric that is the good one.

    Args:
        config: composed for the whole sweep, Hydra's part included.
        runs: those that there are so far.

    Raises:
        ConfigError: it looks for the other one.
    """
    direction = config.hydra.sweeper.get("direction")
    direction = direction[0] if isinstance(direction, ListConfig) and direction else direction
    direction = getattr(direction, "name", direction)  # of an enumeration
    metrics = {run.metric_name: bool(run.result.get("greater_is_better")) for run in runs if run.metric is not None}
    for name, greater in metrics.items():
        right = "maximize" if greater else "minimize"
        if direction in ("minimize", "maximize") and direction != right:
            raise ConfigError(
                f"hydra.sweeper.direction={direction} looks for the worst {name}, of which "
                f"{'larger' if greater else 'smaller'} is better; set hydra.sweeper.direction={right}"
            )


def refuse_without_run(config: Any) -> None:
    """Refuse a task that starts no run, and so can be no job.

    Args:
        config: of a job.

    Raises:
        ConfigError: it is one of those.
    """
    if task_class(config).in_parent:
        several = "" if config.get("run") is None else ", and several runs as 'run=[a,b]'"
        raise ConfigError(f"task={config.task.name} is no job of a sweep: start it without -m{several}")


def all_refused(refused: Sequence[Outcome]) -> ExpError:
    """One error for a batch of which no job can run; what is said of all of them is said once."""
    said = list(dict.fromkeys(outcome.detail or "" for outcome in refused))
    error = ExpError("\n".join(said))
    error.exit_code = max(outcome.exit_code for outcome in refused)
    return error


def other_folder(override: str) -> ConfigError:
    """Of a job whose ``output_dir``, as this override has it, is not that of the sweep."""
    return ConfigError(
        f"{override}: output_dir is the folder of the whole sweep, in which each job gets one of its own; it cannot "
        "differ between jobs. Sweep other keys, or start a sweep for each folder"
    )


def no_job(overrides: Sequence[str], loader: Any) -> ConfigError:
    """Of a sweep that has no job: why.

    Args:
        overrides: of the command line.
        loader: Hydra's, of configurations.
    """
    for override in OverridesParser.create(config_loader=loader).parse_overrides(list(overrides)):
        if override.is_discrete_sweep() and next(iter(override.sweep_iterator()), None) is None:
            why = f"{override.input_line} stands for no value"
            if "=glob(" in str(override.input_line):
                why = (
                    f"{override.input_line} matches nothing: glob() is for the choices of a config group, as in "
                    "model=glob(*), not for files; list those, with commas between them"
                )
            return ConfigError(f"the sweep has no job: {why}")
    return ConfigError("the sweep has no job: the sweeper has not asked for any (hydra.sweeper.* says how many)")


def explained(error: Exception, asked: bool) -> Exception:
    """An error that a sweeper raised, such as Optuna's where no trial has come to a value, as one of ours.

    Args:
        error: any.
        asked: whether the sweeper has asked for a job; before that, only its settings can be wrong.

    Returns:
        ``error`` itself where that was something else, such as what runs the jobs.
    """
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = next((type(each).__name__ for each in callers if isinstance(each, Sweeper)), None)
    if name is None or any(isinstance(each, Launcher) for each in callers):
        return error
    kind = RunError if asked else ConfigError
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return kind(f"{name} has ended the sweep: {said}; see hydra.sweeper.*")
