"""Hydra's launcher for ``-m``.

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

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the sweep and its folder, before Hydra writes there."""
        from exp.config.resolve import check_path_part, user
        from exp.sweep.composing import Composer
        from exp.sweep.sweep import Sweep

        check_path_part("name", config.get("name"))  # Hydra makes the name of the sweep's folder from it
        composer: Any = Composer(hydra_context.config_loader)
        hydra_context.config_loader = composer  # the sweeper, too, composes all jobs, to check them
        user.sweep = Sweep(config, composer)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch and wait for its end; see :meth:`exp.sweep.sweep.Sweep.run`.

        Args:
            job_overrides: a list for each job.
            initial_job_idx: number of the first job.
        """
        from exp.config.resolve import user

        setup_globals()
        metrics = user.sweep.run(job_overrides, initial_job_idx)
        returns = [JobReturn(status=JobStatus.COMPLETED) for _ in metrics]
        for job_return, metric in zip(returns, metrics):
            job_return.return_value = metric
        return returns
