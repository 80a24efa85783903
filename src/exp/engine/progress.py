"""The progress of a training on the terminal."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


_REDRAW_SECONDS = 0.25  # of the bar on a terminal
_LINE_SECONDS = 30.0  # between two lines elsewhere


class Progress:
    """Shows the progress of training on rank 0: a bar on a terminal, else a line per validation and every 30 seconds.

    Args:
        console: where to print; None: print nothing (other ranks).
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self._loop: Any = None
        self._bar: Any = None
        self._drawn, self._started_at, self._step, self._text = 0.0, (0.0, 0), 0, ""

    def start(self, loop: Any, first: str) -> None:
        """Show the bar.

        Args:
            loop: the :class:`exp.engine.loops.TrainLoop`.
            first: text until the first losses are known.
        """
        self._loop, self._step, self._drawn = loop, loop.iter, time.monotonic()
        self._started_at = (self._drawn, loop.iter)
        if self.console is None or not self.console.is_terminal:
            return
        from rich import progress

        bar = progress.BarColumn(bar_width=20), progress.TaskProgressColumn()
        columns = "{task.description}", *bar, "{task.fields[text]}"
        # No refresh thread: it would interrupt the training loop ten times a second.
        self._bar = progress.Progress(*columns, console=self.console, auto_refresh=False, transient=True)
        self._bar.add_task("epoch", total=loop.max_iters, completed=loop.iter, text=first)
        self._bar.start()

    def step(self, step: int) -> None:
        """Show the number of completed steps; redraws at most four times a second."""
        self._step = step
        if self._bar is not None and (
            time.monotonic() - self._drawn >= _REDRAW_SECONDS or step == self._loop.max_iters
        ):
            self._show()

    def set_text(self, text: str, line: bool) -> None:
        """Change the text; if there is no bar, print it as a line if ``line`` is set, or if the last line is old."""
        self._text = text
        if line or (self._bar is None and time.monotonic() - self._drawn >= _LINE_SECONDS):
            self._show()

    def _show(self) -> None:
        if self.console is None or self._loop is None:
            return
        self._drawn, loop, (started, first) = time.monotonic(), self._loop, self._started_at
        epochs, rest = divmod(self._step + loop.step_offset, loop.steps_per_epoch)
        epoch, text = f"epoch {max(epochs + bool(rest), 1)}/{loop.max_epochs}", self._text
        if self._step > first:  # an estimate without early stopping; the mean time per step includes validation
            seconds = (self._drawn - started) / (self._step - first) * (loop.max_iters - self._step)
            text += f"  ETA {timedelta(seconds=round(seconds))}"
        if self._bar is None:
            position = f"{epoch}  step {self._step}" if rest else epoch
            self.console.print(f"{position}  {text}", soft_wrap=True)
        else:
            self._bar.update(self._bar.task_ids[0], completed=self._step, description=epoch, text=text, refresh=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
