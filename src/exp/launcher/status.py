"""How a run elsewhere is doing, in one line: read in its folder, shown on the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from exp import console
from exp.launcher.base import Watcher
from exp.launcher.outcome import Outcome
from exp.runfolder import last_records

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.runfolder import RunFolder

__all__ = ["StatusLine", "clock", "progress_of", "time_left"]


def progress_of(folder: RunFolder) -> str:
    """``step 120  loss 0.4312`` from the last reading in ``metrics.jsonl``; empty before the first."""
    for record in last_records(folder):
        values = [f"{name} {value:.4f}" for name, value in record.items() if name in ("loss", "metric")]
        if record.get("split") == "train" and values:
            return f"step {record['step']}  {'  '.join(values)}"
        if record.get("split") in ("val", "test"):
            return f"step {record['step']}  {record['split']}"
    return ""


def time_left(folder: RunFolder, config: ExpConfig) -> str:
    """``0:12:30 left`` of a training at its last speed, validations aside; empty where that is not known yet.

    How many steps an epoch has is known once one is complete, where ``max_steps`` does not say how many there are.
    """
    records = list(last_records(folder))
    trained = next((each for each in records if each.get("split") == "train"), None)
    if trained is None or not trained.get("samples_per_second") or not config.global_batch_size:
        return ""
    complete = next((each for each in records if each.get("split") == "val" and each.get("epoch")), None)
    totals = [config.max_steps] if config.max_steps is not None else []
    if complete is not None and config.max_epochs is not None:
        totals.append(round(complete["step"] / complete["epoch"]) * config.max_epochs)
    if not totals:
        return ""
    steps = max(min(totals) - trained["step"], 0)
    return f"{clock(steps * config.global_batch_size / trained['samples_per_second'])} left"


class StatusLine(Watcher):
    """One run: a line that is drawn again on a terminal, and a line per change of state elsewhere."""

    def __init__(self) -> None:
        self._console = console.make_console()
        self._status: Any = None
        self._shown = ""
        self._began = time.monotonic()

    def __enter__(self) -> StatusLine:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def state(self, number: int, text: str) -> None:
        """Show the state; without a terminal, only what is in front of the figures, when it changes."""
        if self._status is not None:
            self._status.update(f"{text}  {clock(time.monotonic() - self._began)}")
            return
        short = text.partition("  ")[0]
        if short != self._shown:
            self._shown = short
            self.say(short)

    def ended(self, number: int, outcome: Outcome) -> None:
        """The report says it."""


def clock(seconds: float) -> str:
    """``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
