"""Progress of runs that are not in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exp import console
from exp.runs.folder import TAIL_BYTES

if TYPE_CHECKING:
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder

__all__ = ["ProgressDisplay", "progress_of"]


def progress_of(folder: RunFolder) -> str:
    """``step 120  loss 0.4312`` from the last record in ``metrics.jsonl``; empty before the first."""
    for record in reversed(folder.records(TAIL_BYTES)):
        values = [f"{name} {value:.4f}" for name, value in record.items() if name in ("loss", "metric")]
        if record.get("split") == "train" and values:
            return f"step {record['step']}  {'  '.join(values)}"
        if record.get("split") in ("val", "test"):
            return f"step {record['step']}  {record['split']}"
    return ""


class ProgressDisplay:
    """Receives progress and outcomes of runs. This class shows a single run: one line, redrawn on a terminal.

    Attributes:
        live: rich's live display; None without a terminal.
        rows: the rows of the display, by number of the run.
    """

    def __init__(self) -> None:
        self.console = console.make_console()
        self.live: Any = None
        self.rows: dict[int, Any] = {}
        self._printed_state = ""

    def __enter__(self) -> ProgressDisplay:
        if self.console.is_terminal:
            from rich.progress import Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
            self.live = Progress(*columns, console=self.console, transient=True)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def draw(self, number: int, text: str) -> None:
        """Draw a row and the time since it was first drawn; only on a terminal."""
        if self.live is not None:
            if number not in self.rows:
                self.rows[number] = self.live.add_task("")
            self.live.update(self.rows[number], description=text)

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def state(self, number: int, text: str) -> None:
        """Show the state of a run; called often. Without a terminal, print it when the part before the figures changes.

        Args:
            number: of the run, in the order in which the runs were given.
            text: the state, and after two spaces the figures.
        """
        self.draw(number, text)
        if self.live is None and text.partition("  ")[0] != self._printed_state:
            self._printed_state = text.partition("  ")[0]
            self.say(self._printed_state)

    def ended(self, number: int, outcome: Outcome) -> None:
        """Called when a run has ended; shows nothing here, because a single run has its own final report."""
