"""task=calibrate: the keys. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, List, Optional

from exp.errors import ConfigError
from exp.forecasting.keys import IntervalKeys
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.session import Session


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
