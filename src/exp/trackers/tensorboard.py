"""TensorBoard: event files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Sequence

from exp.trackers.base import TrackedRun, Tracker, final_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorboardTracker"]


class TensorboardTracker(Tracker):
    """Event files in ``tensorboard`` of the run folder: a sweep's folder shows all its runs.

    Args:
        folder: where they go; None: into the run folder.
    """

    requires: ClassVar[Mapping[str, str]] = {"tensorboard": "tensorboard"}

    def __init__(self, folder: str | None = None) -> None:
        self.folder = Path(folder).absolute() if folder else None
        self._keys: Mapping[str, Any] = {}
        self._writer: SummaryWriter | None = None

    @property
    def writer(self) -> SummaryWriter:
        """Of torch; another file each time that the run goes on, which TensorBoard shows as one."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder))
        return self._writer

    def open(self, run: TrackedRun, known: str | None) -> str:
        """The configuration goes into the tab of texts."""
        self.folder = Path(known) if known else self.folder or run.folder / "tensorboard"
        self.address = f"tensorboard --logdir {self.folder}"  # the command that shows it
        self._keys = run.keys
        if known is None:
            rows = [f"| {key} | {value} |" for key, value in run.keys.items()]
            self.writer.add_text("configuration", "\n".join(["| key | value |", "|---|---|", *rows]))
        return str(self.folder)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Scalars."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """To the disk."""
        self.writer.flush()

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """With the pictures, and the configuration beside the final metrics in the tab of hyperparameters."""
        import numpy as np
        from PIL import Image

        for picture in pictures:
            with Image.open(picture) as image:
                pixels = np.asarray(image.convert("RGB"))
            self.writer.add_image(f"plots/{picture.stem}", pixels, int(result.get("steps") or 0), dataformats="HWC")
        if status == "completed":
            self.writer.add_hparams(dict(self._keys), final_metrics(result, "final/"), run_name=".")
        self.writer.add_text("status", status)
        self.writer.close()
        self._writer = None
