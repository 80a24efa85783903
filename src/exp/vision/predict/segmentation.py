"""Class maps of images: files with class numbers, overlays to look at, GeoTIFFs, and the area of each class."""

from __future__ import annotations

import functools
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Sequence

import numpy as np
from PIL import Image

from exp.engine.outputs import PictureWriter
from exp.runs.files import csv_content, write_atomically
from exp.vision.figures import overlay_with_legend
from exp.vision.pictures import middles, palette_table, resized_labels
from exp.vision.predict.inputs import Failure, Input, each_of_mine, model_scores
from exp.vision.predict.raster import check_patches, is_georeferenced, open_image
from exp.vision.tiling import Tiling

if TYPE_CHECKING:
    from pathlib import Path

    from exp.session import Session

__all__ = ["NO_DATA", "Area", "areas_csv", "counted", "label_map", "predict_segmentation", "total_csv", "write_png",
           "write_tiff"]  # fmt: skip

NO_DATA = 255
_OVERLAY = 4096  # pixels of the longer side of an overlay, at most
_WINDOW, _OVERLAP = 2048, 0.25  # of a model without a tiling: it is evaluated on whole images
_ROWS = 256  # at a time; also pixels along each side of a tile of a TIFF

logger = logging.getLogger(__name__)


class Area(NamedTuple):
    """The classes of one image.

    Attributes:
        file: its path.
        counts: pixels of each class (K whole numbers).
        meters: square meters of each class (K); None: not known.
    """

    file: str
    counts: Sequence[int]
    meters: Sequence[float] | None

    def rows(self, classes: Sequence[str]) -> list[list[object]]:
        """``class, pixels, share, square_metres``: shares are of the pixels that have a class."""
        known = max(sum(self.counts), 1)
        meters: Sequence[float | None] = self.meters or [None] * len(classes)
        return [
            [name, count, f"{count / known:.6f}", "" if area is None else f"{area:.2f}"]
            for name, count, area in zip(classes, self.counts, meters)
        ]


_HEAD = ["class", "pixels", "share", "square_metres"]


def areas_csv(areas: Sequence[Area], classes: Sequence[str]) -> bytes:
    """A row for each class of each image."""
    return csv_content([["file", *_HEAD], *([area.file, *row] for area in areas for row in area.rows(classes))])


def total_csv(areas: Sequence[Area], classes: Sequence[str]) -> bytes:
    """A row for each class, over all images; square meters only where all images tell theirs."""
    counts = [sum(each) for each in zip(*(area.counts for area in areas))]
    known = [area.meters for area in areas if area.meters is not None]
    meters = None if len(known) < len(areas) else [sum(each) for each in zip(*known)]
    return csv_content([_HEAD, *Area("", counts, meters).rows(classes)])


def predict_segmentation(
    session: Session, data: Any, model: Any, inputs: Sequence[Input]
) -> tuple[dict[str, float], list[str], list[Failure]]:
    """Predict this rank's share of the images; rank 0 adds the tables over all of them.

    Args:
        session: the session.
        data: has ``classes``, ``palette`` and ``read``.
        model: gives logits of pixels.
        inputs: all images, the same on every rank.

    Returns:
        Metrics; on rank 0 all files, below the run folder; the images of all ranks that could not be used.
    """
    done: dict[int, tuple[Area, list[str]]] = {}
    began = time.perf_counter()

    def predict(number: int, entry: Input) -> None:
        done[number] = _predict(session, data, model, entry)

    failures = each_of_mine(session, inputs, predict)
    gathered = session.distributed.gather((done, failures, time.perf_counter() - began))
    in_order = [pair for _, pair in sorted(item for part, *_ in gathered for item in part.items())]
    areas, files = [area for area, _ in in_order], sorted(file for _, part in in_order for file in part)
    pixels, seconds = sum(sum(area.counts) for area in areas), max(each for *_, each in gathered)
    failed = [failure for _, part, _ in gathered for failure in part]
    metrics = {"images": len(areas), "failed": len(failed), "megapixels_per_second": pixels / 1e6 / seconds}
    if session.distributed.is_main and areas:
        for name, content in (("areas.csv", areas_csv), ("areas_total.csv", total_csv)):
            write_atomically(session.folder.path / "predictions" / name, content(areas, data.classes))
            files.append(f"predictions/{name}")
    return metrics, files, failed


def _predict(session: Session, data: Any, model: Any, entry: Input) -> tuple[Area, list[str]]:
    """Predict an image, and write its maps.

    Returns:
        The areas of its classes, and the files below the run folder.

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
        for top, part in tiling.rows(scores, classes, image.seen):
            for begin, rows in _at_size(part.cpu().numpy(), top, seen, size):
                missing = image.without_data(begin, len(rows))
                labels[begin : begin + len(rows)] = rows if missing is None else np.where(missing, NO_DATA, rows)
        write_png(written[0], labels, data.palette)
        if is_georeferenced(image):
            written.append(folder / "geo" / f"{entry.name}.tif")
            write_tiff(written[1], labels, image.dataset, data.palette)
        gsd, row_areas = session.config.task.gsd, image.row_areas
        if gsd is not None or row_areas is None:
            gsd = data.gsd if gsd is None else gsd
            row_areas = None if gsd is None else np.full(image.height, gsd**2)
        counts, meters = counted(labels, row_areas)
        small = resized_labels(labels, *picture.shape[:2])
    area = Area(str(entry.path), counts[:classes].tolist(), None if meters is None else meters[:classes].tolist())
    names = [f"{row[0]}  {100 * float(str(row[2])):.1f} %" for row in area.rows(data.classes)]
    page = overlay_with_legend(picture, small, names, data.palette)
    files = PictureWriter(session).write(f"predictions/overlays/{entry.name}.png", page)
    files += [each.relative_to(session.folder.path).as_posix() for each in written]
    logger.info("%s: %d x %d pixels in %.1f s", entry.path, size[1], size[0], time.perf_counter() - began)
    return area, files


def _at_size(
    rows: np.ndarray, top: int, seen: tuple[int, int], size: tuple[int, int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Rows of a map at another size: each pixel gets the value at its middle, as in an evaluation.

    Args:
        rows: (rows, w), those from ``top`` on of a map of the size ``seen``, (h, w).
        top: see there.
        seen: see there.
        size: wanted, (H, W).

    Yields:
        The number of the first of some rows, and these (rows, W).
    """
    if seen == size:
        yield top, rows
        return
    down, across = middles(seen[0], size[0]), middles(seen[1], size[1])
    first, last = np.searchsorted(down, (top, top + len(rows))).tolist()
    for begin in range(first, last, _ROWS):
        yield begin, rows[down[begin : min(begin + _ROWS, last)] - top][:, across]


@contextmanager
def label_map(path: Path, image: Any) -> Iterator[np.ndarray]:
    """Labels of an image of any size, in a temporary file that is mapped: uint8 (H, W).

    Args:
        path: of the map that it becomes; the temporary file is beside it.
        image: has ``height`` and ``width``.
    """
    with _temporary(path.with_suffix(".map")) as temporary:
        yield np.memmap(temporary, np.uint8, "w+", shape=(image.height, image.width))


def counted(labels: np.ndarray, areas: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Pixels of each label, int64 (256,), and square meters, float64 (256,); None: not known.

    Args:
        labels: uint8 (H, W).
        areas: square meters of a pixel in each row, (H,); None: not known.
    """
    counts, meters = np.zeros(256, np.int64), np.zeros(256)
    for top in range(0, len(labels), _ROWS):
        part = labels[top : top + _ROWS]
        row = np.arange(len(part))[:, None] * 256
        by_row = np.bincount((part + row).ravel(), minlength=256 * len(part)).reshape(-1, 256)
        counts += by_row.sum(axis=0)
        if areas is not None:
            meters += areas[top : top + _ROWS] @ by_row
    return counts, None if areas is None else meters


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
