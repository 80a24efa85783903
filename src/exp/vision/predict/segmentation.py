"""Class maps of images: files with class numbers, overlays to look at, GeoTIFFs, and the area of each class."""

from __future__ import annotations

import functools
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Iterator, Sequence

import numpy as np
from PIL import Image

from exp.engine.outputs import PictureWriter
from exp.runs.files import csv_content, write_atomically
from exp.vision.figures import overlay_with_legend
from exp.vision.pictures import palette_table, resized_labels
from exp.vision.predict.inputs import Failure, Input, each_of_mine, model_scores
from exp.vision.predict.raster import check_patches, is_georeferenced, open_image
from exp.vision.tiling import Tiling

if TYPE_CHECKING:
    from pathlib import Path

    from exp.session import Session

__all__ = ["NO_DATA", "counted", "label_map", "predict_segmentation", "write_png", "write_tiff"]

NO_DATA = 255
_OVERLAY = 4096  # pixels of the longer side of an overlay, at most
_WINDOW, _OVERLAP = 2048, 0.25  # of a model without a tiling: it is evaluated on whole images
_ROWS = 256  # at a time; also pixels along each side of a tile of a TIFF

logger = logging.getLogger(__name__)


def area_rows(counts: Sequence[int], area: float | None, classes: Sequence[str]) -> list[list[Any]]:
    """``class, pixels, share, square_metres`` of each class; shares are of the pixels that have a class.

    Args:
        counts: pixels of each class.
        area: square meters of a pixel; None: not known.
        classes: names.
    """
    known = max(sum(counts), 1)
    return [
        [name, count, f"{count / known:.6f}", "" if area is None else f"{count * area:.2f}"]
        for name, count in zip(classes, counts)
    ]


def predict_segmentation(
    session: Session, data: Any, model: Any, inputs: Sequence[Input]
) -> tuple[dict[str, float], list[str], list[Failure]]:
    """Predict this rank's share of the images; rank 0 adds the table over all of them.

    Args:
        session: the session.
        data: has ``classes``, ``palette`` and ``read``.
        model: gives logits of pixels.
        inputs: all images, the same on every rank.

    Returns:
        Metrics; on rank 0 all files, below the run folder; the images of all ranks that could not be used.
    """
    done: dict[int, tuple[list[list[Any]], list[str]]] = {}
    began = time.perf_counter()

    def predict(number: int, entry: Input) -> None:
        done[number] = _predict(session, data, model, entry)

    failures = each_of_mine(session, inputs, predict)
    gathered = session.distributed.gather((done, failures, time.perf_counter() - began))
    in_order = [pair for _, pair in sorted(item for part, *_ in gathered for item in part.items())]
    rows, files = [row for part, _ in in_order for row in part], sorted(file for _, part in in_order for file in part)
    pixels, seconds = sum(row[2] for row in rows), max(each for *_, each in gathered)
    failed = [failure for _, part, _ in gathered for failure in part]
    metrics = {"images": len(in_order), "failed": len(failed), "megapixels_per_second": pixels / 1e6 / seconds}
    if session.distributed.is_main and rows:
        head = ["file", "class", "pixels", "share", "square_metres"]
        write_atomically(session.folder.path / "predictions" / "areas.csv", csv_content([head, *rows]))
        files.append("predictions/areas.csv")
    return metrics, files, failed


def _predict(session: Session, data: Any, model: Any, entry: Input) -> tuple[list[list[Any]], list[str]]:
    """Predict an image, and write its maps.

    Returns:
        Its rows of ``areas.csv``, and the files below the run folder.

    Raises:
        DataError: it cannot be read.
    """
    began, classes, folder = time.perf_counter(), len(data.classes), session.folder.path / "predictions"
    scores = functools.partial(model_scores, session, model)
    tiling: Tiling = getattr(model, "tiling", None) or Tiling("slide", _WINDOW, _OVERLAP)
    prepare = functools.partial(data.prepare, for_map=True) if data.prepares else None
    written = [folder / "classes" / f"{entry.name}.png"]
    with open_image(entry.path, data.read, prepare) as image, label_map(written[0], image) as labels:
        size, seen = (image.height, image.width), (image.seen.height, image.seen.width)
        check_patches(entry.path, model, *(round(side * max(tiling.scales)) for side in tiling.window_of(*seen)))
        picture = image.thumbnail(_OVERLAY)
        parts = ((top, part.cpu().numpy()) for top, part in tiling.rows(scores, classes, image.seen))
        if seen != size:  # by data.eval_pipeline, in memory: each pixel gets the label at its middle, as in evaluation
            parts = iter([(0, resized_labels(np.concatenate([part for _, part in parts]), *size))])
        for top, part in parts:
            missing = image.without_data(top, len(part))
            labels[top : top + len(part)] = part if missing is None else np.where(missing, NO_DATA, part)
        write_png(written[0], labels, data.palette)
        if is_georeferenced(image):
            written.append(folder / "geo" / f"{entry.name}.tif")
            write_tiff(written[1], labels, image.dataset, data.palette)
        gsd, area = session.config.task.gsd, image.pixel_area
        if gsd is not None or area is None:
            gsd = data.gsd if gsd is None else gsd
            area = None if gsd is None else gsd**2
        rows = area_rows(counted(labels)[:classes].tolist(), area, data.classes)
        small = resized_labels(labels, *picture.shape[:2])
    names = [f"{name}  {100 * float(share):.1f} %" for name, _, share, _ in rows]
    page = overlay_with_legend(picture, small, names, data.palette)
    files = PictureWriter(session).write(f"predictions/overlays/{entry.name}.png", page)
    files += [each.relative_to(session.folder.path).as_posix() for each in written]
    logger.info("%s: %d x %d pixels in %.1f s", entry.path, size[1], size[0], time.perf_counter() - began)
    return [[str(entry.path), *row] for row in rows], files


@contextmanager
def label_map(path: Path, image: Any) -> Iterator[np.ndarray]:
    """Labels of an image of any size, in a temporary file that is mapped: uint8 (H, W).

    Args:
        path: of the map that it becomes; the temporary file is beside it.
        image: has ``height`` and ``width``.
    """
    with _temporary(path.with_suffix(".map")) as temporary:
        yield np.memmap(temporary, np.uint8, "w+", shape=(image.height, image.width))


def counted(labels: np.ndarray) -> np.ndarray:
    """Pixels of each label in (H, W), uint8, of any size: int64 (256,)."""
    parts = (labels[top : top + _ROWS].ravel() for top in range(0, len(labels), _ROWS))
    return sum((np.bincount(part, minlength=256) for part in parts), np.zeros(256, np.int64))


def write_png(path: Path, labels: np.ndarray, palette: Sequence[tuple[int, int, int]]) -> None:
    """Write a palette PNG, 8 bits for each pixel: programs read class numbers, viewers show the classes' colors.

    Args:
        path: of the new file, which is there once it is complete.
        labels: uint8 (H, W).
        palette: RGB of each class.
    """
    image = Image.frombuffer("P", (labels.shape[1], labels.shape[0]), labels, "raw", "P", 0, 1)
    image.putpalette(palette_table(palette).tobytes())
    with _temporary(path) as temporary:
        image.save(temporary, format="PNG")
        temporary.replace(path)


def write_tiff(path: Path, labels: np.ndarray, dataset: Any, palette: Sequence[tuple[int, int, int]]) -> None:
    """Write a GeoTIFF: one band, uint8, 255 is no data, with the palette.

    Args:
        path: of the new file, which is there once it is complete; its folder is made.
        labels: uint8 (H, W).
        dataset: of ``rasterio.open``, whose georeference it gets.
        palette: RGB of each class.
    """
    import rasterio
    from rasterio.windows import Window

    height, width = labels.shape
    profile = {"driver": "GTiff", "compress": "deflate", "BIGTIFF": "IF_SAFER", "tiled": True, "blockxsize": _ROWS,
               "blockysize": _ROWS, "height": height, "width": width, "count": 1, "dtype": "uint8",
               "crs": dataset.crs, "transform": dataset.transform, "nodata": NO_DATA}  # fmt: skip
    with _temporary(path) as temporary:
        with rasterio.open(temporary, "w", **profile) as file:
            file.write_colormap(1, {number: (*color, 255) for number, color in enumerate(palette)})
            for top in range(0, height, _ROWS):
                part = labels[top : top + _ROWS]
                file.write(part, 1, window=Window(0, top, width, len(part)))
        temporary.replace(path)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``; in the end there is no file of that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
    finally:
        if temporary.exists():
            temporary.unlink()
