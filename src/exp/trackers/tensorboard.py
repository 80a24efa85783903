"""TensorBoard: event files in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers import TrackedRun, Tracker, final_metrics

__all__ = ["TensorboardTracker"]


class TensorboardTracker(Tracker):
    """Writes event files to ``tensorboard`` in the run folder; ``--logdir`` of a sweep's folder shows all its runs."""

    requires: ClassVar[Sequence[str]] = ["tensorboard"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Open a new event file; TensorBoard shows all files of a run as one. A new run logs its configuration as text.

        Returns:
            The folder of the event files.
        """
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer, self._keys = SummaryWriter(str(folder)), run.keys
        self.address = f"tensorboard --logdir {folder}"  # the command that shows it
        if known is None:
            rows = [f"| {key} | {value} |" for key, value in run.keys.items()]
            self._writer.add_text("configuration", "\n".join(["| key | value |", "|---|---|", *rows]))
        return str(folder)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write buffered events to the disk."""
        self._writer.flush()

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """Add pictures and status; a completed run also gets configuration and final metrics in the HPARAMS tab."""
        import numpy as np
        from PIL import Image

        for picture in pictures:
            pixels = np.asarray(Image.open(picture).convert("RGB"))
            self._writer.add_image(f"plots/{picture.stem}", pixels, int(result.get("steps") or 0), dataformats="HWC")
        if status == "completed":
            self._writer.add_hparams(dict(self._keys), final_metrics(result, "final/"), run_name=".")
        self._writer.add_text("status", status)
        self._writer.close()
