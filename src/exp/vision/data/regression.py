"""Images with a value for each pixel, such as a height: dense regression."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import torch

from exp.data.extensions import Units
from exp.errors import DataError
from exp.vision.data.base import ImageData, evenly_spaced
from exp.vision.data.keys import RegressionDataConfig
from exp.vision.data.masks import read_values
from exp.vision.data.sources import MasksBySource
from exp.vision.metrics import AbsoluteError, RegressionErrors, RSquared
from exp.vision.rendering import VALUE_STEPS, value_palette

if TYPE_CHECKING:
    from exp.data.base import ExampleBatch
    from exp.metrics import Metric


class Targets:
    """Rasters of one band of numbers; NaN where there is no value.

    There is none where the file has no data (its no-data value, its mask, NaN), and outside of ``target_range``.

    Args:
        target_range: the lowest and the highest value, in the unit of the files.
    """

    dtype = np.float32

    def __init__(self, target_range: Sequence[float]) -> None:
        self.low, self.high = target_range

    def read(self, path: str | os.PathLike[str]) -> np.ndarray:
        """Read a target: float32 (H, W), NaN where it has no value.

        Raises:
            DataError: the file cannot be read, or has several bands.
        """
        values, nodata, missing = read_values(path)
        if values.ndim != 2 or values.dtype.kind not in "iuf":
            raise DataError(
                f"{path} is no target: it holds {values.dtype} values of shape {values.shape}, instead of numbers in "
                "one band"
            )
        known = (values >= self.low) & (values <= self.high)
        if nodata is not None:
            known &= values != nodata
        if missing is not None:
            known &= ~missing
        return np.where(known, values, np.nan).astype(np.float32)

    @staticmethod
    def enlarge(values: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Repeat the cells of a coarser target: each covers n x n pixels of its image, those at its end fewer."""
        factor = -(-shape[0] // values.shape[0])
        enlarged = values.repeat(factor, axis=0).repeat(factor, axis=1)[: shape[0], : shape[1]]
        fits = values.shape == tuple(-(-extent // factor) for extent in shape)
        return enlarged if fits else values


class RegressionData(ImageData):
    """A data set for dense regression; its keys are those of :class:`exp.vision.data.keys.RegressionDataConfig`."""

    learns_classes = False
    per_pixel = True
    keys = RegressionDataConfig

    def set_classes(self) -> None:
        """There are none; colors stand for values."""
        self.classes, self.palette = [], value_palette()
        self.unit, self.target_range = self._config.unit, list(self._config.target_range)

    @property
    def legend(self) -> list[tuple[str, tuple[int, ...]]]:
        """Five values."""
        low, high = self.target_range
        shares = [number / 4 for number in range(5)]
        return [(f"{low + share * (high - low):g} {self.unit}", self.palette[round(share * VALUE_STEPS)])
                for share in shares]  # fmt: skip

    def build_mask_reader(self) -> Any:
        """See :class:`exp.vision.data.base.ImageData`."""
        for source in self.sources:
            source.masks = Targets(self.target_range)
        return self.sources[0].masks if len(self.sources) == 1 else MasksBySource(self.sources)

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch:
        """See :class:`exp.vision.data.base.ImageData`."""
        example = super().example_batch(**keys)
        label = torch.zeros(example.train["label"].shape)
        arguments = {**example.model_arguments, "target_range": list(keys["target_range"])}
        return example._replace(
            train={**example.train, "label": label}, val={**example.val, "label": label}, model_arguments=arguments
        )

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of the model: those of images, and ``target_range``."""
        self.normalization.inspect_bands()
        arguments = self.normalization.model_arguments()
        return {"in_channels": self.read.channels, "target_range": self.target_range, **arguments}

    def units(self) -> dict[str, Units]:
        """See :class:`exp.vision.data.base.ImageData`; ``output`` has the unit and the range of the values."""
        return {**super().units(), "output": Units(about={"unit": self.unit, "range": self.target_range})}

    def check_files(self, say: Any) -> None:
        """Also refuse a split without values, by some of its targets."""
        super().check_files(say)
        for split, data in self._splits.items():
            paths = [path for _, path in evenly_spaced(data.samples) if path is not None]
            if not any(np.isfinite(data.masks.read(path)).any() for path in paths):
                reason = f"all are without data, or outside of data.target_range={self.target_range}"
                raise DataError(f"no value in {len(paths)} of {len(data)} targets of {split}: {reason}")

    def metrics(self, detailed: bool = False) -> list[Metric]:
        """New metrics of values."""
        makers = (lambda: RegressionErrors(self.unit), RSquared)
        return [make() for make in makers] + [each for make in makers for each in self.metrics_by_source(make)]

    def ranking(self) -> AbsoluteError:
        """The mean absolute error of an image."""
        return AbsoluteError()
