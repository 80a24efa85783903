"""Trackers: where people look at a run beside its folder. Imports neither torch nor any tracker's client.

Rank 0 hands figures to each tracker in a thread of its own (:class:`Reporter`), so that no step waits for a server. A
run that is over can be handed to a tracker, too (``task=track``).
"""

from __future__ import annotations

import abc
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterator, Mapping, Sequence

from omegaconf import OmegaConf

from exp.config.resolve import create, find_module
from exp.errors import ConfigError, UnavailableError
from exp.runs.files import read_json, write_json

if TYPE_CHECKING:
    from exp.config.schema import LoggerConfig
    from exp.runs.folder import RunFolder

__all__ = ["Reporter", "TrackedRun", "Tracker", "check", "final_metrics", "hand_over", "start"]

logger = logging.getLogger(__name__)

_FILES = ("config.yaml", "overrides.yaml", "env.json", "result.json")
_NO_FIGURES = {"split", "step", "epoch", "units", "not_finite"}


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


def final_metrics(result: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite metrics of ``result.json`` by name."""
    return {f"{prefix}{name}": value for name, value in (result.get("metrics") or {}).items() if value is not None}


class Reporter:
    """One run's connection to one tracker.

    The tracker works in a thread, which takes figures from a queue: the training never waits for it. What the tracker
    raises switches it off.

    Args:
        name: of the tracker, in ``logger.trackers``.
        tracker: the tracker.
        folder: of the run.
        warn: takes a line for the user.

    Attributes:
        state: what ``trackers/<name>.json`` of the run folder keeps: ``run_id``, the tracker's own name of the run
            (None: it has not begun there); ``address``, where a person finds it; ``sent``, by split the last step that
            it has received; ``closed``, whether it has received the end.
        trouble: why the tracker was switched off; empty: it was not.
    """

    def __init__(self, name: str, tracker: Tracker, folder: RunFolder, warn: Callable[[str], object]) -> None:
        self.name, self._tracker, self._run, self._warn, self.trouble = name, tracker, _tracked(folder), warn, ""
        self._file = folder.path / "trackers" / f"{name}.json"
        self.state = {"run_id": None, "address": "", "sent": {}, "closed": False, **(read_json(self._file) or {})}
        self._queue: SimpleQueue[tuple[Mapping[str, float], int] | None] = SimpleQueue()
        self._end: tuple[str, Mapping[str, Any]] = ("killed", {})
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def start(self) -> Reporter:
        """Begin to work."""
        self.state["closed"] = False
        self._thread.start()
        return self

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand on figures; returns at once."""
        self._queue.put((dict(values), step))

    def close(self, status: str, result: Mapping[str, Any], patience_s: float) -> bool:
        """End the tracker's run; returns whether it has received everything within ``patience_s`` seconds."""
        self._end = (status, result)
        self._queue.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._switch_off(f"no answer for {patience_s:g} s")
        return not self.trouble

    def _work(self) -> None:
        tracker, folder, sent = self._tracker, self._run.folder, dict(self.state["sent"])
        try:
            self._file.parent.mkdir(exist_ok=True)
            run_id = tracker.open(self._run, self.state["run_id"])
            self._write(run_id=run_id, address=tracker.address)
            for values, step in iter(self._queue.get, None):
                tracker.log(values, step)
                sent.update({name.partition("/")[0]: step for name in values})
                if self._queue.empty():
                    tracker.flush()
                    self._write(sent=dict(sent))
            tracker.flush()
            files = [path for path in map(folder.joinpath, _FILES) if path.is_file()]
            tracker.close(*self._end, files, sorted((folder / "plots").rglob("*.png")))
            self._write(sent=sent, closed=True)
        except Exception as error:
            logger.warning("tracker %s", self.name, exc_info=True)
            self._switch_off(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])

    def _write(self, **changed: Any) -> None:
        self.state.update(changed)
        write_json(self._file, self.state)

    def _switch_off(self, why: str) -> None:
        if not self.trouble:
            self.trouble = why
            self._warn(
                f"{self.name} is switched off for this run: {why}\n"
                f"  to hand it the rest afterwards: python -m exp task=track logger={self.name} run={self._run.folder}"
            )


def check(chosen: LoggerConfig) -> None:
    """Whether the trackers of a configuration can be started; called before anything else is.

    Raises:
        ConfigError: a tracker is no :class:`Tracker`, or does not take its arguments.
        UnavailableError: a package is missing.
    """
    for name, tracker in _trackers(chosen):
        for package in tracker.requires:
            if find_module(package) is None:
                raise UnavailableError(f"logger={name} needs {package}, which is not installed: pip install {package}")


def start(chosen: LoggerConfig, folder: RunFolder, warn: Callable[[str], object]) -> list[Reporter]:
    """Connect a run to each of its trackers.

    Args:
        chosen: the trackers.
        folder: the run folder.
        warn: takes a line for the user.
    """
    return [Reporter(name, tracker, folder, warn).start() for name, tracker in _trackers(chosen)]


def hand_over(chosen: LoggerConfig, folder: RunFolder, warn: Callable[[str], object]) -> list[Reporter]:
    """Hand a run that is over to trackers, less what they have received already.

    Args:
        chosen: the trackers.
        folder: the run folder.
        warn: takes a line for the user.

    Returns:
        The reporters, all closed.
    """
    records, result = folder.records(), read_json(folder.result) or {}
    reporters = []
    for name, tracker in _trackers(chosen):
        reporter = Reporter(name, tracker, folder, warn)
        sent = reporter.state["sent"]
        rest = [record for record in records if record["step"] > sent.get(record["split"], -1)]
        if rest or not reporter.state["closed"]:
            reporters.append(reporter.start())
            for record in rest:
                reporter.log(_figures(record), record["step"])
            reporter.close(result.get("status", "killed"), result, chosen.patience_s)
    return reporters


def _trackers(chosen: LoggerConfig) -> Iterator[tuple[str, Tracker]]:
    """The trackers by name; null takes one away."""
    for name, tracker in chosen.trackers.items():
        key = f"logger.trackers.{name}"
        if tracker is not None:
            if not isinstance(tracker, Mapping) or "_target_" not in tracker:
                raise ConfigError(f"{key} must be {{_target_: <path of a class>, <arguments>}}; logger={name} has both")
            yield name, create(tracker, Tracker, key)


def _tracked(folder: RunFolder) -> TrackedRun:
    import pandas as pd

    config: Any = OmegaConf.to_container(OmegaConf.load(folder.config), resolve=True)
    config.pop("record", None)
    (flat,) = pd.json_normalize(config).to_dict("records")
    keys = {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in flat.items()}
    path, sweep = folder.path, folder.path.parent
    facts = {"backend": config["backend"]["name"], "task": config["task"]["name"], "folder": str(path)}
    facts["git"] = (read_json(folder.env) or {}).get("git_revision") or ""
    facts["sweep"] = sweep.name if (sweep / "multirun.yaml").is_file() else ""
    name = f"{sweep.name}/{path.name}" if facts["sweep"] else path.name
    return TrackedRun(name, config["name"], path, keys, {key: text for key, text in facts.items() if text})


def _figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of ``metrics.jsonl``, those that are not finite among them."""
    values = {**record, **{key: float(text) for key, text in record.get("not_finite", {}).items() if "." not in key}}
    return {
        f"{record['split']}/{key}": float(value)
        for key, value in values.items()
        if key not in _NO_FIGURES and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
