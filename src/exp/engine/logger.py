"""The interface of loggers, which receive losses and metrics in addition to ``metrics.jsonl``."""

from __future__ import annotations

import abc
from typing import Any

from mmengine.visualization.vis_backend import BaseVisBackend

__all__ = ["Logger"]


class Logger(BaseVisBackend):
    """A visualization backend of MMEngine, reduced to :meth:`log`. A subclass receives losses and metrics.

    A configuration names the subclass by ``_target_`` in ``logger.vis_backends``; the other keys there are arguments of
    its constructor. It is made on rank 0 only, before the first step. Backends in MMEngine's registry are named by
    ``type``. Any subclass of ``BaseVisBackend`` can be used.

    Args:
        save_dir: folder for its files; None: it writes none.
    """

    def __init__(self, save_dir: str | None = None) -> None:
        super().__init__(save_dir)

    @abc.abstractmethod
    def log(self, values: dict[str, float], step: int) -> None:
        """Log values; an error ends the run.

        Args:
            values: values by name, such as ``train/loss``, ``val/mse`` or ``test/mse``: losses every ``log_every``
                steps, and metrics after each validation and after the test.
            step: number of completed optimizer steps.
        """

    def close(self) -> None:
        """Called at the end of the run."""

    def _init_env(self) -> None:
        """Do nothing; MMEngine calls it before the first value, but a subclass of this class uses its constructor."""

    @property
    def experiment(self) -> Any:
        """This object; MMEngine's hooks ask for it."""
        return self

    def add_scalars(self, scalar_dict: dict[str, Any], step: int = 0, file_path: str | None = None, **_: Any) -> None:
        """Called by MMEngine; calls :meth:`log`."""
        self.log({name: float(value) for name, value in scalar_dict.items()}, step)

    def add_scalar(self, name: str, value: Any, step: int = 0, **_: Any) -> None:
        """Called by hooks of MMEngine; calls :meth:`log` with one value."""
        self.log({name: float(value)}, step)
