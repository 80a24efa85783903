"""The launcher of Hydra's for ``-m``.

Only a Hydra launcher receives all jobs of a batch at once. It freezes them first, so that later edits of files do not
change jobs that still wait: see :mod:`exp.sweep`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

__all__ = ["ExpLauncher"]


class ExpLauncher(Launcher):
    """The Hydra launcher, which runs jobs through :mod:`exp.sweep`."""

    def __init__(self) -> None:
        self._config: Any = None
        self._context: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the sweep and its folder, and keep the context for composing the jobs."""
        from exp import sweep
        from exp.config.resolve import check_path_part
        from exp.sweep.composing import Composer

        check_path_part("name", config.get("name"))  # Hydra makes the name of the sweep's folder from it
        self._config, self._context = config, hydra_context
        if not isinstance(hydra_context.config_loader, Composer):  # the sweeper, too, composes all jobs, to check them
            hydra_context.config_loader = Composer(hydra_context.config_loader)
        sweep.begin(config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch and wait for its end; see :meth:`exp.sweep.Sweep.run`.

        Args:
            job_overrides: a list for each job.
            initial_job_idx: number of the first job.
        """
        from exp import sweep

        setup_globals()
        loader = self._context.config_loader
        metrics = sweep.begin(self._config).run(job_overrides, initial_job_idx, loader)
        returns = [JobReturn(status=JobStatus.COMPLETED) for _ in metrics]
        for each, metric in zip(returns, metrics):
            each.return_value = metric
        return returns
