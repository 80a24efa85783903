"""``task=watch``: the ranks of a run and the cards of this host, in tables that are redrawn until the run ends.

Nothing is written and no process is disturbed: ranks are found in ``/proc``, their stages in the heartbeats, progress
in the run folder, and cards by the monitors of all installed backends.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

from exp import console
from exp.errors import EXIT_OK, ConfigError, ExpError, SignalReceived, UnavailableError
from exp.hardware.cards import monitor_row
from exp.hardware.registry import create_backend, installed
from exp.launcher.outcome import progress_of
from exp.report.formats import Table, as_rich
from exp.report.runs import read_run
from exp.runs.files import read_json, read_yaml, to_json
from exp.runs.folder import TAIL_BYTES, RunFolder
from exp.runs.heartbeat import Heartbeat, Stage, jobs_on_host, read
from exp.runs.lock import LOCK, is_alive, live_holder, proc_stat, read_holder

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend

__all__ = ["watch"]

_INTERVAL_S = 1.0
_ELSEWHERE_INTERVAL_S = 5.0  # without ranks here, a scheduler may have to be asked whether the run goes on
_IDLE_PERCENT = 5.0
"""Utilization below which a card counts as idle."""


def watch(config: ExpConfig) -> int:
    """Show the run ``task.run`` (null: the newest that runs on this host) until it ends, or Ctrl-C ends the command.

    Without a terminal, and with ``task.format=json``, once.

    Raises:
        ConfigError: ``task.run`` is not a run folder, or there is no such ``task.format``.
        UnavailableError: no run and no card was found.
    """
    watcher = _Watcher(config)
    seen, terminal = watcher.read(), console.make_console()
    if seen["status"] is None and not seen["cards"]:
        raise UnavailableError(
            "there is nothing to watch: no run of this user runs on this host, and no monitor of cards answers",
            "give run=<a run folder>",
        )
    try:
        if config.task.format == "json" or not terminal.is_terminal:
            if seen["status"] == "running":
                time.sleep(_INTERVAL_S)  # speeds are differences
                seen = watcher.read()
            if config.task.format == "json":
                terminal.out(to_json(seen), highlight=False)
            else:
                terminal.print(*_draw(seen), sep="\n", soft_wrap=True)
            return EXIT_OK
        from rich.console import Group
        from rich.live import Live

        with Live(console=terminal, auto_refresh=False) as live:
            while True:
                live.update(Group(*_draw(seen)), refresh=True)
                if seen["status"] not in (None, "running"):
                    return EXIT_OK
                has_local_ranks = any(rank["pid"] for rank in seen["ranks"])
                time.sleep(_INTERVAL_S if has_local_ranks or watcher.folder is None else _ELSEWHERE_INTERVAL_S)
                seen = watcher.read()
    except SignalReceived as ended:
        if ended.number != signal.SIGINT:
            raise
        return EXIT_OK


class _Watcher:
    """Reads the state of a run and of the cards of this host.

    Attributes:
        folder: of the run; None: no run was found so far.
    """

    def __init__(self, config: ExpConfig) -> None:
        run = config.task.run
        if config.task.format not in ("table", "json"):
            raise ConfigError(f"task.format={config.task.format} is not one of table, json")
        self.folder: RunFolder | None = None
        self._is_chosen = run is not None
        if run is not None:
            self.folder = RunFolder(Path(os.path.realpath(Path(str(run)).expanduser())))
            if not self.folder.current_file(self.folder.config).is_file():
                raise ConfigError(f"run={run} is not a run folder")
        self._backends: list[Backend] = []
        if "," not in config.backend._target_:  # not backend=auto
            self._backends.append(create_backend(config.backend))
        for name in installed():
            if name != config.backend.name:
                try:
                    self._backends.append(create_backend({"_target_": name, "name": name}))
                except (ExpError, TypeError) as error:  # of another package
                    console.warn(f"{error}; task=watch shows no cards of '{name}'")
        self._last: tuple[float, dict[int, int]] = (0.0, {})

    def read(self) -> dict[str, Any]:
        """The state now.

        Returns:
            ``run`` (path), ``status`` (``running``, or as in :class:`exp.report.runs.Run`), ``detail`` (progress, or
            the result), ``ranks``, ``cards`` (readings of the monitors, with ``idle`` and ``processes``), and
            ``others`` (without ``task.run``: further runs on this host). ``run`` and ``status`` are None without a run.
        """
        jobs = jobs_on_host()
        others = [] if self._is_chosen else jobs
        if self.folder is None and jobs:
            holders = {folder: read_holder(folder / LOCK) for folder in jobs}
            self.folder = RunFolder(max(jobs, key=lambda folder: getattr(holders[folder], "since", 0.0)))
        run, status, detail, ranks = None, None, "", []
        if self.folder is not None:
            run = str(self.folder.path)
            every = [beat for scratch in jobs.pop(self.folder.path, ()) for beat in read(scratch) if beat.pid]
            beats = {beat.rank: beat for beat in sorted(every, key=lambda beat: is_alive(beat.pid))}
            status, detail = _describe(self.folder, beats)
            ranks = self._ranks(self.folder, beats) if status == "running" else []
        cards = self._cards(ranks)
        for rank in ranks:
            del rank["device"]
        return {"run": run, "status": status, "detail": detail, "ranks": ranks, "cards": cards,
                "others": sorted(map(str, set(others) - {self.folder and self.folder.path}))}  # fmt: skip

    def _ranks(self, folder: RunFolder, beats: Mapping[int, Heartbeat]) -> list[dict[str, Any]]:
        """A row for each rank; ``pid``, ``stage``, ``step`` and ``steps_per_second`` are None on another host."""
        devices = (read_json(folder.env) or {}).get("devices") or []
        (before, steps), now = self._last, time.monotonic()
        self._last = now, {rank: beat.step for rank, beat in beats.items()}
        rows = []
        for rank in sorted({*beats, *range(len(devices))}):
            device, beat = devices[rank] if rank < len(devices) else {}, beats.get(rank)
            row = dict.fromkeys(("pid", "stage", "step", "steps_per_second"))
            if beat is not None:
                stage = Stage(beat.stage).name.lower().replace("_", " ")
                if beat.stage == Stage.FREE:
                    stage = "other work" if beat.step else "set-up"
                elif beat.stage != Stage.DONE and not is_alive(beat.pid):
                    stage = "gone"
                speed = (beat.step - steps[rank]) / (now - before) if rank in steps else None
                row = {"pid": beat.pid, "stage": stage, "step": beat.step, "steps_per_second": speed}
            host = device.get("host") or socket.gethostname()
            rows.append({"rank": rank, "host": host, "card": device.get("device"), **row, "device": device})
        return rows

    def _cards(self, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The readings of all backends' monitors, with the processes on each card as far as they are known."""
        keys = read_yaml(self.folder.current_file(self.folder.config)) if self.folder is not None and ranks else {}
        if keys.get("backend", {}).get("simulate"):
            ranks = ()  # they use no card
        cards: list[dict[str, Any]] = []
        for backend in self._backends:
            readings = backend.monitor()
            pids = {card["index"]: dict.fromkeys(card.get("processes") or ()) for card in readings}
            for rank in ranks:
                kind = str(rank["card"]).partition(":")[0]
                same = rank["pid"] and kind == getattr(backend, "device_type", None)
                card = monitor_row(rank["device"], readings) if same else None
                if card is not None:
                    pids[card["index"]][rank["pid"]] = None
            for card in readings:
                on_card = [pid for pid in pids[card["index"]] if _parent(pid) not in pids[card["index"]]]
                by_pid = {rank["pid"]: rank["rank"] for rank in ranks}
                users = [{"pid": pid, "user": _user(pid), "rank": by_pid.get(pid)} for pid in on_card]
                cards.append({"backend": backend.name, **card, "processes": users})
        usage = [card.get("utilization_percent") for card in cards]
        busy = any(percent is not None and percent >= _IDLE_PERCENT for percent in usage)
        for card, percent in zip(cards, usage):
            card["idle"] = busy and percent is not None and percent < _IDLE_PERCENT
        return cards


def _describe(folder: RunFolder, beats: Mapping[int, Heartbeat]) -> tuple[str, str]:
    """Status and progress of a run, or how it has ended."""
    has_begun = any(is_alive(beat.pid) for beat in beats.values())
    holder = None if has_begun else live_holder(folder.path)
    if holder is not None and not (beats or folder.metrics.is_file()):
        return "running", f"no step yet; started by {holder}"
    if has_begun or holder is not None:
        train = [record for record in folder.records(TAIL_BYTES) if record.get("samples_per_second")]
        speed = f"  {train[-1]['samples_per_second']:,.0f} samples/s" if train else ""
        return "running", progress_of(folder) + speed
    run = read_run(folder.path, folder.path.name)
    if run.metric is None:
        return run.status, run.error or ""
    metric = f"{run.metric_name} {console.format_metric(run.metric)} on {run.result.get('measured_on')}"
    return run.status, f"{metric}, {run.result.get('steps')} steps in {run.numbers.get('wall_s', 0):.0f} s"


def _parent(pid: int) -> int:
    """The parent of a process, such as the rank of a loader process; 0: not known."""
    return int((proc_stat(pid) or ["", "0"])[1])


def _user(pid: int) -> str | None:
    """Name of a process's owner; None: the process has ended, or is of another container."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        return None
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)


def _draw(seen: Mapping[str, Any]) -> Iterator[Any]:
    """What :meth:`_Watcher.read` has returned, as lines and tables of rich."""
    from rich.text import Text

    here = socket.gethostname()
    if seen["run"] is not None:
        yield Text(console.printable(f"{console.display_path(Path(seen['run']))}: {seen['status']}  {seen['detail']}"))
    ranks = [{**rank, "pid": rank["pid"] and str(rank["pid"])} for rank in seen["ranks"]]
    if ranks:
        for rank in ranks:
            speed = rank.pop("steps_per_second")
            rank["steps/s"] = None if speed is None else f"{speed:.3g}"
        if all(rank["host"] == here for rank in ranks):
            ranks = [{**rank, "host": None} for rank in ranks]
        yield as_rich(Table.of(ranks, ["failed" if rank["stage"] == "gone" else "" for rank in ranks]))
        away = sorted({rank["host"] for rank in ranks} - {here, None})
        if away:
            yield Text(f"ranks and cards of {', '.join(away)} are shown by task=watch there")
    if seen["cards"]:
        if ranks:
            yield Text()
        rows = [_card_row(card) for card in seen["cards"]]
        yield as_rich(Table.of(rows, ["yellow" if card["idle"] else "" for card in seen["cards"]]))
    if seen["others"]:
        first, *more = seen["others"]
        also = console.display_path(Path(first)) + f" and {len(more)} more" * bool(more)
        yield Text(console.printable(f"also running here: {also}; run=<a run folder> chooses"))


def _card_row(card: Mapping[str, Any]) -> dict[str, Any]:
    percent, heat, power = (card.get(key) for key in ("utilization_percent", "temperature_c", "power_w"))
    used, total = (card.get(f"memory_{key}") for key in ("used", "total"))
    capacity = console.format_bytes(total)
    users = [
        f"{'' if user['rank'] is None else 'rank {} '.format(user['rank'])}{user['user'] or '?'} {user['pid']}"
        for user in card["processes"]
    ]
    return {
        "card": str(card["index"]),
        "name": card.get("name"),
        "use": None if percent is None else f"{percent:.0f} %" + " idle" * card["idle"],
        "memory": None if total is None else (used is not None) * f"{console.format_bytes(used)} of " + capacity,
        "temp": None if heat is None else f"{heat:.0f} C",
        "power": None if power is None else f"{power:.0f} W",
        "processes": ", ".join(users),
    }
