"""The process that follows one run for one tracker: ``python -m exp.trackers.follow FOLDER NAME``.

It reads ``metrics.jsonl`` as it grows and, once the run has ended, ``result.json`` and ``plots/``. Whoever started it
holds its standard input: the first line there has the tracker's settings, which may hold a password and so stand in no
list of processes; the second says that the run has ended, the end of the input that its launcher has died.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterator

from omegaconf import OmegaConf

from exp.config import structures
from exp.config.create import create
from exp.config.names import allow
from exp.runfolder import RunFolder, read_json, read_records
from exp.trackers.base import TrackedRun, Tracker, flat_keys
from exp.trackers.state import State

__all__ = ["Follower", "main", "records"]

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_HANGING_S = 60.0
_NO_FIGURES = {"split", "step", "units", "not_finite"}
_FILES = ("config.yaml", "overrides.yaml", "env.json", "result.json")
_SWEEP_FILES = ("sweep.csv", "sweep_seeds.csv", "results.md", "report.html")


class Follower:
    """Tells one tracker of one run.

    Args:
        folder: the run folder.
        name: of the tracker, in ``logger.trackers``.
        chosen: what stands there.
    """

    def __init__(self, folder: RunFolder, name: str, chosen: dict[str, Any]) -> None:
        self.folder = folder
        self.name = name
        self.chosen = chosen
        # The start may lie beside an earlier record, and take its place only once it has begun.
        self._start = folder.in_use(folder.config).read_bytes()
        self.config = structures.load(folder.in_use(folder.config))
        allow(self.config.plugins)
        self.state = State.of(folder.path, name)
        self.tracker: Tracker | None = None
        for module in type(create(chosen, f"logger.trackers.{name}")).requires:
            importlib.import_module(module)  # while the run starts: some take as long
        self._offset = 0
        self._sent: dict[str, int] = {}

    @property
    def begun(self) -> bool:
        """Whether the run folder is that of this start by now, and there is something to tell."""
        if self.folder.pending or not (self.folder.metrics.is_file() or self.folder.result.is_file()):
            return False
        return self.folder.config.is_file() and self.folder.config.read_bytes() == self._start

    def step(self) -> None:
        """Hand on what is new; raises what the tracker raises."""
        if not self.begun:
            return
        if self.tracker is None:
            self.state = State.of(self.folder.path, self.name)  # with overwrite=true that of the earlier run is gone
            self._sent = self._still_there(self.state.sent)
            tracker: Tracker = create(self.chosen, f"logger.trackers.{self.name}")
            self.state.run_id = tracker.open(self._run(), self.state.run_id)
            self.state.address, self.state.closed = tracker.address, False
            self.tracker = tracker
            self.state.write()
        sent, offset = dict(self._sent), self._offset
        for record, place in records(self.folder.metrics, self._offset):
            split, step, offset = record["split"], record["step"], place
            if step > sent.get(split, -1):
                self.tracker.log(_figures(record), step, time.time())
                sent[split] = step
        if offset != self._offset:
            self.tracker.flush()
            self._offset, self._sent = offset, sent
            if self.tracker.confirms:
                self.state.sent = dict(sent)
                self.state.write()

    def _still_there(self, sent: dict[str, int]) -> dict[str, int]:
        """Of what has been sent what the file has; a run that goes on from an earlier step comes to the rest again."""
        there: dict[str, int] = {}
        for record, _ in records(self.folder.metrics):
            there[record["split"]] = record["step"]
        return {split: min(step, there.get(split, -1)) for split, step in sent.items()}

    @property
    def told(self) -> bool:
        """Whether the tracker knows all of a run that has ended."""
        state = State.of(
            self.folder.path, self.name
        )  # not that of an earlier run which this one has taken the place of
        newest = max((record["step"] for record, _ in records(self.folder.metrics)), default=-1)
        return state.closed and newest <= max(state.sent.values(), default=-1)

    def end(self, killed: bool) -> None:
        """Hand on the rest; raises what the tracker raises."""
        self.step()
        if self.tracker is None:
            return
        result = read_json(self.folder.result) or {}
        step = max(self._sent.values(), default=0)
        self.tracker.keep_files([path for path in map(self.folder.path.joinpath, _FILES) if path.is_file()])
        self.tracker.keep_pictures(sorted(self.folder.plots.rglob("*.png")), step)
        self.tracker.close("killed" if killed and not result else result.get("status", "killed"), result)
        self.state.sent, self.state.closed, self.state.trouble = dict(self._sent), True, None
        self.state.write()

    def _run(self) -> TrackedRun:
        config, path = self.config, self.folder.path
        plain: Any = OmegaConf.to_container(OmegaConf.load(self.folder.config), resolve=True)
        plain.pop("record", None)
        facts = {"backend": config.backend.name, "task": config.task.name, "folder": str(path)}
        facts["git"] = str((read_json(self.folder.env) or {}).get("git", {}).get("commit") or "")
        sweep = path.parent if (path.parent / "multirun.yaml").is_file() else None
        name = f"{sweep.name}/{path.name}" if sweep else path.name
        return TrackedRun(
            name, config.name, path, flat_keys(plain), {k: v for k, v in facts.items() if v}, sweep, self.name
        )


def records(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The whole lines of ``metrics.jsonl`` from a place on, each with the place after it.

    A file that has been cut back since, as a run does that goes on from an earlier step, is read from its beginning.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(max(offset - 1, 0))
        place = offset if offset == 0 or file.read(1) == b"\n" else 0
        file.seek(place)
        for line in file:
            if not line.endswith(b"\n"):
                return
            place += len(line)
            for record in read_records([line]):
                yield record, place


def _figures(record: dict[str, Any]) -> dict[str, float]:
    values = {**record, **{key: float(text) for key, text in record.get("not_finite", {}).items() if "." not in key}}
    return {
        f"{record['split']}/{key}": float(value)
        for key, value in values.items()
        if key not in _NO_FIGURES and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def main(folder: str, name: str) -> int:
    """Follow a run to its end; returns 0 if the tracker has been told everything.

    Args:
        folder: the run folder; of a sweep that has ended, the sweep's.
        name: of the tracker.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # who ends a job may signal all its processes; this one tells the end
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = json.loads(_first_line())
    if not RunFolder(folder).in_use(RunFolder(folder).config).is_file():
        allow(given["plugins"])
        _close_sweep(Path(folder), name, create(given["tracker"], f"logger.trackers.{name}"))
        return 0
    follower = Follower(RunFolder(folder), name, given["tracker"])
    pause, not_before = _POLL_S, 0.0
    while True:
        said = _wait(_POLL_S)
        if said is not None:
            break
        if time.monotonic() < not_before:
            continue
        try:
            follower.step()
            pause = _POLL_S
        except Exception as error:  # noqa: BLE001 - whatever a client raises, the run is none the worse for it
            _note(follower, error)
            pause = min(2 * pause, 30.0)
            not_before = time.monotonic() + pause
    patience_s = float(given["patience_s"])
    last = threading.Timer(patience_s + _HANGING_S, os._exit, (1,))  # a client may hang for ever
    last.daemon = True
    last.start()
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if not (follower.tracker is None and follower.told):
                follower.end(killed=said == "")
            return 0
        except Exception as error:  # noqa: BLE001 - as above
            _note(follower, error)
        if time.monotonic() + 2 * _POLL_S > deadline:
            return 1
        time.sleep(2 * _POLL_S)


def _close_sweep(folder: Path, name: str, tracker: Tracker) -> None:
    tracker.close_sweep(folder, name, [path for path in map(folder.joinpath, _SWEEP_FILES) if path.is_file()])


def _note(follower: Follower, error: Exception) -> None:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    follower.state.trouble = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
    logger.warning("%s", follower.state.trouble, exc_info=error)
    try:
        follower.state.write()
    except OSError as full:
        logger.warning("%s", full)


def _first_line() -> bytes:
    """Byte by byte: what is read ahead of a line, :func:`_wait` would not see come."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            break
        line += byte
    return line


def _wait(seconds: float) -> str | None:
    """What standard input says within some seconds: a line, "" at its end, or None: nothing."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.readline() if ready else None


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a client may be waiting for a server that is gone
