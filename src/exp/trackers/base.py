"""The tracker interface. Imports neither torch nor any tracker's client."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

__all__ = ["TrackedRun", "Tracker", "final_metrics", "flat_keys"]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run as it begins.

    Attributes:
        name: of the experiment and the run folder.
        experiment: ``name`` of the configuration, under which trackers gather runs.
        folder: the run folder.
        keys: the frozen configuration by dotted key; lists are text.
        facts: what ``env.json`` and the configuration say in a word: backend, task, version.
        sweep: the folder of the sweep that it belongs to, or None.
        tracker: the name of the tracker that is told of it, in ``logger.trackers``.
    """

    name: str
    experiment: str
    folder: Path
    keys: Mapping[str, Any]
    facts: Mapping[str, str]
    sweep: Path | None = None
    tracker: str = ""


class Tracker(abc.ABC):
    """One run at one tracker.

    A configuration names it in ``logger.trackers.<name>`` by ``_target_``; the other keys there are its constructor's
    arguments. It is made in a process of its own, on the node of rank 0. Whatever a method raises is tried again, every
    few seconds, until some time after the end of the run; the run itself knows nothing of it.

    Attributes:
        requires: packages that it imports, by the name that pip knows them by; looked for before the run starts.
        confirms: whether what has been flushed has arrived. Where not, only the end of a run says so, and what came
            before it is told again if the end cannot be told.
    """

    requires: ClassVar[Mapping[str, str]] = {}
    confirms: ClassVar[bool] = True

    @abc.abstractmethod
    def open(self, run: TrackedRun, known: str | None) -> str:
        """Begin the tracker's run, or go on with it.

        Args:
            run: what it is.
            known: what this method gave for the run folder before: it was resumed, restarted or queued again.

        Returns:
            What the tracker knows its run by.
        """

    @property
    def address(self) -> str:
        """Where a person finds it; valid once it is open."""
        return ""

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Take in figures.

        Args:
            values: by name, such as ``train/loss``, ``val/mse``, ``test/mse``; may be nan or infinite.
            step: optimizer steps completed.
            time: seconds since the epoch.
        """

    def flush(self) -> None:
        """See to it that what it was given has arrived; raises where it has not."""

    def keep_files(self, files: Sequence[Path]) -> None:
        """Take in text files of the run folder: configuration, environment, result."""

    def keep_pictures(self, pictures: Sequence[Path], step: int) -> None:
        """Take in PNG files of ``plots/``, drawn after ``step`` steps."""

    @abc.abstractmethod
    def close(self, status: str, result: Mapping[str, Any]) -> None:
        """The run has ended.

        Args:
            status: ``completed``, ``failed``, ``preempted``; ``killed``: it left no word.
            result: ``result.json``, or empty.
        """

    def close_sweep(self, sweep: Path, name: str, files: Sequence[Path]) -> None:
        """The sweep of some runs has ended; for trackers that have a run of its own for it.

        Args:
            sweep: its folder.
            name: of this tracker, in ``logger.trackers``.
            files: its tables and page.
        """


def final_metrics(result: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The metrics of ``result.json`` by name, but for those that are not finite."""
    return {f"{prefix}{name}": value for name, value in (result.get("metrics") or {}).items() if value is not None}


def flat_keys(config: Any, prefix: str = "") -> dict[str, Any]:
    """A plain configuration by dotted key; lists, which trackers have no keys for, as text."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found.update(flat_keys(value, f"{name}."))
        else:
            found[name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return found
