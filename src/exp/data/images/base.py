"""What data sets of scenes and of segmentation share: their parts, and what others ask of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from exp.data.images.dataset import ImageDataset, findings
from exp.data.images.listing import Listing
from exp.data.images.pipeline import Pipeline

if TYPE_CHECKING:
    import os

    import numpy as np

__all__ = ["ImageData"]


class ImageData:
    """A data set of image files in parts; the arguments are those of :class:`exp.config.schema.ImageDataConfig`.

    Attributes:
        name: of the data set.
        classes: names of the K classes.
        palette: RGB of each.
        train, val, test: its parts; ``test`` is ``val`` where there is no test part, and ``tested_on`` says so.
        metric_name: the metric by which the best model is chosen and sweeps are judged.
        greater_is_better: whether larger values of it are better.
        predictor: the module that predicts for task=predict.
        ignore_index: the label that does not count.

    Args:
        listing: the samples, and what else the layout knows.
        make: makes the data set of a part: takes its samples and pipeline, and the arguments of
            :class:`exp.data.images.dataset.ImageDataset`.
        palette: RGB of each class.

    Raises:
        ConfigError: a pipeline is wrong.
    """

    metric_name: str
    greater_is_better = True
    predictor = "exp.predict.images"
    ignore_index: int

    def __init__(
        self,
        listing: Listing,
        make: Callable[..., ImageDataset],
        palette: Sequence[tuple[int, int, int]],
        name: str,
        train_pipeline: Sequence[Mapping[str, Any]],
        eval_pipeline: Sequence[Mapping[str, Any]],
        size: int,
        channels: int = 3,
        value_range: Sequence[float] | None = None,
        on_error: str = "raise",
        cache_megabytes: int = 0,
        seed: int = 0,
        eval_batch_size: int = 16,
        num_workers: int = 0,
    ) -> None:
        self.name = name
        self.classes = listing.classes
        self.palette = list(palette)
        self.channels = channels
        self.value_range = value_range
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self._notes = listing.notes
        self._eval_pipeline = Pipeline("data.eval_pipeline", eval_pipeline)
        training = Pipeline("data.train_pipeline", train_pipeline)
        self._parts = {
            part: make(
                samples,
                training if part == "train" else self._eval_pipeline,
                channels=channels,
                value_range=value_range,
                size=size,
                augmented=part == "train",
                seed=seed,
                skip_errors=on_error == "skip",
                cache_bytes=cache_megabytes * 2**20,
            )
            for part, samples in listing.parts.items()
        }
        self.train, self.val = self._parts["train"], self._parts["val"]
        self.tested_on = "test" if "test" in self._parts else "val"
        self.test = self._parts[self.tested_on]

    def model_arguments(self) -> dict[str, int]:
        """What the model must know of the files."""
        return {"num_classes": len(self.classes), "in_channels": self.channels, "ignore_index": self.ignore_index}

    def prepare(self, pixels: np.ndarray, path: str | os.PathLike[str]) -> np.ndarray:
        """The evaluation pipeline for one image.

        Args:
            pixels: of :func:`exp.data.images.decode.read_image`.
            path: of its file.

        Returns:
            (H, W, C), of the same dtype.
        """
        image: np.ndarray = self._eval_pipeline(pixels, str(path))["img"]
        return image

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """What ``result.json`` says of the data; all ranks must call it.

        Args:
            gather: of :class:`exp.engine.distributed.Distributed`.
        """
        sizes = {part: len(data) for part, data in self._parts.items()}
        return {**sizes, "tested_on": self.tested_on, **self._notes, **findings(self._parts, gather)}
