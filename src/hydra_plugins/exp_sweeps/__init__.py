"""What Hydra calls for ``-m``: only a launcher of its own sees all the jobs of a batch at once.

It freezes them, so that nothing that is edited while they wait changes them: see :mod:`exp.sweep`.
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
    """Hydra's side of a sweep."""

    def __init__(self) -> None:
        self._config: Any = None
        self._context: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take the sweep's folder, and keep what the jobs' configurations are composed from."""
        from exp import sweep
        from exp.config.resolve import check_path_part
        from exp.sweep.composing import Composer

        check_path_part("name", config.get("name"))  # of which Hydra makes the sweep's folder next
        self._config, self._context = config, hydra_context
        if not isinstance(hydra_context.config_loader, Composer):  # the sweeper composes all jobs, too, to check them
            hydra_context.config_loader = Composer(hydra_context.config_loader)
        sweep.begin(config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch to its end; see :meth:`exp.sweep.Sweep.run`.

        Args:
            job_overrides: of each job.
            initial_job_idx: number of the first.
        """
        from exp import sweep

        setup_globals()
        loader = self._context.config_loader
        metrics = sweep.begin(self._config).run(job_overrides, initial_job_idx, loader)
        returns = [JobReturn(status=JobStatus.COMPLETED) for _ in metrics]
        for each, metric in zip(returns, metrics):
            each.return_value = metric
        return returns
