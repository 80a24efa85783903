"""Class maps of images: files with class numbers, overlays to look at, GeoTIFFs, and how much each class covers."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Callable, Sequence

from exp.engine.plots import PictureWriter
from exp.runfolder import write_atomically
from exp.vision.draw.overlay import overlay_with_legend
from exp.vision.predict.areas import Area, areas_csv, shares, total_csv
from exp.vision.predict.classmaps import Counts, RowTaker, SmallMap, class_png, class_tiff, probability_tiff
from exp.vision.predict.inputs import Failure, Input, each_of_mine
from exp.vision.predict.raster import RasterImage, is_georeferenced, open_image
from exp.vision.predict.scores import pixel_probabilities, pixel_scores
from exp.vision.predict.windows import TakeScores, Tiling, label_rows

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["OVERLAY_PIXELS", "SegmentationWriter", "predict_segmentation"]

OVERLAY_PIXELS = 4096
"""The longer side of an overlay, at most."""
_NO_DATA = 255

logger = logging.getLogger(__name__)


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
    gathered = session.distributed.gather((writer.areas, writer.files, failures))
    areas = [area for _, area in sorted(pair for part, _, _ in gathered for pair in part.items())]
    files = sorted(file for _, part, _ in gathered for file in part)
    failed = [failure for _, _, part in gathered for failure in part]
    pixels = sum(sum(area.counts) for area in areas)
    metrics = {"images": len(areas), "failed": len(failed), "megapixels_per_second": pixels / 1e6 / seconds}
    if session.distributed.is_main and areas:
        for name, content in (("areas.csv", areas_csv), ("areas_total.csv", total_csv)):
            write_atomically(writer.folder / name, content(areas, data.classes))
            files.append(f"predictions/{name}")
    return metrics, files, failed


class SegmentationWriter:
    """Predicts one image after the other.

    Attributes:
        folder: ``predictions`` in the run folder.
        areas: what each image holds, by its number.
        files: written so far, below the run folder.
    """

    def __init__(self, session: Session, data: Any, model: Any) -> None:
        self.session = session
        self.data = data
        self.scores = pixel_scores(session, model)
        self.folder = session.folder.path / "predictions"
        self.probabilities = pixel_probabilities(session)
        self.pictures = PictureWriter(session)
        self.areas: dict[int, Area] = {}
        self.files: list[str] = []
        task = session.config.task
        window = task.window or session.config.model.window
        self.tiling = Tiling(window, task.overlap)

    def predict(self, number: int, entry: Input) -> None:
        """Predict an image and write what is to be known of it, rows as they are done.

        Raises:
            DataError: it cannot be read.
        """
        began = time.perf_counter()
        data, classes = self.data, len(self.data.classes)
        with open_image(entry.path, data.read) as image:
            size = (image.height, image.width)
            picture = image.thumbnail(OVERLAY_PIXELS)
            counts, small = Counts(), SmallMap(size, (picture.shape[0], picture.shape[1]))
            with ExitStack() as files:
                takers: list[RowTaker] = [counts, small]
                paths = [self.folder / "classes" / f"{entry.name}.png"]
                takers.append(files.enter_context(class_png(paths[0], size, data.palette)))
                if isinstance(image, RasterImage) and is_georeferenced(image):
                    paths.append(self.folder / "geo" / f"{entry.name}.tif")
                    takers.append(files.enter_context(class_tiff(paths[-1], image, data.palette)))
                take = None
                if self.session.config.task.probabilities:
                    paths.append(self.folder / "probabilities" / f"{entry.name}.tif")
                    take = self._taking(files.enter_context(probability_tiff(paths[-1], image, data.classes)))
                for top, rows in label_rows(image, self.scores, classes, self.tiling, take):
                    missing = image.without_data(top, len(rows))
                    if missing is not None:
                        rows[missing] = _NO_DATA
                    for taker in takers:
                        taker.add(rows)
            own = self.session.config.task.metres_per_pixel or data.metres_per_pixel
            area = image.pixel_area if image.pixel_area is not None or own is None else own**2
        self.areas[number] = Area(str(entry.path), counts.counts[:classes].tolist(), area)
        notes = [f"{100 * share:.1f} %" for share in shares(self.areas[number].counts)]
        side = None if area is None else area**0.5 * size[1] / picture.shape[1]  # metres of a pixel of the picture
        page = overlay_with_legend(picture, small.labels, data.classes, data.palette, notes, side)
        self.files += self.pictures.write(f"predictions/overlays/{entry.name}.png", page)
        self.files += [path.relative_to(self.session.folder.path).as_posix() for path in paths]
        seconds = time.perf_counter() - began
        logger.info("%s: %d x %d pixels in %.1f s", entry.path, size[1], size[0], seconds)

    def _taking(self, write: Callable[[int, int, Any], None]) -> TakeScores:
        return lambda top, left, scores: write(top, left, self.probabilities(scores).cpu().numpy())
