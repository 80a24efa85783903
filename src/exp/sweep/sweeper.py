"""What lies between a sweep and whoever asks for its jobs: Hydra's basic sweeper, Optuna's, or any other."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, Sequence

from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import ListConfig, OmegaConf

from exp.config.compose import refuse_empty
from exp.errors import ConfigError, RunError

if TYPE_CHECKING:
    from exp.report.runs import Run

__all__ = ["NoMetric", "check_direction", "check_settings", "explained"]


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
        ConfigError: the folder is empty, or jobs are to lie elsewhere.
    """
    refuse_empty("output_dir", config.get("output_dir"))
    refuse_empty("hydra.sweep.dir", config.hydra.sweep.dir)
    written: Any = OmegaConf.to_container(config.hydra.sweep)
    if written["subdir"] != "${hydra.job.num}":
        raise ConfigError(
            "hydra.sweep.subdir is not for sweeps of exp, whose jobs lie in <output_dir>/0, 1, 2, ...; leave it out "
            "(sweep.csv tells which is which)"
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
    for run in runs:
        greater = bool(run.result.get("greater_is_better"))
        right = "maximize" if greater else "minimize"
        if run.metric is not None and direction in ("minimize", "maximize") and direction != right:
            raise ConfigError(
                f"hydra.sweeper.direction={direction} looks for the worst {run.metric_name}, of which "
                f"{'larger' if greater else 'smaller'} is better; set hydra.sweeper.direction={right}"
            )


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
