"""The class of whole images: a table of all, and a sheet of some to look at."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import torch

from exp.csvfile import csv_content
from exp.engine.plots import PictureWriter
from exp.runfolder import write_atomically
from exp.vision.draw.scene import Scene, scene_tile
from exp.vision.draw.sheet import sheet, spread
from exp.vision.predict.inputs import Failure, Input, each_of_mine
from exp.vision.predict.raster import MOST_PATCHES, check_patches, check_pixels, patches_in
from exp.vision.predict.scores import scene_scores

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["SceneReader", "predict_scenes", "predictions_csv"]

_TOP = 3


def predict_scenes(
    session: Session, data: Any, model: Any, inputs: Sequence[Input], truths: Sequence[str] | None
) -> tuple[dict[str, float], list[str], list[Failure]]:
    """Predict this rank's share of the images; rank 0 writes the table and the sheet.

    Args:
        session: the session.
        data: has ``classes``, ``read`` for a file, and ``prepare`` for an image.
        model: gives logits of images.
        inputs: all images, the same on every rank.
        truths: the class of each, where they are known.

    Returns:
        Metrics; on rank 0 the files, below the run folder; the images of all ranks that could not be used.
    """
    reader = SceneReader(session, data, model, truths)
    began = time.perf_counter()
    failures = each_of_mine(session, inputs, reader.add)
    reader.flush()
    seconds = max(session.distributed.gather(time.perf_counter() - began))
    gathered = session.distributed.gather((reader.scenes, failures))
    scenes = [scene for _, scene in sorted(pair for part, _ in gathered for pair in part.items())]
    failed = [failure for _, part in gathered for failure in part]
    metrics: dict[str, float] = {"images": len(scenes), "failed": len(failed)}
    metrics["images_per_second"] = len(scenes) / seconds
    if truths is not None and scenes:
        metrics["accuracy"] = sum(scene.best[0][0] == scene.truth for scene in scenes) / len(scenes)
    if not session.distributed.is_main or not scenes:
        return metrics, [], failed
    write_atomically(session.folder.path / "predictions.csv", predictions_csv(scenes))
    shown = [scenes[number] for number in spread(len(scenes), session.config.task.max_images)]
    if not shown:
        return metrics, ["predictions.csv"], failed
    tiles = [scene_tile(data.read(scene.file), scene) for scene in shown]
    page = sheet(tiles, title=f"{len(shown)} of {len(scenes)} predictions")
    return metrics, ["predictions.csv", *PictureWriter(session).write("plots/predictions.png", page)], failed


class SceneReader:
    """Predicts images batch by batch; those of one batch have one size.

    Attributes:
        scenes: predictions by the number of the image.
    """

    def __init__(self, session: Session, data: Any, model: Any, truths: Sequence[str] | None) -> None:
        self.data = data
        self.truths = truths
        self.model = model
        self.scores = scene_scores(session, model)
        self.batch_size: int = data.eval_batch_size
        self.scenes: dict[int, Scene] = {}
        self._pending: list[tuple[int, Input, np.ndarray]] = []

    def add(self, number: int, entry: Input) -> None:
        """Read an image; predict when a batch is full.

        Raises:
            DataError: it cannot be read.
        """
        check_pixels(entry.path)
        read, missing = self.data.read.with_missing(entry.path)
        pixels = self.data.prepare(read, entry.path, missing)
        check_patches(entry.path, self.model, *pixels.shape[:2])
        together = (len(self._pending) + 1) * patches_in(self.model, *pixels.shape[:2])
        if self._pending and (
            (self._pending[0][2].shape, self._pending[0][2].dtype) != (pixels.shape, pixels.dtype)
            or together > MOST_PATCHES
        ):
            self.flush()
        self._pending.append((number, entry, pixels))
        if len(self._pending) == self.batch_size:
            self.flush()

    def flush(self) -> None:
        """Predict what has been read."""
        if not self._pending:
            return
        batch = torch.from_numpy(np.stack([pixels.transpose(2, 0, 1) for _, _, pixels in self._pending]))
        classes = self.data.classes
        values, indices = self.scores(batch).topk(min(_TOP, len(classes)), dim=1)
        for (number, entry, _), shares, best in zip(self._pending, values.tolist(), indices.tolist()):
            named = [(classes[index], share) for index, share in zip(best, shares)]
            self.scenes[number] = Scene(str(entry.path), named, None if self.truths is None else self.truths[number])
        self._pending.clear()


def predictions_csv(scenes: Sequence[Scene]) -> bytes:
    """``file,class,probability,class_2,probability_2,class_3,probability_3``, and ``truth`` where it is known."""
    ranks = len(scenes[0].best)
    header = ["file"]
    for rank in range(1, ranks + 1):
        header += ["class", "probability"] if rank == 1 else [f"class_{rank}", f"probability_{rank}"]
    known = scenes[0].truth is not None
    rows: list[list[object]] = [[*header, "truth"] if known else [*header]]
    for scene in scenes:
        cells = [cell for name, share in scene.best for cell in (name, f"{share:.4f}")]
        rows.append([scene.file, *cells, *([scene.truth] if known else [])])
    return csv_content(rows)
