"""The interface of experiment trackers, and the thread that feeds one (:mod:`exp.trackers.clients` has four).

Rank 0 sends metrics to each tracker in a separate thread (:class:`Reporter`), so no training step waits for a server.
``task=track`` sends a finished run to a tracker. Imports no torch.
"""

from __future__ import annotations

import abc
import importlib.util
import logging
import threading
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterator, Mapping, Sequence

from exp.config.resolve import create
from exp.errors import ConfigError, UnavailableError
from exp.report.runs import Run, is_number, read_run
from exp.runs.files import read_json, write_json

if TYPE_CHECKING:
    from exp.config.schema import LoggerConfig
    from exp.runs.folder import RunFolder

logger = logging.getLogger(__name__)

_FILES = ("config.yaml", "overrides.yaml", "env.json", "result.json")


class Tracker(abc.ABC):
    """Interface of a tracker; an instance handles one run.

    A configuration names the class in ``logger.trackers.<name>`` by ``_target_``; the other keys are arguments of the
    constructor. All methods are called in one thread of rank 0. If a method raises, the tracker is switched off for the
    rest of the run with a warning, and the run continues.

    Attributes:
        address: URL of the run, or the command that shows it; set by :meth:`open`.
        requires: names of packages that must be importable; checked before the run starts.
    """

    address: str = ""
    requires: ClassVar[Sequence[str]] = ()

    @abc.abstractmethod
    def open(self, run: Run, run_id: str | None) -> str:
        """Create the run at the tracker, or continue it.

        Args:
            run: name (the run folder's; for a job of a sweep ``<sweep folder>/<run folder>``), folder, and frozen
                configuration by dotted key, whose values are numbers, booleans or text.
            run_id: what this method returned earlier for the same run folder, if the run was resumed or restarted;
                None: the run is new.

        Returns:
            The tracker's id of the run.
        """

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars.

        Args:
            values: values by name, such as ``train/loss``, ``val/mse``, ``test/mse``; may be NaN or infinite.
            step: number of completed optimizer steps.
        """

    def flush(self) -> None:
        """Send values that :meth:`log` has buffered; called when the queue is empty."""

    @abc.abstractmethod
    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """End the run at the tracker.

        Args:
            status: ``completed``, ``failed`` or ``preempted``; ``killed`` if the run left no result.
            result: content of ``result.json``, or empty.
            files: text files of the run folder: configuration, environment, result.
            pictures: PNG files of ``plots/``.
        """


def final_metrics(result: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The metrics of ``result.json`` that have a value (finite ones), by name with ``prefix``."""
    return {f"{prefix}{name}": value for name, value in (result.get("metrics") or {}).items() if value is not None}


class Reporter:
    """Connection of one run to one tracker.

    The tracker works in a thread that reads a queue, so the training never waits for it. If the tracker raises, it is
    switched off.

    Args:
        name: name of the tracker in ``logger.trackers``.
        tracker: the tracker.
        folder: the run folder.
        warn: function that prints a line for the user.

    Attributes:
        state: content of ``trackers/<name>.json`` in the run folder: ``run_id``, the tracker's id of the run (None:
            the tracker has no such run yet); ``address`` (see :class:`Tracker`); ``sent``, the last step that the
            tracker has received, by split; ``closed``, whether the run has ended at the tracker.
    """

    def __init__(self, name: str, tracker: Tracker, folder: RunFolder, warn: Callable[[str], object]) -> None:
        self.name, self._tracker, self._run, self._warn = name, tracker, _run_info(folder), warn
        self._file = folder.path / "trackers" / f"{name}.json"
        self.state = {"run_id": None, "address": "", "sent": {}, "closed": False, **(read_json(self._file) or {})}
        self._queue: SimpleQueue[tuple[Mapping[str, float], int] | None] = SimpleQueue()
        self._end: tuple[str, Mapping[str, Any]] = ("killed", {})
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def start(self) -> Reporter:
        """Start the thread; returns the reporter itself."""
        self.state["closed"] = False
        self._thread.start()
        return self

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Put scalars into the queue; returns at once."""
        self._queue.put((dict(values), step))

    def close(self, status: str, result: Mapping[str, Any], patience_s: float) -> bool:
        """End the run at the tracker, and wait for it at most ``patience_s`` seconds.

        Returns:
            Whether the tracker has received everything in time.
        """
        self._end = (status, result)
        self._queue.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._switch_off(f"no answer for {patience_s:g} s")
        return bool(self.state["closed"])

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
        self._warn(
            f"{self.name} is switched off for this run: {why}\n"
            f"  to send it the rest later: python -m exp task=track logger={self.name} run={self._run.folder}"
        )


def check(chosen: LoggerConfig) -> None:
    """Check that the packages of the logger are installed, and that its trackers can be created, before a run starts.

    Raises:
        ConfigError: a class is not a :class:`Tracker`, or does not accept its arguments.
        UnavailableError: a required package is not installed.
    """
    needed = [*chosen.requires, *(package for _, tracker in _trackers(chosen) for package in tracker.requires)]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise UnavailableError(f"the logger needs {package}, which is not installed: pip install {package}")


def start(chosen: LoggerConfig, folder: RunFolder, warn: Callable[[str], object]) -> list[Reporter]:
    """Connect a run to each of its trackers.

    Args:
        chosen: configuration of the trackers.
        folder: the run folder.
        warn: function that prints a line for the user.

    Returns:
        The reporters, all started.
    """
    return [Reporter(name, tracker, folder, warn).start() for name, tracker in _trackers(chosen)]


def upload_finished(chosen: LoggerConfig, folder: RunFolder, warn: Callable[[str], object]) -> list[Reporter]:
    """Send a finished run to trackers, except what they have received already.

    Args:
        chosen: configuration of the trackers.
        folder: the run folder.
        warn: function that prints a line for the user.

    Returns:
        The reporters of the trackers that had not received everything; all are closed.
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
                reporter.log(_scalars(record), record["step"])
            reporter.close(result.get("status", "killed"), result, chosen.patience_s)
    return reporters


def _trackers(chosen: LoggerConfig) -> Iterator[tuple[str, Tracker]]:
    """Create the configured trackers; yields name and tracker."""
    for name, tracker in chosen.trackers.items():
        key = f"logger.trackers.{name}"
        if not isinstance(tracker, Mapping) or "_target_" not in tracker:
            raise ConfigError(f"{key} must be {{_target_: <path of a class>, <arguments>}}", f"logger={name} has both")
        yield name, create(tracker, Tracker, key)


def _run_info(folder: RunFolder) -> Run:
    path, sweep = folder.path, folder.path.parent
    run = read_run(path, f"{sweep.name}/{path.name}" if (sweep / "multirun.yaml").is_file() else path.name)
    keys = {key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in run.config.items() if not key.startswith("record.")}  # fmt: skip
    return replace(run, config=keys)


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record of ``metrics.jsonl`` by ``<split>/<name>``."""
    scalars = {name: float(value) for name, value in record.items() if is_number(value)}
    return {f"{record['split']}/{name}": value for name, value in scalars.items() if name not in ("step", "epoch")}
