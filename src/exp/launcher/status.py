"""What the terminal shows of runs elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from exp import console
from exp.launcher.outcome import Outcome
from exp.runs.folder import last_records

if TYPE_CHECKING:
    from exp.runs.folder import RunFolder

__all__ = ["Watcher", "clock", "progress_of"]


def progress_of(folder: RunFolder) -> str:
    """``step 120  loss 0.4312`` from the last reading in ``metrics.jsonl``; empty before the first."""
    for record in last_records(folder):
        values = [f"{name} {value:.4f}" for name, value in record.items() if name in ("loss", "metric")]
        if record.get("split") == "train" and values:
            return f"step {record['step']}  {'  '.join(values)}"
        if record.get("split") in ("val", "test"):
            return f"step {record['step']}  {record['split']}"
    return ""


class Watcher:
    """Receives progress and outcomes; this one shows a single run: on a terminal, a line that is drawn again."""

    def __init__(self) -> None:
        self.console = console.make_console()
        self.live: Any = None
        """What is drawn again and again; None without a terminal."""
        self.began = time.monotonic()
        self._shown = ""

    def __enter__(self) -> Watcher:
        if self.console.is_terminal:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def state(self, number: int, text: str) -> None:
        """How a run is doing; called often. Without a terminal, changes are printed, less their figures."""
        if self.live is not None:
            self.live.update(f"{text}  {clock(time.monotonic() - self.began)}", refresh=True)
        elif text.partition("  ")[0] != self._shown:
            self._shown = text.partition("  ")[0]
            self.say(self._shown)

    def ended(self, number: int, outcome: Outcome) -> None:
        """A run has ended; of a single one the report at the end says it."""


def clock(seconds: float) -> str:
    """``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
