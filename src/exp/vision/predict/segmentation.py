"""Class maps of images: files with class numbers, overlays to look at, GeoTIFFs, and the area of each class."""

from __future__ import annotations

import functools
import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np

from exp.engine.outputs import PictureWriter
from exp.runs.files import csv_content, write_atomically
from exp.vision.draw.overlay import overlay_with_legend
from exp.vision.draw.pictures import resized_labels
from exp.vision.predict.inputs import Failure, Input, each_of_mine, model_scores
from exp.vision.predict.maps import NO_DATA, at_size, counted, label_map, probability_tiff, write_png, write_tiff
from exp.vision.predict.raster import check_patches, is_georeferenced, metres_of, open_image
from exp.vision.tiling import Tiling

if TYPE_CHECKING:
    import torch

    from exp.session import Session
    from exp.vision.predict.raster import DecodedImage, RasterImage

__all__ = ["OVERLAY_PIXELS", "Area", "SegmentationWriter", "areas_csv", "predict_segmentation", "total_csv"]

OVERLAY_PIXELS = 4096
"""The longer side of an overlay, at most."""
_WINDOW, _OVERLAP = 2048, 0.25  # of a model without a tiling: it is evaluated on whole images
_SAME = 0.001  # of a scale that is given, and that of the file

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
    writer = SegmentationWriter(session, data, model)
    began = time.perf_counter()
    failures = each_of_mine(session, inputs, writer.predict)
    seconds = max(session.distributed.gather(time.perf_counter() - began))
    gathered = session.distributed.gather((writer.areas, writer.files, failures, writer.overruled))
    areas = [area for _, area in sorted(pair for part, *_ in gathered for pair in part.items())]
    files = sorted(file for _, part, *_ in gathered for file in part)
    failed = [failure for _, _, part, _ in gathered for failure in part]
    overruled = sum(count for *_, count in gathered)
    pixels = sum(sum(area.counts) for area in areas)
    metrics = {"images": len(areas), "failed": len(failed), "megapixels_per_second": pixels / 1e6 / seconds}
    if overruled:
        given = session.config.task.gsd
        metrics.update(gsd=given, images_of_another_scale=overruled)
        session.say(
            f"areas are those of task.gsd={given:g}, also of {overruled} images whose files have another "
            "scale; leave it out to use theirs"
        )
    if session.distributed.is_main and areas:
        for name, content in (("areas.csv", areas_csv), ("areas_total.csv", total_csv)):
            write_atomically(writer.folder / name, content(areas, data.classes))
            files.append(f"predictions/{name}")
    return metrics, files, failed


class SegmentationWriter:
    """Predicts one image after the other.

    Attributes:
        folder: ``predictions`` in the run folder.
        areas: of the classes of each image, by its number.
        files: written so far, below the run folder.
        overruled: images whose own scale is not used, as ``task.gsd`` is given.
    """

    def __init__(self, session: Session, data: Any, model: Any) -> None:
        self.session, self.data, self.model = session, data, model
        self.folder = session.folder.path / "predictions"
        self.pictures = PictureWriter(session)
        self.areas: dict[int, Area] = {}
        self.files: list[str] = []
        self.overruled = 0
        self.tiling: Tiling = getattr(model, "tiling", None) or Tiling("slide", _WINDOW, _OVERLAP)
        self.prepare = functools.partial(data.prepare, for_map=True) if data.prepares else None

    def predict(self, number: int, entry: Input) -> None:
        """Predict an image, and write its maps.

        Raises:
            DataError: it cannot be read.
        """
        began = time.perf_counter()
        data, classes, path = self.data, len(self.data.classes), self.folder / "classes" / f"{entry.name}.png"
        scores, written = functools.partial(model_scores, self.session, self.model), [path]
        with open_image(entry.path, data.read, self.prepare) as image, ExitStack() as files:
            size, seen = (image.height, image.width), (image.seen.height, image.seen.width)
            largest = [round(side * max(self.tiling.scales)) for side in self.tiling.window_of(*seen)]
            check_patches(entry.path, self.model, *largest)
            picture = image.thumbnail(OVERLAY_PIXELS)
            gsd, row_areas = self._scale(image)
            labels, take = files.enter_context(label_map(path, size)), None
            if self.session.config.task.probabilities:
                written.append(self.folder / "probabilities" / f"{entry.name}.tif")
                write = files.enter_context(probability_tiff(written[-1], image, data.classes))

                def take(top: int, left: int, found: torch.Tensor) -> None:
                    write(top, left, self.tiling.probabilities(found).cpu().numpy())

            for top, part in self.tiling.rows(scores, classes, image.seen, take):
                for begin, rows in at_size(part.cpu().numpy(), top, seen, size):
                    missing = image.without_data(begin, len(rows))
                    if missing is not None:
                        rows[missing] = NO_DATA
                    labels[begin : begin + len(rows)] = rows
            write_png(path, labels, data.palette)
            if is_georeferenced(image):
                written.append(self.folder / "geo" / f"{entry.name}.tif")
                write_tiff(written[-1], labels, image.dataset, data.palette)
            counts, meters = counted(labels, row_areas)
            small = resized_labels(labels, *picture.shape[:2])
        area = Area(str(entry.path), counts[:classes].tolist(), None if meters is None else meters[:classes].tolist())
        self.areas[number] = area
        names = [f"{row[0]}  {100 * float(str(row[2])):.1f} %" for row in area.rows(data.classes)]
        gsd = None if gsd is None else gsd * size[1] / picture.shape[1]
        page = overlay_with_legend(picture, small, names, data.palette, gsd)
        self.files += self.pictures.write(f"predictions/overlays/{entry.name}.png", page)
        self.files += [each.relative_to(self.session.folder.path).as_posix() for each in written]
        seconds = time.perf_counter() - began
        logger.info("%s: %d x %d pixels in %.1f s", entry.path, size[1], size[0], seconds)

    def _scale(self, image: DecodedImage | RasterImage) -> tuple[float | None, np.ndarray | None]:
        """Meters of a pixel for a scale bar, and square meters of a pixel in each row (H,); None: not known."""
        given, of_file = self.session.config.task.gsd, metres_of(image)
        if given is not None and of_file is not None and abs(of_file / given - 1.0) > _SAME:
            self.overruled += 1
        if given is None and of_file is not None:
            return of_file, image.row_areas
        side = given if given is not None else self.data.gsd
        return side, None if side is None else np.full(image.height, side**2)
