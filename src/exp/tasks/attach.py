"""task=attach: follow a submitted job to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.summary import Finished

__all__ = ["Attach"]


@dataclass
class Attach(Task):
    """Follows a job."""

    _target_: str = "exp.tasks.attach.Attach"
    name: str = "attach"
    run: Any = None
    """The run folder of a submitted job."""

    in_parent: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> Finished:
        """See :func:`exp.launcher.follow.attach`."""
        from exp.launcher.follow import attach

        return attach(config)
