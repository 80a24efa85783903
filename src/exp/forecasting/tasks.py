"""task=backtest and task=calibrate: the keys, and what the parent checks. Imports neither torch nor pandas."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Dict, List, Optional

from omegaconf import OmegaConf

from exp.config.compose import check_weights_exist
from exp.config.resolve import check_target
from exp.errors import ConfigError
from exp.forecasting.keys import ForecastingDataConfig, IntervalKeys
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.session import Session


@dataclass
class Backtest(IntervalKeys, Task):
    """task=backtest: forecast the same windows with several models and baselines, and compare their errors."""

    _target_: str = "exp.forecasting.tasks.Backtest"
    name: str = "backtest"
    windows: Optional[int] = None
    """Number of windows of each series, from the last of the test split backwards; null: all."""
    step: Optional[int] = None
    """Rows between the origins of two windows; null: ``data.horizon``, so that no row is forecast twice."""
    refit: Optional[int] = None
    """After so many origins, runs train again on the rows before, and peers fit again; null: never."""
    runs: Dict[str, str] = field(default_factory=dict)
    """Further runs, beside that of ``init_from``: name -> run folder."""
    peers: Dict[str, Any] = field(default_factory=dict)
    """Models of other libraries: name -> {_target_: <a subclass of exp.forecasting.peers.Peer>, <its arguments>}."""

    needs_weights: ClassVar[bool] = True

    def check(self, config: ExpConfig) -> None:
        """Check the keys, and make the paths of runs absolute.

        Raises:
            ConfigError: a value is out of range, a run does not exist, or the data are no series.
        """
        if not issubclass(OmegaConf.get_type(config.data) or object, ForecastingDataConfig):
            raise ConfigError("task=backtest is for series; data of another kind have task=eval", key="task")
        for key in ("windows", "step", "refit"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"task.{key}={value} must be at least 1", key=f"task.{key}")
        for name, folder in self.runs.items():
            check_weights_exist(folder, f"task.runs.{name}")
            config.task.runs[name] = os.path.abspath(os.path.expanduser(folder))  # noqa: PTH100, PTH111 - keeps links
        for name, keys in self.peers.items():
            check_target(f"task.peers.{name}._target_", str((keys or {}).get("_target_")))

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.forecasting.backtest.backtest`."""
        from exp.forecasting.backtest import backtest

        return backtest(session)


@dataclass
class Calibrate(IntervalKeys, Task):
    """task=calibrate: write weights with the corrections of intervals, which then need no validation split."""

    _target_: str = "exp.forecasting.tasks.Calibrate"
    name: str = "calibrate"
    intervals: Optional[List[float]] = field(default_factory=lambda: [0.5, 0.8, 0.9, 0.95])
    """Coverages of the intervals that the weights will give."""

    needs_weights: ClassVar[bool] = True
    has_comparable_result: ClassVar[bool] = False

    def check(self, config: ExpConfig) -> None:
        """Refuse to calibrate no interval, and to correct nothing."""
        if not self.intervals or self.intervals_calibrate is False:
            raise ConfigError("task=calibrate needs task.intervals, and no task.intervals_calibrate=false")
        if config.init_from is None:
            raise ConfigError("task=calibrate needs the weights of a run: init_from=<run folder>", key="init_from")

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.forecasting.calibration.write_calibrated`."""
        from exp.forecasting.calibration import write_calibrated

        return write_calibrated(session)
