"""Predictions for images: of the files that the user names, or else of the test split of the data."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.data.base import Prediction
from exp.errors import ConfigError, UnavailableError
from exp.vision.predict.inputs import Input, find_images, named, report_failures, tell_inputs
from exp.vision.predict.scenes import predict_scenes
from exp.vision.predict.segmentation import predict_segmentation

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["check", "chosen", "predict"]


def predict(session: Session, data: Any, model: Any) -> Prediction:
    """Predict every image, spread over the ranks file by file.

    Segmentation writes ``predictions/{classes,overlays,geo,probabilities}/<name>`` and ``predictions/areas.csv``;
    scenes write ``predictions.csv`` and ``plots/predictions.png``.

    An image that cannot be read does not stop the others, which may be hours of work; but the run must not look like a
    success to the script that called it: it fails at its end, unless ``task.on_error=skip``.

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
    task = session.config.task
    check(task)
    inputs, truths = chosen(task, data)
    if data.per_pixel:
        metrics, files, failures = predict_segmentation(session, data, model, inputs)
    else:
        metrics, files, failures = predict_scenes(session, data, model, inputs, truths)
    report_failures(failures, len(inputs), task.on_error)
    data.input_record = tell_inputs(session, inputs, failures)
    return Prediction(metrics, files, "predictions")


def chosen(task: Any, data: Any) -> tuple[list[Input], list[str] | None]:
    """The images to work on: those of ``task.input``, or else the test split.

    Returns:
        The files, and for scenes of the test split the class of each.

    Raises:
        ConfigError: ``task.input`` names no image.
    """
    if task.input is not None:
        return named(find_images(task.input)), None
    inputs = named([Path(sample[0]) for sample in data.test.samples])
    return inputs, None if data.per_pixel else [data.classes[sample[1]] for sample in data.test.samples]


def check(task: Any) -> None:
    """Refuse values of ``task`` that mean nothing.

    Raises:
        ConfigError: names the key.
        UnavailableError: a package that it needs is not installed.
    """
    if task.on_error not in ("raise", "skip"):
        raise ConfigError(f"task.on_error={task.on_error} is not one of raise, skip")
    if task.get("probabilities") and importlib.util.find_spec("rasterio") is None:
        raise UnavailableError(
            "task.probabilities=true needs the package rasterio, which is not installed: "
            "pip install 'exp-accelerators[geo]', or leave it out"
        )
