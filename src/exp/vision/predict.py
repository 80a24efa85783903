"""task=predict for images: the files that the user names, or the test split of the data."""

from __future__ import annotations

import functools
import glob
import logging
import os
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Iterator, NamedTuple, Sequence

import numpy as np
import torch
from PIL import Image

from exp.data.base import Prediction
from exp.engine.result import write_picture
from exp.engine.wrapper import forward, preprocessed
from exp.errors import ConfigError, DataError, RunError
from exp.runs.files import csv_content, write_atomically
from exp.vision.data.layouts import NAMED_FILES, SUFFIXES, images_below, unread_note
from exp.vision.plots import ScenePrediction, contact_sheet, draw_overlay, draw_scene_tile, evenly_spaced
from exp.vision.raster import check_pixels, open_image
from exp.vision.rendering import palette_table, resize_labels, shrink, to_rgb
from exp.vision.tiling import Tiling

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Input", "find_images", "label_map", "map_rank_shard", "name_inputs", "predict", "predictions_csv",
           "report_failures", "resolve_inputs", "write_png", "write_tiff"]  # fmt: skip

_TOP = 3  # classes of a scene that are listed
NO_DATA = 255
_OVERLAY = 4096  # most pixels of the longer side of an overlay
_WINDOW, _OVERLAP = 2048, 0.25  # for a model without a tiling, which is evaluated on whole images
_ROWS = 256  # rows processed at a time; also the side of a tile of a TIFF in pixels

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

    Segmentation writes ``predictions/{classes,overlays,geo}/<name>`` and ``predictions/areas.csv``;
    scenes write ``predictions.csv`` and ``plots/predictions.png``.

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
    inputs, truths = resolve_inputs(session, data)
    if data.per_pixel:
        metrics, files, failures = predict_segmentation(session, data, model, inputs)
    else:
        metrics, files, failures = predict_scenes(session, data, model, inputs, truths)
    report_failures(failures, len(inputs))
    return Prediction(metrics, files, "predictions")


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
    results: dict[int, tuple[list[list[Any]], list[str]]] = {}

    def predict(number: int, entry: Input) -> None:
        results[number] = _predict(session, data, model, entry)

    outputs, failed, seconds = map_rank_shard(session, inputs, predict, results)
    rows, files = [row for part, _ in outputs for row in part], sorted(file for _, part in outputs for file in part)
    pixels = sum(row[2] for row in rows)
    metrics = {"images": len(outputs), "failed": len(failed), "megapixels_per_second": pixels / 1e6 / seconds}
    if session.distributed.is_main and rows:
        head = ["file", "class", "pixels", "share", "square_meters"]
        write_atomically(session.folder.path / "predictions" / "areas.csv", csv_content([head, *rows]))
        files.append("predictions/areas.csv")
    return metrics, files, failed


def _predict(session: Session, data: Any, model: Any, entry: Input) -> tuple[list[list[Any]], list[str]]:
    """Predict an image, and write its maps.

    Returns:
        Its rows of ``areas.csv``, and the files, relative to the run folder.

    Raises:
        DataError: the image cannot be read.
    """
    start, classes, folder = time.perf_counter(), len(data.classes), session.folder.path / "predictions"
    scores = functools.partial(predict_logits, session, model)
    tiling: Tiling = getattr(model, "tiling", None) or Tiling("slide", _WINDOW, _OVERLAP)
    prepare = data.prepare_for_map if data.has_eval_pipeline else None
    written = [folder / "classes" / f"{entry.name}.png"]
    with open_image(entry.path, data.read, prepare) as image, label_map(written[0], image) as labels:
        size, picture = (image.height, image.width), image.thumbnail(_OVERLAY)
        window = data.longest_prepared_side(entry.path) if data.has_eval_pipeline and tiling.kind == "whole" else None
        if window is not None and max(image.seen.height, image.seen.width) > window:
            tiling = Tiling("slide", window, _OVERLAP, tiling.scales, tiling.flip)
        if list(data.resized) == [str(entry.path)]:  # the first one
            across, down = data.resized[str(entry.path)]
            session.print(
                f"warning: {entry.path} has {size[1]} x {size[0]} pixels; unlike data.eval_pipeline, it is resized to "
                f"{across} x {down}, by a factor of the images of the data; result.json names such images"
            )
        for top, left, block in tiling.blocks(scores, classes, image.seen, size):
            chosen = block.argmax(dim=0).to(torch.uint8).cpu().numpy()
            rows, columns = chosen.shape
            missing = image.missing_rows(top, rows)
            if missing is not None:
                chosen = np.where(missing[:, left : left + columns], NO_DATA, chosen)
            labels[top : top + rows, left : left + columns] = chosen
        write_png(written[0], labels, data.palette)
        if image.dataset is not None and is_georeferenced(image.dataset):
            written.append(folder / "geo" / f"{entry.name}.tif")
            write_tiff(written[1], labels, image.dataset, data.palette)
        gsd, area = session.config.task.gsd, image.pixel_area
        if gsd is not None or area is None:
            gsd = data.gsd if gsd is None else gsd
            area = None if gsd is None else gsd**2
        counts = count_labels(labels)[:classes].tolist()
        rows = [
            [name, count, f"{count / max(sum(counts), 1):.6f}", "" if area is None else f"{count * area:.2f}"]
            for name, count in zip(data.classes, counts)
        ]
        small = resize_labels(labels, *picture.shape[:2])
    names = [f"{name}  {100 * float(share):.1f} %" for name, _, share, _ in rows]
    page = draw_overlay(picture, small, names, data.palette)
    files = write_picture(session, f"predictions/overlays/{entry.name}.png", page)
    files += [file.relative_to(session.folder.path).as_posix() for file in written]
    logger.info("%s: %d x %d pixels in %.1f s", entry.path, size[1], size[0], time.perf_counter() - start)
    return [[str(entry.path), *row] for row in rows], files


@contextmanager
def label_map(path: Path, image: Any) -> Iterator[np.ndarray]:
    """A memory-mapped temporary file for the labels of an image of any size, uint8 (H, W).

    Args:
        path: of the final file; the temporary file is in its folder, which is made.
        image: has ``height`` and ``width``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=path.parent) as file:  # without a name: nothing is left of it if the process is killed
        yield np.memmap(file, np.uint8, "w+", shape=(image.height, image.width))


def count_labels(labels: np.ndarray) -> np.ndarray:
    """Count the pixels of each label, int64 (256,); ``labels``: uint8 (H, W), of any size."""
    parts = (labels[top : top + _ROWS].ravel() for top in range(0, len(labels), _ROWS))
    return sum((np.bincount(part, minlength=256) for part in parts), np.zeros(256, np.int64))


def write_png(path: Path, labels: np.ndarray, palette: Sequence[tuple[int, int, int]]) -> None:
    """Write an 8-bit palette PNG: programs read class numbers, viewers show the classes' colors.

    Args:
        path: of the new file, which appears once it is complete.
        labels: uint8 (H, W).
        palette: RGB of each class.
    """
    image = Image.frombuffer("P", (labels.shape[1], labels.shape[0]), labels, "raw", "P", 0, 1)
    image.putpalette(palette_table(palette).tobytes())
    write_atomically(path, lambda file: image.save(file, format="PNG"))


def is_georeferenced(dataset: Any) -> bool:
    """Whether an open dataset has coordinates: a transform, ground control points, or rational polynomials."""
    return bool(dataset.gcps[0] or dataset.rpcs or dataset.crs is not None or not dataset.transform.is_identity)


def write_tiff(path: Path, labels: np.ndarray, dataset: Any, palette: Sequence[tuple[int, int, int]]) -> None:
    """Write a GeoTIFF with a palette: one band, uint8, no-data value 255.

    Args:
        path: of the new file, which appears once it is complete; its folder is made.
        labels: uint8 (H, W).
        dataset: result of ``rasterio.open``, for the georeference.
        palette: RGB of each class.
    """
    import rasterio
    from rasterio.windows import Window

    height, width = labels.shape
    points, crs_of_points = dataset.gcps
    georeference = (
        {"crs": crs_of_points, "gcps": points} if points else {"transform": dataset.transform, "crs": dataset.crs}
    )
    profile = {"driver": "GTiff", "compress": "deflate", "BIGTIFF": "IF_SAFER", "tiled": True, "blockxsize": _ROWS,
               "blockysize": _ROWS, "height": height, "width": width, "count": 1, "dtype": "uint8", "nodata": NO_DATA,
               "rpcs": dataset.rpcs, **georeference}  # fmt: skip

    def write(temporary: BinaryIO) -> None:
        with rasterio.open(temporary.name, "w", **profile) as file:
            file.write_colormap(1, {number: (*color, 255) for number, color in enumerate(palette)})
            for top in range(0, height, _ROWS):
                part = labels[top : top + _ROWS]
                file.write(part, 1, window=Window(0, top, width, len(part)))

    write_atomically(path, write)
