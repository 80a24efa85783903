"""The logger interface: where the figures of a run go beside ``metrics.jsonl``."""

from __future__ import annotations

import abc
from typing import Any

from mmengine.visualization.vis_backend import BaseVisBackend

__all__ = ["Logger"]


class Logger(BaseVisBackend):
    """A place for figures. One of MMEngine's visualisation backends, with the one method that exp calls.

    A configuration names it in ``logger.vis_backends`` by ``_target_``; the other keys there are its constructor's
    arguments. It is made on rank 0 alone, before the first step. MMEngine's own, and others of its registry, are named
    by ``type``; whatever inherits ``BaseVisBackend`` will do.

    Args:
        save_dir: a folder for what it writes; None: it needs none.
    """

    def __init__(self, save_dir: str | None = None) -> None:
        super().__init__(save_dir)

    @abc.abstractmethod
    def log(self, values: dict[str, float], step: int) -> None:
        """Take in figures; what it raises ends the run.

        Args:
            values: by name, such as ``train/loss``, ``val/mse``, ``test/mse``: a loss every ``log_every`` steps, the
                metrics after each validation and after the test.
            step: optimizer steps completed.
        """

    def close(self) -> None:
        """The run has ended."""

    def _init_env(self) -> None:
        """MMEngine's call before the first figure: constructors do it here."""

    @property
    def experiment(self) -> Any:
        """What MMEngine hands to hooks that ask for the object behind: this one."""
        return self

    def add_scalars(self, scalar_dict: dict[str, Any], step: int = 0, file_path: str | None = None, **_: Any) -> None:
        """MMEngine's call for :meth:`log`."""
        self.log({name: float(value) for name, value in scalar_dict.items()}, step)

    def add_scalar(self, name: str, value: Any, step: int = 0, **_: Any) -> None:
        """One figure, of a hook of MMEngine's."""
        self.log({name: float(value)}, step)
