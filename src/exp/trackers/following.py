"""The launcher's side of trackers: starts the processes that follow a run, and waits for them at its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Iterator, Mapping

from exp import console
from exp.config.create import create
from exp.config.targets import find_module, resolve
from exp.errors import ConfigError, UnavailableError
from exp.runfolder import to_json
from exp.trackers.base import Tracker
from exp.trackers.state import State

if TYPE_CHECKING:
    from pathlib import Path

    from exp.config.schema import ExpConfig, LoggerConfig
    from exp.runfolder import RunFolder

__all__ = ["Followers", "check", "close_sweep", "followed", "hand_over"]

_QUIET_S = 3.0
_GRACE_S = 60.0  # beyond a follower's own patience: what a client may take to be imported, or to give a request up


def check(chosen: LoggerConfig) -> None:
    """Whether the trackers of a configuration can be started, before anything else is.

    Raises:
        ConfigError: one is none, or does not take its arguments.
        UnavailableError: a package of its is missing.
    """
    for name, tracker in _trackers(chosen).items():
        key = f"logger.trackers.{name}"
        target = tracker.get("_target_") if isinstance(tracker, Mapping) else None
        if target is None:
            raise ConfigError(f"{key} must be {{_target_: <path of a class>, <arguments>}}, not {tracker}")
        cls = resolve(f"{key}._target_", target, Tracker)
        for module, package in cls.requires.items():
            if find_module(module) is None:
                raise UnavailableError(f"logger={name} needs {module}, which is not installed: pip install {package}")
        create(tracker, Tracker, key)  # which does nothing but take its arguments


class Followers:
    """The processes that follow one run.

    Args:
        chosen: ``config.logger``.
        folder: the run folder, written.
    """

    def __init__(self, chosen: LoggerConfig, folder: RunFolder) -> None:
        self._folder = folder
        self._patience_s = chosen.patience_s
        self._grace_s = _GRACE_S
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for name, tracker in _trackers(chosen).items():
            log = folder.logs / f"tracker-{name}.log"
            try:
                self._processes[name] = _follower(folder.path, log, name, tracker, chosen.patience_s)
            except OSError as error:  # no process to be had
                console.warn(f"{name} is not told of this run: {error.strerror}")

    def hurry(self) -> None:
        """Wait for seconds only at the end."""
        self._patience_s, self._grace_s = min(self._patience_s, 5.0), 0.0

    def end(self) -> bool:
        """Tell them that the run has ended, wait, and say how they are doing; returns whether all is well."""
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has died
                process.stdin.write("ended\n")
                process.stdin.close()
        deadline = time.monotonic() + self._patience_s + self._grace_s
        codes = {}
        try:
            for name, process in self._processes.items():
                codes[name] = self._wait(name, process, deadline)
        except KeyboardInterrupt:  # the run is over: it is not interrupted
            deadline = 0.0
        for name, process in self._processes.items():
            if name not in codes:
                process.kill()
                codes[name] = process.wait()
            self._tell(name, codes[name])
        return not any(codes.values())

    def _wait(self, name: str, process: subprocess.Popen[str], deadline: float) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=_QUIET_S)
        console.make_console().print(f"waiting for {name} (Ctrl-C leaves it)", style="dim", markup=False)
        try:
            return process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _tell(self, name: str, code: int) -> None:
        folder = self._folder
        state = State.of(folder.path, name)
        if code == 0:
            if state.address:
                console.make_console().print(f"{name}: {state.address}", highlight=False, soft_wrap=True, markup=False)
            return
        why = state.trouble or ("no answer" if code < 0 else "its process has failed")
        console.warn(
            f"{name} has not been told all of this run: {why}\n"
            f"  log: {console.shown(folder.logs / f'tracker-{name}.log')}; to tell it the rest: "
            f"python -m exp task=track logger={name} run={console.shown(folder.path)}"
        )


@contextlib.contextmanager
def followed(config: ExpConfig, folder: RunFolder) -> Iterator[Followers]:
    """Have the trackers of a run follow it; at the end wait until they have been told, and say how they are doing.

    Nothing of it can fail the run: a tracker that cannot be told is a warning.

    Args:
        config: the frozen configuration.
        folder: the run folder, written.
    """
    followers = Followers(config.logger, folder)
    try:
        yield followers
    finally:
        followers.end()


def hand_over(chosen: LoggerConfig, folder: RunFolder) -> bool:
    """Tell trackers of a run that has ended; returns whether all have taken it."""
    return Followers(chosen, folder).end()


def close_sweep(sweep: Path, config: ExpConfig) -> None:
    """Tell the trackers that have a run of their own for a sweep that it has ended.

    Args:
        sweep: its folder.
        config: of one of its jobs.
    """
    for name, tracker in _trackers(config.logger).items():
        if not (sweep / "trackers" / f"{name}.json").is_file():
            continue
        log = sweep / "trackers" / f"{name}.log"
        process = _follower(sweep, log, name, tracker, config.logger.patience_s, list(config.plugins))
        try:
            code = process.wait(timeout=config.logger.patience_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != 0:
            console.warn(f"{name} has not been told of the end of the sweep; log: {console.shown(log)}")


def _trackers(chosen: LoggerConfig) -> dict[str, Any]:
    """By name; null takes one away."""
    return {name: tracker for name, tracker in chosen.trackers.items() if tracker is not None}


def _follower(
    path: Path, log: Path, name: str, tracker: Any, patience_s: float, plugins: list[str] | None = None
) -> subprocess.Popen[str]:
    from exp.config.walk import plain

    settings = {"tracker": plain(tracker), "patience_s": patience_s, "plugins": plugins or []}
    # One thread, and no plug-in of a device: it may come to import torch.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "exp.trackers.follow", str(path), name],
            stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment, text=True, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died, which its code will tell
        process.stdin.write(to_json(settings) + "\n")
        process.stdin.flush()
    return process
