"""Hands a run to its trackers: while it trains, or afterwards from its folder."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping

from omegaconf import OmegaConf

from exp.config.resolve import create, find_module, resolve
from exp.errors import ConfigError, UnavailableError
from exp.runfolder import read_json, write_json
from exp.trackers.base import TrackedRun, Tracker

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig, LoggerConfig
    from exp.runfolder import RunFolder

__all__ = ["Reporter", "check", "hand_over", "start"]

logger = logging.getLogger(__name__)

_FILES = ("config.yaml", "overrides.yaml", "env.json", "result.json")
_NO_FIGURES = {"split", "step", "epoch", "units", "not_finite"}


@dataclass
class _State:
    """What a tracker has received of a run, in ``trackers/<name>.json`` of the run folder.

    Attributes:
        path: the file.
        run_id: the tracker's own name of the run; None: it has not begun there.
        address: where a person finds it.
        sent: by split, the last step that it has received.
        closed: whether it has received the end.
        trouble: why it was switched off, in one line.
    """

    path: Path
    run_id: str | None = None
    address: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    trouble: str | None = None

    @classmethod
    def of(cls, folder: Path, name: str) -> _State:
        path = folder / "trackers" / f"{name}.json"
        return cls(path, **(read_json(path) or {}))

    def write(self) -> None:
        content = asdict(self)
        del content["path"]
        self.path.parent.mkdir(exist_ok=True)
        write_json(self.path, content)


class Reporter:
    """One run's connection to one tracker.

    The tracker works in a thread, which takes figures from a queue: the training never waits for it. What the tracker
    raises switches it off.

    Args:
        name: of the tracker, in ``logger.trackers``.
        tracker: the tracker.
        run: the run.
        warn: takes a line for the user.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, warn: Callable[[str], object]) -> None:
        self.name, self.state = name, _State.of(run.folder, name)
        self.state.trouble, self.state.closed = None, False
        self._tracker, self._run, self._warn = tracker, run, warn
        self._queue: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand on figures; returns at once."""
        if self.state.trouble is None:
            self._queue.put((dict(values), step))

    def close(self, status: str, result: Mapping[str, Any], patience_s: float) -> bool:
        """End the tracker's run; returns whether it has received everything within ``patience_s`` seconds."""
        self._queue.put((status, result))
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._switch_off(f"no answer for {patience_s:g} s")
        return self.state.trouble is None

    def _work(self) -> None:
        try:
            self.state.run_id = self._tracker.open(self._run, self.state.run_id)
            self.state.address = self._tracker.address
            self.state.write()
            while not self.state.closed:
                self._take()
        except Exception as error:
            logger.warning("tracker %s", self.name, exc_info=True)
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self._switch_off(f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300])

    def _take(self) -> None:
        """Wait for the next item of the queue, and take it with all that came meanwhile."""
        items = [self._queue.get(), *_waiting(self._queue)]
        sent = dict(self.state.sent)
        for first, second in items:
            if isinstance(first, str):  # a status
                self._flush(sent)
                folder = self._run.folder
                files = [path for path in map(folder.joinpath, _FILES) if path.is_file()]
                self._tracker.close(first, second, files, sorted((folder / "plots").rglob("*.png")))
                self.state.closed = True
                self.state.write()
                return
            self._tracker.log(first, second)
            sent.update({name.partition("/")[0]: second for name in first})
        self._flush(sent)

    def _flush(self, sent: dict[str, int]) -> None:
        self._tracker.flush()
        if sent != self.state.sent:
            self.state.sent = sent
            self.state.write()

    def _switch_off(self, why: str) -> None:
        if self.state.trouble is None:
            self.state.trouble = why
            self._warn(
                f"{self.name} is switched off for this run: {why}\n"
                f"  to hand it the rest afterwards: python -m exp task=track logger={self.name} run={self._run.folder}"
            )
            if self._run.folder.is_dir():
                self.state.write()


def check(chosen: LoggerConfig) -> None:
    """Whether the trackers of a configuration can be started; called before anything else is.

    Raises:
        ConfigError: a tracker is no :class:`exp.trackers.Tracker`, or does not take its arguments.
        UnavailableError: a package is missing.
    """
    for name, tracker in _trackers(chosen):
        key = f"logger.trackers.{name}"
        target = tracker.get("_target_") if isinstance(tracker, Mapping) else None
        if target is None:
            raise ConfigError(f"{key} must be {{_target_: <path of a class>, <arguments>}}, not {tracker}")
        cls = resolve(f"{key}._target_", target, Tracker)
        for module, package in cls.requires.items():
            if find_module(module) is None:
                raise UnavailableError(f"logger={name} needs {module}, which is not installed: pip install {package}")
        create(tracker, Tracker, key)


def start(config: ExpConfig, folder: RunFolder, warn: Callable[[str], object]) -> list[Reporter]:
    """Connect a run to each of its trackers.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        warn: takes a line for the user.
    """
    trackers = list(_trackers(config.logger))
    if not trackers:
        return []
    run = _tracked(config, folder)
    return [
        Reporter(name, create(tracker, Tracker, f"logger.trackers.{name}"), run, warn) for name, tracker in trackers
    ]


def hand_over(chosen: LoggerConfig, folder: RunFolder, warn: Callable[[str], object]) -> list[Reporter]:
    """Hand a run that is over to trackers, less what they have received already.

    Args:
        chosen: the trackers.
        folder: the run folder.
        warn: takes a line for the user.

    Returns:
        The reporters, all closed.
    """
    records = folder.records()
    newest = max((record["step"] for record in records), default=-1)
    result = read_json(folder.result) or {}
    run = _tracked(OmegaConf.load(folder.config), folder)
    reporters = []
    for name, tracker in _trackers(chosen):
        state = _State.of(folder.path, name)
        if state.closed and newest <= max(state.sent.values(), default=-1):
            continue
        reporter = Reporter(name, create(tracker, Tracker, f"logger.trackers.{name}"), run, warn)
        for record in records:
            if record["step"] > state.sent.get(record["split"], -1):
                reporter.log(_figures(record), record["step"])
        reporter.close(result.get("status", "killed"), result, chosen.patience_s)
        reporters.append(reporter)
    return reporters


def _waiting(items: queue.Queue[Any]) -> Iterator[Any]:
    while True:
        try:
            yield items.get_nowait()
        except queue.Empty:
            return


def _trackers(chosen: LoggerConfig) -> list[tuple[str, Any]]:
    """By name; null takes one away."""
    return [(name, tracker) for name, tracker in chosen.trackers.items() if tracker is not None]


def _tracked(config: Any, folder: RunFolder) -> TrackedRun:
    path = folder.path
    keys: Any = OmegaConf.to_container(OmegaConf.load(folder.config), resolve=True)
    keys.pop("record", None)
    facts = {"backend": config.backend.name, "task": config.task.name, "folder": str(path)}
    facts["git"] = str((read_json(folder.env) or {}).get("git", {}).get("commit") or "")
    sweep = path.parent.name if (path.parent / "multirun.yaml").is_file() else ""
    facts = {key: text for key, text in {**facts, "sweep": sweep}.items() if text}
    return TrackedRun(f"{sweep}/{path.name}" if sweep else path.name, config.name, path, _flat(keys), facts)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return found


def _figures(record: Mapping[str, Any]) -> dict[str, float]:
    values = {**record, **{key: float(text) for key, text in record.get("not_finite", {}).items() if "." not in key}}
    return {
        f"{record['split']}/{key}": float(value)
        for key, value in values.items()
        if key not in _NO_FIGURES and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
