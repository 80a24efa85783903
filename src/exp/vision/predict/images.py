"""Predictions for images: of the files that the user names, or else of the test split of the data."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import torch

from exp.data.base import Prediction
from exp.engine.outputs import PictureWriter
from exp.runs.files import csv_content, write_atomically
from exp.vision.figures import Scene, scene_tile, sheet, spread
from exp.vision.pictures import shrunk, to_rgb
from exp.vision.predict.inputs import Failure, Input, chosen, each_of_mine, model_scores, report_failures
from exp.vision.predict.raster import check_patches, check_pixels
from exp.vision.predict.segmentation import predict_segmentation

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["predict", "predict_scenes", "predictions_csv"]

_TOP = 3


def predict(session: Session, data: Any, model: Any) -> Prediction:
    """Predict every image, spread over the ranks file by file.

    Segmentation writes ``predictions/{classes,overlays,geo}/<name>`` and ``predictions/areas.csv``;
    scenes write ``predictions.csv`` and ``plots/predictions.png``.

    An image that cannot be read does not stop the others, which may be hours of work; but the run must not look like a
    success to the script that called it: it fails at its end.

    Args:
        session: the session.
        data: an image data set of :mod:`exp.vision.data`.
        model: on the session's device, in eval mode.

    Returns:
        Metrics, and the files of all ranks below the run folder.

    Raises:
        ConfigError: a key of ``task`` is wrong, or there are no images.
        RunError: images could not be used; the others have been predicted.
    """
    inputs, truths = chosen(session.config.task, data)
    if data.per_pixel:
        metrics, files, failures = predict_segmentation(session, data, model, inputs)
    else:
        metrics, files, failures = predict_scenes(session, data, model, inputs, truths)
    report_failures(failures, len(inputs))
    return Prediction(metrics, files, "predictions")


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
    scenes: dict[int, Scene] = {}
    waiting: list[tuple[int, Input, np.ndarray]] = []

    def add(number: int, entry: Input) -> None:
        check_pixels(entry.path)
        read, missing = data.read.with_missing(entry.path)
        pixels = data.prepare(read, entry.path, missing)
        check_patches(entry.path, model, *pixels.shape[:2])
        if waiting and (waiting[0][2].shape, waiting[0][2].dtype) != (pixels.shape, pixels.dtype):
            flush()
        waiting.append((number, entry, pixels))
        if len(waiting) == data.eval_batch_size:
            flush()

    def flush() -> None:
        if not waiting:
            return
        batch = torch.from_numpy(np.stack([pixels.transpose(2, 0, 1) for *_, pixels in waiting]))
        shares = torch.softmax(model_scores(session, model, batch), dim=-1).cpu()
        values, indices = shares.topk(min(_TOP, len(data.classes)), dim=1)
        for (number, entry, _), several, best in zip(waiting, values.tolist(), indices.tolist()):
            named = [(data.classes[index], share) for index, share in zip(best, several)]
            scenes[number] = Scene(str(entry.path), named, None if truths is None else truths[number])
        waiting.clear()

    began = time.perf_counter()
    failures = each_of_mine(session, inputs, add)
    flush()
    seconds = max(session.distributed.gather(time.perf_counter() - began))
    gathered = session.distributed.gather((scenes, failures))
    everything = [scene for _, scene in sorted(pair for part, _ in gathered for pair in part.items())]
    failed = [failure for _, part in gathered for failure in part]
    metrics: dict[str, float] = {"images": len(everything), "failed": len(failed)}
    metrics["images_per_second"] = len(everything) / seconds
    if truths is not None and everything:
        metrics["accuracy"] = sum(scene.best[0][0] == scene.truth for scene in everything) / len(everything)
    files: list[str] = []
    if session.distributed.is_main and everything:
        write_atomically(session.folder.path / "predictions.csv", predictions_csv(everything))
        files.append("predictions.csv")
        shown = [everything[number] for number in spread(len(everything), session.config.task.max_images)]
        if shown:
            tiles = [scene_tile(to_rgb(shrunk(data.read(scene.file), 512)), scene) for scene in shown]
            page = sheet(tiles, title=f"{len(shown)} of {len(everything)} predictions")
            files += PictureWriter(session).write("plots/predictions.png", page)
    return metrics, files, failed


def predictions_csv(scenes: Sequence[Scene]) -> bytes:
    """``file,class,probability,class_2,probability_2,class_3,probability_3``, and ``truth`` where it is known."""
    ends = ["", *(f"_{rank}" for rank in range(2, len(scenes[0].best) + 1))]
    known = scenes[0].truth is not None
    rows: list[list[object]] = [
        ["file", *(name + end for end in ends for name in ("class", "probability")), *(["truth"] if known else [])]
    ]
    for scene in scenes:
        cells = [cell for name, share in scene.best for cell in (name, f"{share:.4f}")]
        rows.append([scene.file, *cells, *([scene.truth] if known else [])])
    return csv_content(rows)
