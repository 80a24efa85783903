"""What the user sees while a run trains: one bar on a terminal, one line per epoch elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Mapping

from exp.console import waited
from exp.result import number_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress"]

_REDRAW_SECONDS = 0.25


class Progress:
    """Progress of training, on rank 0.

    Args:
        console: where to draw; None: draw nothing (other ranks).
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self._bar: Any = None
        self._task = 0
        self._drawn = 0.0
        self._text = ""
        self._max_epochs = 0
        self._epoch_started = 0.0
        self._steps_per_epoch = 1
        self._max_steps = 0
        self._begun: tuple[float, int] = (0.0, 0)
        self._step = self._ahead = 0

    def start(
        self, max_steps: int, max_epochs: int, step: int, steps_per_epoch: int, ahead: int = 0, first: str = ""
    ) -> None:
        """Begin.

        Args:
            max_steps: to train in all.
            max_epochs: likewise.
            step: those that are done.
            steps_per_epoch: of the data.
            ahead: :attr:`exp.engine.loops.TrainLoop.ahead`.
            first: says what is waited for until the first step is done.
        """
        self._max_epochs, self._steps_per_epoch, self._max_steps = max_epochs, steps_per_epoch, max_steps
        self._step, self._ahead = step, ahead
        self._begun = (time.monotonic(), step)
        if self.console is None or not self.console.is_terminal:
            return
        from rich import progress

        waited()
        # No refresh thread: it would take the interpreter from the training loop ten times a second.
        bar = progress.Progress(
            progress.TextColumn("epoch {task.fields[epoch]}"),
            progress.BarColumn(bar_width=20),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[text]}"),
            progress.TextColumn("{task.fields[eta]}"),
            console=self.console,
            auto_refresh=False,
            transient=True,
        )
        self._task = bar.add_task("train", total=max_steps, completed=step, epoch="", text=first, eta="")
        bar.start()
        self._bar = bar

    def step(self, step: int) -> None:
        """One step done; redraws four times a second at most."""
        self._step = step
        if self._bar is None:
            return
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_SECONDS or step == self._max_steps:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        epoch = min((self._step + self._ahead) // self._steps_per_epoch + 1, self._max_epochs)
        bar = self._bar
        bar.update(
            self._task,
            completed=self._step,
            epoch=f"{epoch}/{self._max_epochs}",
            text=self._text,
            eta=self.eta(),
        )
        bar.refresh()

    def eta(self) -> str:
        """Time left if every remaining epoch is trained, validation included; early stopping may end it before."""
        begun, first = self._begun
        if self._step <= first:
            return ""
        left = (time.monotonic() - begun) / (self._step - first) * (self._max_steps - self._step)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"ETA {hours}:{minutes:02d}:{seconds:02d}"

    def losses(self, losses: Mapping[str, float], lr: float, samples_per_second: float) -> None:
        """Newest readings."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self._text = f"{shown}  lr {lr:.1e}  {samples_per_second:,.0f} samples/s"

    def validated(self, metrics: Mapping[str, float], units: Mapping[str, str] | None = None) -> None:
        """An epoch, or the part of one that ``max_steps`` left, has been validated.

        Args:
            metrics: by name.
            units: what values some of them are of, where their names do not say it.
        """
        if self.console is None:
            return
        said = {name: f" ({unit})" for name, unit in (units or {}).items()}
        shown = "  ".join(f"val_{name} {number_text(value)}{said.get(name, '')}" for name, value in metrics.items())
        if self._bar is None:
            epochs, rest = divmod(self._step + self._ahead, self._steps_per_epoch)
            place = f"epoch {epochs + bool(rest)}/{self._max_epochs}" + (f"  step {self._step}" if rest else "")
            self.console.print(f"{place}  {self._text}  {shown}  {self.eta()}", soft_wrap=True)
        else:
            self._text = f"{self._text.split('  val_')[0]}  {shown}"
            self._draw()

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
