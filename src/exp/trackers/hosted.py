"""What trackers on a vendor's servers share, whose clients queue what they are given and work offline, too."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Sequence

from exp.trackers.base import TrackedRun, Tracker

__all__ = ["HostedTracker"]


class HostedTracker(Tracker):
    """A run for each run; those of a sweep are a group.

    Args:
        project: its name; None: the experiment's.
        owner: user, team or organisation; None: the user's default.
        mode: of the client; None: what its variable says, else ``online`` where there is a key, and ``offline``.
        tags: of the run.
    """

    confirms: ClassVar[bool] = False  # the client queues what it is given
    mode_variable: ClassVar[str]

    def __init__(self, project: str | None, owner: str | None, mode: str | None, tags: Sequence[str]) -> None:
        self.project, self.owner, self.mode, self.tags = project, owner, mode, list(tags)
        self._run: Any = None
        self._address = ""

    @property
    def address(self) -> str:
        """Of the run's page; offline, the command that sends it."""
        return self._address

    def has_key(self) -> bool:
        """Whether there is a key, without asking for one."""
        raise NotImplementedError

    def chosen_mode(self) -> str:
        """Of the client."""
        return self.mode or os.environ.get(self.mode_variable) or ("online" if self.has_key() else "offline")

    def tags_of(self, run: TrackedRun) -> list[str]:
        """The user's, backend and task."""
        return [*self.tags, *(run.facts[key] for key in ("backend", "task") if key in run.facts)]
