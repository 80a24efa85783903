"""task=predict for images: the files that the user names, or the test split of the data."""

from __future__ import annotations

import functools
import glob
import importlib.util
import logging
import os
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

import numpy as np
import torch

from exp.data.base import Prediction
from exp.engine.result import write_picture
from exp.engine.wrapper import forward, preprocessed
from exp.errors import ConfigError, DataError, RunError, UnavailableError
from exp.runs.files import csv_content, write_atomically
from exp.vision.data.layouts import NAMED_FILES, SUFFIXES, images_below, unread_note
from exp.vision.maps import (
    NO_DATA,
    count_labels,
    encode_shares,
    is_georeferenced,
    label_map,
    new_raster,
    shares_profile,
    write_class_tiff,
    write_png,
)
from exp.vision.mosaic import mosaic_xml
from exp.vision.plots import ScenePrediction, contact_sheet, draw_overlay, draw_scene_tile, evenly_spaced, panels
from exp.vision.polygons import DRIVERS, write_polygons
from exp.vision.raster import check_pixels, ground_resolution, open_image
from exp.vision.rendering import colorize, resize_labels, shrink, to_rgb, value_labels
from exp.vision.tiling import Tiling

if TYPE_CHECKING:
    from exp.session import Session
    from exp.vision.raster import DecodedImage, RasterImage
    from exp.vision.tiling import LogitsFunction

__all__ = ["Input", "find_images", "map_rank_shard", "name_inputs", "predict", "predictions_csv", "report_failures",
           "resolve_inputs"]  # fmt: skip

_NOTES = 5  # notes on images that are shown
_TOP = 3  # classes of a scene that are listed
_OVERLAY = 4096  # most pixels of the longer side of an overlay
_WINDOW, _OVERLAP = 2048, 0.25  # for a model without a tiling, which is evaluated on whole images

logger = logging.getLogger(__name__)


class Input(NamedTuple):
    """One image file.

    Attributes:
        path: of the file.
        name: of its results: the stem of the file, with parts of its path if stems repeat.
    """

    path: Path
    name: str


def resolve_inputs(session: Session, data: Any) -> tuple[list[Input], list[str] | None]:
    """The images to work on: those of ``task.input``, or the test split. Reports files in a folder that are not read.

    Returns:
        The files; and for scenes of the test split the class of each, else None.

    Raises:
        ConfigError: ``task.input`` names no image.
    """
    pattern = session.config.task.input
    if pattern is not None:
        note = unread_note(Path(pattern).expanduser())
        if note is not None:
            session.print(note)
        return name_inputs(find_images(pattern)), None
    inputs = name_inputs([Path(sample[0]) for sample in data.test.samples])
    return inputs, None if data.per_pixel else [data.classes[sample[1]] for sample in data.test.samples]


def find_images(pattern: str) -> list[Path]:
    """The image files of ``task.input``, sorted.

    Args:
        pattern: a file with any suffix; a folder, which is searched recursively; or a glob, also with ``**``.

    Raises:
        ConfigError: there are no image files.
    """
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = [Path(file) for file in images_below(path)]
        what = f"a folder without images ({', '.join(SUFFIXES)})"
    else:
        files = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]  # noqa: PTH207 - absolute patterns too
        what = "neither a file nor a folder, and as a glob it matches no file"
    if not files:
        raise ConfigError(f"task.input={pattern} is {what}; give an image, a folder of images or a glob, in quotes")
    return sorted(files)


def name_inputs(paths: Sequence[Path]) -> list[Input]:
    """A unique name for each file, also on file systems that ignore case.

    A stem that occurs once is the name. For a stem that repeats, the name is the path below the common folder of all
    files, with ``_`` between its parts and before the suffix; names that are still equal get a number.
    """
    count = Counter(path.stem.lower() for path in paths)
    shared = os.path.commonpath([path.absolute().parent for path in paths])
    taken, inputs = set(), []
    for path in paths:
        name = path.stem
        if count[name.lower()] > 1:
            name = "_".join(path.absolute().relative_to(shared).with_suffix("").parts) + path.suffix.replace(".", "_")
        unique, number = name, 2
        while unique.lower() in taken:
            unique, number = f"{name}_{number}", number + 1
        taken.add(unique.lower())
        inputs.append(Input(path, unique))
    return inputs


def predict_logits(session: Session, model: Any, image: torch.Tensor) -> torch.Tensor:
    """Logits of images, float32, computed without gradients and in the run's precision.

    Args:
        session: the session.
        model: on its device.
        image: (B, C, H, W), 0..255, on any device.

    Returns:
        (B, K), or (B, K, H, W), on the model's device.
    """
    batch = preprocessed(model, {"image": image.to(session.device)})
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        logits: torch.Tensor = forward(model, batch, "tensor").float()
    session.backend.end_batch()
    return logits


def map_rank_shard(
    session: Session,
    inputs: Sequence[Input],
    process: Callable[[int, Input], Any],
    results: dict[int, Any],
    finish: Callable[[], Any] = lambda: None,
) -> tuple[list[Any], list[str], float]:
    """Process this rank's share of the files: every ``world_size``-th, since neighboring files are often alike in size.

    An image that cannot be read is logged, and the others are processed; other errors are raised. A collective.

    Args:
        session: the session.
        inputs: all files, the same on every rank.
        process: called with the number of a file and the file.
        results: results of this rank by number of the file, which ``process`` or ``finish`` have put there at the end.
        finish: called after the last file.

    Returns:
        Of all ranks: the results in the order of the files; the images that could not be used; and the seconds of the
        slowest rank.
    """
    start, failures = time.perf_counter(), []
    for number in range(session.info.rank, len(inputs), session.info.world_size):
        try:
            process(number, inputs[number])
        except DataError as error:
            logger.error("cannot use %s: %s", inputs[number].path, error.headline)
            failures.append(f"{inputs[number].path}: {error.headline}")
    finish()
    gathered = session.distributed.gather((results, failures, time.perf_counter() - start))
    ordered = [result for _, result in sorted(pair for shard, *_ in gathered for pair in shard.items())]
    all_failures = [failure for _, shard_failures, _ in gathered for failure in shard_failures]
    return ordered, all_failures, max(seconds for *_, seconds in gathered)


def report_failures(failures: Sequence[str], total: int) -> None:
    """Let a run fail at its end if images failed.

    Args:
        failures: of all ranks.
        total: number of all images.

    Raises:
        RunError: there are failures; the message names them.
    """
    if failures:
        lines = failures[:NAMED_FILES]
        more = [f"and {len(failures) - NAMED_FILES} more; all are in the logs"][: len(failures) > NAMED_FILES]
        hint = "the others are done. Repair or remove these" if len(failures) < total else ""
        raise RunError(f"{len(failures)} of {total} images could not be used", hint, [*lines, *more])


def predict(session: Session, data: Any, model: Any) -> Prediction:
    """Predict every image; each rank takes a share of the files.

    Segmentation writes ``predictions/{classes,overlays}/<name>`` and ``predictions/areas.csv``, and what the keys ask
    for (:class:`exp.vision.config.PredictKeys`); regression ``predictions/{values,overlays}/<name>`` and
    ``predictions/values.csv``; scenes write ``predictions.csv`` and ``plots/predictions.png``.

    If an image cannot be read, the others are predicted all the same, which may be hours of work, and the run fails at
    its end.

    Args:
        session: the session.
        data: an image data set of :mod:`exp.vision.data`.
        model: on the session's device, in eval mode.

    Returns:
        Metrics, and the files of all ranks, relative to the run folder.

    Raises:
        ConfigError: a key of ``task`` is wrong, or there are no images.
        RunError: images could not be used; the others have been predicted.
    """
    _check_keys(session.config.task, data)
    inputs, truths = resolve_inputs(session, data)
    if session.config.task.mosaic:
        path = session.folder.path / "predictions" / "mosaic.vrt"
        paths = [image.path for image in inputs]
        session.distributed.on_main(lambda: write_atomically(path, mosaic_xml(paths).encode()))
        inputs = [Input(path, "mosaic")]
    if data.per_pixel:
        metrics, files, failures = predict_segmentation(session, data, model, inputs)
    else:
        metrics, files, failures = predict_scenes(session, data, model, inputs, truths)
    report_failures(failures, len(inputs))
    return Prediction(metrics, files, "predictions")


def _check_keys(task: Any, data: Any) -> None:
    """Refuse keys with unknown values, those of other data, and those whose packages are not installed."""
    wanted = [key for key in ("mosaic", "probabilities", "confidence", "polygons") if getattr(task, key)]
    choices = {"probability_dtype": ("uint8", "float16"), "polygons": (None, *DRIVERS)}
    for key, values in choices.items():
        if getattr(task, key) not in values:
            raise ConfigError(
                f"task.{key}={getattr(task, key)} is not one of {', '.join(map(str, filter(None, values)))}"
            )
    if wanted and not data.per_pixel:
        raise ConfigError(f"task.{wanted[0]} is for segmentation; these data have one label for each image")
    if data.per_pixel and not data.learns_classes:
        if wanted[task.mosaic :]:
            raise ConfigError(f"task.{wanted[-1]} is for classes; these data have a value for each pixel")
        wanted.append("name=predict")  # writes TIFFs of floating point
    modules = ["rasterio", "shapely", "pyogrio"][: 3 if task.polygons else bool(wanted)]
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        raise UnavailableError(
            f"task.{wanted[-1]} needs {', '.join(absent)}, not installed here: pip install 'exp-accelerators[geo]'"
        )


def predict_scenes(
    session: Session, data: Any, model: Any, inputs: Sequence[Input], truths: Sequence[str] | None
) -> tuple[dict[str, float], list[str], list[str]]:
    """Predict this rank's share of the images; rank 0 writes the table and the contact sheet.

    Args:
        session: the session.
        data: a :class:`exp.vision.data.base.SceneData`.
        model: returns logits of images.
        inputs: all images, the same on every rank.
        truths: the class of each image; None: not known.

    Returns:
        Metrics; on rank 0 the files, relative to the run folder; the images of all ranks that could not be used.
    """
    scenes: dict[int, ScenePrediction] = {}
    pending: list[tuple[int, Input, np.ndarray]] = []

    def add(number: int, entry: Input) -> None:
        check_pixels(entry.path)
        image, missing = data.read.read_with_missing(entry.path)
        pixels = data.apply_eval_pipeline(image, entry.path, missing)
        if pending and (pending[0][2].shape, pending[0][2].dtype) != (pixels.shape, pixels.dtype):
            flush()
        pending.append((number, entry, pixels))
        if len(pending) == data.eval_batch_size:
            flush()

    def flush() -> None:
        if not pending:
            return
        batch = torch.from_numpy(np.stack([pixels.transpose(2, 0, 1) for *_, pixels in pending]))
        shares = torch.softmax(predict_logits(session, model, batch), dim=-1).cpu()
        values, indices = shares.topk(min(_TOP, len(data.classes)), dim=1)
        for (number, entry, _), probabilities, numbers in zip(pending, values.tolist(), indices.tolist()):
            best_classes = [(data.classes[index], share) for index, share in zip(numbers, probabilities)]
            scenes[number] = ScenePrediction(str(entry.path), best_classes, None if truths is None else truths[number])
        pending.clear()

    predictions, failed, seconds = map_rank_shard(session, inputs, add, scenes, flush)
    metrics = {"images": len(predictions), "failed": len(failed), "images_per_second": len(predictions) / seconds}
    if truths is not None and predictions:
        metrics["accuracy"] = sum(scene.best[0][0] == scene.truth for scene in predictions) / len(predictions)
    files: list[str] = []
    if session.distributed.is_main and predictions:
        write_atomically(session.folder.path / "predictions.csv", predictions_csv(predictions))
        files.append("predictions.csv")
        drawn = [predictions[number] for number in evenly_spaced(len(predictions), session.config.task.max_images)]
        if drawn:
            tiles = [draw_scene_tile(to_rgb(shrink(data.read(scene.file), 512)), scene) for scene in drawn]
            page = contact_sheet(tiles, title=f"{len(drawn)} of {len(predictions)} predictions")
            files += write_picture(session, "plots/predictions.png", page)
    return metrics, files, failed


def predictions_csv(scenes: Sequence[ScenePrediction]) -> bytes:
    """Content of a CSV file with the columns ``file,class,probability,class_2,probability_2,class_3,probability_3``
    and, if it is known, ``truth``.
    """
    ends = ["", *(f"_{rank}" for rank in range(2, len(scenes[0].best) + 1))]
    has_truth = scenes[0].truth is not None
    rows: list[list[object]] = [
        ["file", *(name + end for end in ends for name in ("class", "probability")), *(["truth"] if has_truth else [])]
    ]
    for scene in scenes:
        cells = [cell for name, share in scene.best for cell in (name, f"{share:.4f}")]
        rows.append([scene.file, *cells, *([scene.truth] if has_truth else [])])
    return csv_content(rows)


def predict_segmentation(
    session: Session, data: Any, model: Any, inputs: Sequence[Input]
) -> tuple[dict[str, float], list[str], list[str]]:
    """Predict this rank's share of the images; rank 0 writes the table of areas.

    Args:
        session: the session.
        data: a :class:`exp.vision.data.base.SegmentationData`.
        model: returns logits of pixels.
        inputs: all images, the same on every rank.

    Returns:
        Metrics; on rank 0 all files, relative to the run folder; the images of all ranks that could not be used.
    """
    results: dict[int, tuple[list[list[Any]], list[str], list[str]]] = {}

    def predict(number: int, entry: Input) -> None:
        notes: list[str] = []
        results[number] = (*_predict(session, data, model, entry, notes), notes)

    outputs, failed, seconds = map_rank_shard(session, inputs, predict, results)
    rows, files = [row for part, *_ in outputs for row in part], sorted(file for _, part, _ in outputs for file in part)
    notes = [note for *_, part in outputs for note in part]
    session.warn(*notes[:_NOTES], *[f"and {len(notes) - _NOTES} more; all are in the logs"][: len(notes) > _NOTES])
    pixels = sum(row[2] for row in rows)
    metrics = {"images": len(outputs), "failed": len(failed), "megapixels_per_second": pixels / 1e6 / seconds}
    if session.distributed.is_main and rows:
        table, head = "predictions/areas.csv", ["file", "class", "pixels", "share", "square_meters"]
        if not data.learns_classes:
            table, head = "predictions/values.csv", ["file", "unit", "pixels", "mean", "lowest", "highest"]
        write_atomically(session.folder.path / table, csv_content([head, *rows]))
        files.append(table)
    return metrics, files, failed


def _predict(
    session: Session, data: Any, model: Any, entry: Input, notes: list[str]
) -> tuple[list[list[Any]], list[str]]:
    """Predict an image, and write its maps; ``notes`` gets what its user should know.

    Returns:
        Its rows of ``areas.csv``, and the files, relative to the run folder.

    Raises:
        DataError: the image cannot be read.
    """
    start, folder = time.perf_counter(), session.folder.path / "predictions"
    task, name = session.config.task, entry.name
    scores = functools.partial(predict_logits, session, model)
    tiling: Tiling = getattr(model, "tiling", None) or Tiling("slide", _WINDOW, _OVERLAP)

    def factor(dataset: Any) -> float:
        gsd = ground_resolution(dataset) if task.gsd is None else task.gsd
        scale: float = data.scale_to_training(entry.path, gsd)
        if scale != 1.0:
            notes.append(
                f"{entry.path} has {gsd:.4g} m per pixel, and the training images {data.training_gsd:.4g} m "
                "(data.gsd): it is read at their resolution, and its map has its own"
            )
        return scale

    with ExitStack() as stack:
        image = stack.enter_context(
            open_image(entry.path, data.read, data.prepare_for_map, factor=factor, has_pipeline=data.has_eval_pipeline)
        )
        size, picture = (image.height, image.width), image.thumbnail(_OVERLAY)
        window = data.longest_prepared_side(entry.path) if data.has_eval_pipeline and tiling.kind == "whole" else None
        if window is not None and max(image.seen.height, image.seen.width) > window:
            tiling = Tiling("slide", window, _OVERLAP, tiling.scales, tiling.flip, tiling.blend)
        if str(entry.path) in data.resized:
            across, down = data.resized[str(entry.path)]
            notes.append(
                f"{entry.path} has {size[1]} x {size[0]} pixels; unlike data.eval_pipeline, it is resized to "
                f"{across} x {down}, by a factor of the images of the data"
            )
        write, kind = (_write_classes, "classes") if data.learns_classes else (_write_values, "values")
        labels = stack.enter_context(label_map(folder / kind / name, image))
        written, rows = write(session, data, tiling, scores, image, labels, folder, entry, notes)
        small = resize_labels(labels, *picture.shape[:2])
    if data.learns_classes:
        names = [f"{name}  {100 * float(share):.1f} %" for name, _, share, _ in rows]
        page = draw_overlay(picture, small, names, data.palette)
    else:
        page = panels([picture, colorize(small, data.palette)], legend=data.legend)
    files = write_picture(session, f"predictions/overlays/{entry.name}.png", page)
    files += [file.relative_to(session.folder.path).as_posix() for file in written]
    seconds = time.perf_counter() - start
    logger.info("%s: %d x %d pixels in %.1f s %s", entry.path, size[1], size[0], seconds, " ".join(notes))
    return [[str(entry.path), *row] for row in rows], files


def _write_classes(
    session: Session, data: Any, tiling: Tiling, scores: LogitsFunction, image: DecodedImage | RasterImage,
    labels: np.ndarray, folder: Path, entry: Input, notes: list[str],
) -> tuple[list[Path], list[list[Any]]]:  # fmt: skip
    """Write the map of classes, and what the keys ask for; set ``labels``, uint8 (H, W), and add warnings to ``notes``.

    Returns:
        The files, and a row of ``areas.csv`` for each class.
    """
    task, name = session.config.task, entry.name
    in_place = image.dataset is not None and is_georeferenced(image.dataset)
    class_map = folder / "classes" / f"{name}.{'tif' if in_place else 'png'}"
    written = [class_map, *_write_scores(tiling, scores, image, labels, data.classes, folder, name, task)]
    if in_place:
        write_class_tiff(class_map, labels, image, data.classes, data.palette)
    else:
        write_png(class_map, labels, data.palette)
    area = image.pixel_area
    if task.gsd is not None or area is None:
        gsd = data.gsd if task.gsd is None else task.gsd
        area = None if gsd is None else gsd**2
    if task.polygons is not None:
        written.append(folder / "polygons" / f"{name}.{task.polygons}")
        confidence = folder / "confidence" / f"{name}.tif"
        write_polygons(written[-1], class_map, confidence, data.classes, area, task.min_area, task.simplify)
        if in_place and image.dataset.transform.is_identity:
            notes.append(
                f"{entry.path} has ground control points or RPCs and no transform: its polygons are in columns and "
                "rows; rectify the image, such as with gdalwarp, for coordinates"
            )
    counts = count_labels(labels)[: len(data.classes)].tolist()
    rows = [
        [label, count, f"{count / max(sum(counts), 1):.6f}", "" if area is None else f"{count * area:.2f}"]
        for label, count in zip(data.classes, counts)
    ]
    return written, rows


def _write_values(
    session: Session, data: Any, tiling: Tiling, scores: LogitsFunction, image: DecodedImage | RasterImage,
    labels: np.ndarray, folder: Path, entry: Input, notes: list[str],
) -> tuple[list[Path], list[list[Any]]]:  # fmt: skip
    """Write the values of pixels, float32 in the unit of the targets, NaN without data; set ``labels`` to their colors.

    Returns:
        The file, and its row of ``values.csv``.
    """
    del session, notes
    path = folder / "values" / f"{entry.name}.tif"
    count, total, lowest, highest = 0, 0.0, float("inf"), -float("inf")
    with new_raster(path, image, [f"value ({data.unit})"], "float32", "average", nodata=float("nan")) as raster:
        raster.units = [data.unit]
        for top, left, block in tiling.blocks(scores, 1, image.seen, labels.shape):
            values = block[0].float().cpu().numpy()
            rows, columns = values.shape
            missing = image.missing_rows(top, rows)
            if missing is not None:
                values = np.where(missing[:, left : left + columns], np.float32(np.nan), values)
            raster.write(values, 1, window=((top, top + rows), (left, left + columns)))
            labels[top : top + rows, left : left + columns] = value_labels(values, data.target_range)
            valid = values[~np.isnan(values)]
            if valid.size:
                count, total = count + valid.size, total + float(valid.sum(dtype=np.float64))
                lowest, highest = min(lowest, float(valid.min())), max(highest, float(valid.max()))
    summary = [f"{figure:.6g}" if count else "" for figure in (total / max(count, 1), lowest, highest)]
    return [path], [[data.unit, count, *summary]]


def _write_scores(
    tiling: Tiling, scores: LogitsFunction, image: DecodedImage | RasterImage, labels: np.ndarray,
    classes: Sequence[str], folder: Path, name: str, task: Any,
) -> list[Path]:  # fmt: skip
    """Compute the scores of an image; keep the labels, and write the rasters that the keys ask for.

    Args:
        tiling: of the image.
        scores: the network.
        image: the image.
        labels: (H, W), uint8; its values are set.
        classes: names of the classes.
        folder: of all predictions.
        name: of the image's files.
        task: the keys.

    Returns:
        The rasters.
    """
    names = {"probabilities": classes} if task.probabilities else {}
    if task.confidence or task.polygons is not None:
        names["confidence"] = ["difference of the two largest probabilities"]
    paths = {kind: folder / kind / f"{name}.tif" for kind in names}
    with ExitStack() as stack:
        rasters = {
            kind: stack.enter_context(new_raster(path, image, names[kind], **shares_profile(task.probability_dtype)))
            for kind, path in paths.items()
        }
        for top, left, block in tiling.blocks(scores, len(classes), image.seen, labels.shape):
            chosen = block.argmax(dim=0, keepdim=True)
            rows, columns = chosen.shape[1:]
            missing = image.missing_rows(top, rows)
            missing = None if missing is None else missing[:, left : left + columns]
            numbers = chosen[0].to(torch.uint8).cpu().numpy()
            labels[top : top + rows, left : left + columns] = (
                numbers if missing is None else np.where(missing, NO_DATA, numbers)
            )
            shares = tiling.probabilities(block) if rasters else block
            for kind, raster in rasters.items():
                if kind == "confidence":  # the last one: the probabilities are overwritten
                    largest = shares.gather(0, chosen)
                    shares = largest - shares.scatter_(0, chosen, 0.0).amax(dim=0, keepdim=True)
                values = encode_shares(shares, missing, task.probability_dtype)
                raster.write(values, window=((top, top + rows), (left, left + columns)))
    return list(paths.values())
