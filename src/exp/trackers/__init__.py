"""Trackers: where people look at a run beside its folder. Imports neither torch nor any tracker's client.

Rank 0 hands figures to each tracker in a thread of its own (:mod:`exp.trackers.reporting`), so that no step waits for
a server. A run that is over can be handed to a tracker, too (``task=track``).
"""

from __future__ import annotations

import abc
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, ClassVar, Mapping, Sequence

__all__ = ["AccountTracker", "TrackedRun", "Tracker", "final_metrics"]


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker receives.

    Attributes:
        name: experiment and run folder.
        experiment: ``name`` of the configuration, under which trackers gather runs.
        folder: the run folder.
        keys: the frozen configuration by dotted key; lists are text.
        facts: short texts: backend, task, folder, git revision, and ``sweep`` where the run belongs to one.
    """

    name: str
    experiment: str
    folder: Path
    keys: Mapping[str, Any]
    facts: Mapping[str, str]


class Tracker(abc.ABC):
    """One run at one tracker.

    A configuration names it in ``logger.trackers.<name>`` by ``_target_``; the other keys there are its constructor's
    arguments. All methods are called in one thread of rank 0. Whatever a method raises switches the tracker off for the
    rest of the run, with a warning; the run goes on.

    Attributes:
        address: where a person finds the run; :meth:`open` sets it.
        requires: packages that it imports; looked for before the run starts.
    """

    address: str = ""
    requires: ClassVar[Sequence[str]] = ()

    @abc.abstractmethod
    def open(self, run: TrackedRun, known: str | None) -> str:
        """Begin the tracker's run, or continue it.

        Args:
            run: the run.
            known: what this method returned for the run folder before (it was resumed, restarted or queued again);
                None: the run is new.

        Returns:
            The tracker's own name of the run.
        """

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take in figures.

        Args:
            values: by name, such as ``train/loss``, ``val/mse``, ``test/mse``; may be nan or infinite.
            step: optimizer steps completed.
        """

    def flush(self) -> None:
        """Send what :meth:`log` has gathered; called when no further figures wait."""

    @abc.abstractmethod
    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """End the tracker's run.

        Args:
            status: ``completed``, ``failed``, ``preempted``; ``killed``: the run left no result.
            result: ``result.json``, or empty.
            files: text files of the run folder: configuration, environment, result.
            pictures: PNG files of ``plots/``.
        """


@dataclass
class AccountTracker(Tracker):
    """What clients of an account with projects have in common: a run for each run, those of a sweep are a group.

    Args:
        project: its name; None: the experiment's.
        mode: the client's, such as ``online`` and ``offline``; None: its variable, else whether there is a key.
        tags: of the run.
    """

    project: str | None = None
    mode: str | None = None
    tags: Sequence[str] = ()

    def begin(self, init: Callable[..., Any], run: TrackedRun, known: str | None, **more: Any) -> str:
        """Begin the run, or continue it, by the client's ``init``; returns its name."""
        name, project = known or uuid.uuid4().hex[:12], (self.project or run.experiment).replace("/", "-")
        about: dict[str, Any] = {"name": run.name, "group": run.facts.get("sweep"), "config": dict(run.keys)}
        about["tags"] = [*self.tags, run.facts["backend"], run.facts["task"]]
        self._run = init(project=project, id=name, resume="allow", **about, **more)
        return name


def final_metrics(result: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite metrics of ``result.json`` by name."""
    return {f"{prefix}{name}": value for name, value in (result.get("metrics") or {}).items() if value is not None}
