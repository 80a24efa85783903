"""What Hydra calls for ``-m``: only a launcher of its own sees all the jobs of a batch at once.

It freezes them, so that nothing that is edited while they wait changes them, and gives them to :mod:`exp.sweep`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict, read_write

from exp.footprint import missing_folders

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
        from exp.config.names import check_path_part

        check_path_part("name", config.get("name"))  # of which Hydra makes the sweep's folder next
        self._config, self._context = config, hydra_context
        self._missing = missing_folders(Path(str(config.hydra.sweep.dir)).absolute())

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch to its end.

        Args:
            job_overrides: of each job.
            initial_job_idx: number of the first.

        Returns:
            The metric of each; nan for one that failed.
        """
        from exp import sweep
        from exp.errors import ExpError
        from exp.sweep.records import remove_unused

        setup_globals()
        try:
            current = sweep.current(self._config, self._missing)
            for number, overrides in enumerate(job_overrides, initial_job_idx):
                current.add(number, lambda overrides=overrides, number=number: self._compose(overrides, number))
            metrics = current.run_batch()
        except ExpError:
            remove_unused(Path(str(self._config.hydra.sweep.dir)).absolute(), self._missing)
            raise
        returns = []
        for metric in metrics:
            job = JobReturn(status=JobStatus.COMPLETED)
            job.return_value = metric
            returns.append(job)
        return returns

    def _compose(self, overrides: Sequence[str], number: int) -> tuple[Any, list[str]]:
        """A job's configuration without Hydra's own part, and its overrides."""
        composed = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(number), number
        HydraConfig.instance().set_config(composed)
        config = copy.deepcopy(composed)
        with read_write(config), open_dict(config):
            del config["hydra"]
        return config, list(composed.hydra.overrides.task)
