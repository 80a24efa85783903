"""What Hydra calls for ``-m``: only a launcher of its own sees all the jobs of a batch at once.

It freezes them, so that nothing that is edited while they wait changes them, and gives them to :mod:`exp.sweep`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher

from exp.runs.folder import missing_folders

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

__all__ = ["ExpLauncher"]


class ExpLauncher(Launcher):
    """Hydra's side of a sweep."""

    def __init__(self) -> None:
        self._config: Any = None
        self._context: Any = None
        self._missing: list[Path] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what the jobs' configurations are composed from."""
        from exp import sweep
        from exp.config.resolve import check_path_part
        from exp.sweep.composing import Composer
        from exp.sweep.sweeper import check_settings

        check_path_part("name", config.get("name"))  # of which Hydra makes the sweep's folder next
        check_settings(config)
        sweep.expected[:] = [" ".join(config.hydra.overrides.task)]
        self._config, self._context = config, hydra_context
        if not isinstance(hydra_context.config_loader, Composer):  # the sweeper composes all jobs, too, to check them
            hydra_context.config_loader = Composer(hydra_context.config_loader)
        self._missing = missing_folders(Path(str(config.hydra.sweep.dir)).absolute())
        sweep.current(config, self._missing)  # takes the folder, before Hydra writes there

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch to its end.

        Args:
            job_overrides: of each job.
            initial_job_idx: number of the first.

        Returns:
            The metric of each; :class:`exp.sweep.sweeper.NoMetric` for one that failed.

        Raises:
            ExpError: nothing of it can be run, or it searches in the wrong direction.
        """
        from exp import sweep
        from exp.sweep.sweeper import NoMetric, check_direction

        setup_globals()
        if not job_overrides:
            sweep.refuse_empty()
        sweep.expected.clear()
        current = sweep.current(self._config, self._missing)
        overrides, loader = list(map(list, job_overrides)), self._context.config_loader
        batch = current.freeze(overrides, initial_job_idx, loader, self._config)
        current.run_batch(batch)
        check_direction(self._config, current.runs)
        returns = []
        for metric in [job.metric for job in batch]:
            returns.append(JobReturn(status=JobStatus.COMPLETED))
            returns[-1].return_value = NoMetric() if metric is None or math.isnan(metric) else metric
        return returns
