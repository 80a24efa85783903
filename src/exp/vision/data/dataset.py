"""The samples of one split, indexed by a whole batch: images with one label each, or with one for each pixel."""

from __future__ import annotations

import bisect
import logging
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch.utils.data import Dataset

from exp.data.loader import preserved_generators, seed_sample
from exp.errors import ConfigError, DataError
from exp.vision.data.bands import ImageReader
from exp.vision.data.masks import NO_DATA, markers
from exp.vision.data.transforms import Pipeline, is_resized

if TYPE_CHECKING:
    from exp.vision.data.keys import ImageDataConfig
    from exp.vision.data.mixing import Mixer

__all__ = ["ImageDataset"]

logger = logging.getLogger(__name__)

NO_LABEL = -1  # the class number of ignored images
# A decoded image before the pipeline; and uint8 (H, W): its labels, and NO_DATA where it has no data.
Loaded = Tuple[np.ndarray, Optional[np.ndarray]]


class ImageDataset(Dataset):
    """The samples of one split, loaded, transformed and stacked; indexed by a whole batch.

    Augmentation is a function of (seed, epoch, sample): runs are the same for any number of ranks and loader workers,
    and after resuming.

    A batch has ``image`` (B, C, H, W), uint8 or float32, 0..255; ``index`` (B,), int64; and ``label``: for scenes int64
    (B,), -1: ignored, or with mixed images shares of the K classes, float32 (B, K), all 0: ignored; for masks uint8
    (B, H, W), 255: ignored, or of values float32, NaN: ignored. In evaluation with masks, images of different sizes are
    padded at the right and at the bottom, and ``sizes`` has (height, width) of each. If the pipeline resizes images,
    labels keep the resolution of the file, at which predictions are measured, and ``label_sizes`` has (H, W) of each.
    In evaluation with several sources, ``source`` has the number of each sample's.

    Attributes:
        needs_epoch: whether batches of keys are (B, 2): sample and epoch.
        skipped: True for samples that could not be used, bool (N,), shared with loader workers.
        draw: maps a position in an epoch, and the epoch, to the number of a sample; None: the position is the number.
        ends: for each source the number of the sample after its last; empty: there is one source.
        stored: gives further arrays of a batch, by name, for numbers of samples: a teacher's features; None: none.
        blank: (C, H, W) of the image that replaces a skipped one if the batch has no other images.

    Args:
        samples: pairs of an image path, and a class number or mask path; None: there is no mask.
        read: reads an image file.
        pipeline: transforms of images and masks.
        config: keys of ``data``.
        masks: reads masks; None: samples have class numbers.
        augmented: whether the pipeline draws random numbers.
        mixer: mixes samples with others; None: they are not mixed.
    """

    is_batched = yields_tensors = True

    def __init__(
        self,
        samples: Sequence[tuple[str, Any]],
        read: ImageReader,
        pipeline: Pipeline,
        config: ImageDataConfig,
        masks: Any = None,
        augmented: bool = False,
        mixer: Mixer | None = None,
    ) -> None:
        self.samples = samples
        self.read = read
        self.pipeline = pipeline
        self.masks = masks
        self.config = config
        self.blank = (read.channels, config.size, config.size)
        self.needs_epoch = augmented
        self.mixer = mixer
        self.draw: Callable[[int, int], int] | None = None
        self.ends: Sequence[int] = ()
        self.stored: Callable[[Sequence[int]], Mapping[str, np.ndarray]] | None = None
        self.skipped = torch.zeros(len(samples), dtype=torch.bool).share_memory_()
        self._cache: dict[int, Loaded] = {}
        self._cache_left = config.cache_mb * 2**20

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, keys: torch.Tensor) -> dict[str, Any]:
        """Load a batch.

        Args:
            keys: sample numbers, int64 (B,); with :attr:`needs_epoch` sample numbers and epochs, (B, 2).

        Returns:
            ``{"image", "label", "index"}``, in evaluation with masks also ``"sizes"`` and ``"label_sizes"``.

        Raises:
            DataError: a file cannot be used, and ``data.on_error`` is not skip.
            ConfigError: the pipeline returns images of different sizes, which cannot be stacked.
        """
        # Python numbers: scalars of torch would slow down every use.
        pairs = keys.tolist() if keys.dim() == 2 else [(number, 0) for number in keys.tolist()]
        with preserved_generators():
            samples = []
            for number, epoch in pairs:
                if self.needs_epoch:
                    seed_sample(self.config.seed, epoch, number)
                samples.append(self._mixed_item(number, epoch))
        batch = self.collate(samples)
        if self.stored is not None:
            drawn = [number if self.draw is None else self.draw(number, epoch) for number, epoch in pairs]
            batch.update({name: torch.from_numpy(values) for name, values in self.stored(drawn).items()})
        batch["index"] = torch.tensor([number for number, _ in pairs], dtype=torch.int64)
        if self.ends and not self.needs_epoch:
            batch["source"] = [bisect.bisect_right(self.ends, number) for number, _ in pairs]
        return batch

    def _mixed_item(self, position: int, epoch: int) -> Any:
        """The transformed sample at a position of an epoch, mixed if there is a mixer; None if it is skipped."""

        def read(position: int) -> Any:
            return self._item(position if self.draw is None else self.draw(position, epoch))

        sample = read(position)
        return sample if self.mixer is None or sample is None else self.mixer(sample, position, len(self), read)

    def _item(self, number: int) -> Any:
        """A transformed sample; None if it is skipped.

        Raises:
            DataError: a file cannot be used, and ``data.on_error`` is not skip.
        """
        loaded = self._cache.get(number)
        if loaded is None:
            try:
                loaded = self.load(number)
            except DataError as error:
                if self.config.on_error != "skip":
                    raise
                if not self.skipped[number]:
                    self.skipped[number] = True
                    logger.warning("skipped: %s", error)
                return None
            size = sum(part.nbytes for part in loaded if isinstance(part, np.ndarray)) if self._cache_left else 1
            if size <= self._cache_left:
                self._cache[number] = loaded
                self._cache_left -= size
        return self.transform(number, loaded)

    def load(self, number: int) -> Loaded:
        """Read a sample's files.

        Raises:
            DataError: a file cannot be used; the message names it.
        """
        path, label = self.samples[number]
        image, missing = self.read.read_with_missing(path)
        if self.masks is None:
            return image, None if missing is None else missing.astype(np.uint8) * np.uint8(NO_DATA)
        ignored, no_data = markers(np.dtype(self.masks.dtype))
        labels = np.full(image.shape[:2], ignored, self.masks.dtype) if label is None else self.masks.read(label)
        if labels.shape != image.shape[:2] and hasattr(self.masks, "enlarge"):
            labels = self.masks.enlarge(labels, image.shape[:2])
        if labels.shape != image.shape[:2]:
            label_size, image_size = (f"{shape[1]}x{shape[0]}" for shape in (labels.shape, image.shape))
            raise DataError(f"{label} is {label_size} pixels, but its image {path} is {image_size}; make the mask anew")
        return image, labels if missing is None else np.where(missing, labels.dtype.type(no_data), labels)

    def transform(self, number: int, loaded: Loaded) -> tuple[np.ndarray, Any]:
        """Apply the pipeline to a sample, and return image and label; does not change ``loaded``."""
        path, label = self.samples[number]
        results = self.pipeline(loaded[0], path, loaded[1])
        if self.masks is not None:
            labels: Any = loaded[1] if not self.needs_epoch and is_resized(results) else results["gt_seg_map"]
            ignored, no_data = markers(labels.dtype)
            label = np.where(labels == no_data, labels.dtype.type(ignored), labels)
        return self.fill_missing(results, path), label

    def collate(self, samples: Sequence[tuple[np.ndarray, Any] | None]) -> dict[str, Any]:
        """Stack samples to a batch; None becomes an image of zeros with an ignored label.

        Raises:
            ConfigError: images have different sizes, and they are not padded.
        """
        images = [None if sample is None else sample[0].transpose(2, 0, 1) for sample in samples]
        image = _stack_padded(images, self.blank)
        sizes = {array.shape[1:] for array in images if array is not None}
        if len(sizes) > 1 and (self.needs_epoch or self.masks is None):
            shapes = ", ".join(f"{height}x{width}" for height, width in sorted(sizes)[:4])
            raise ConfigError(
                f"{self.pipeline.key} gives images of different sizes ({shapes}), which make no batch; end it with a "
                "RandomCrop or CenterCrop and a PadTo, or with Resize(keep_ratio=false)"
            )
        labels = [None if sample is None else sample[1] for sample in samples]
        if self.masks is None:
            num_classes = None if self.mixer is None else self.mixer.num_classes
            ignored = NO_LABEL if num_classes is None else np.zeros(num_classes, np.float32)
            rows = np.array([ignored if label is None else label for label in labels])
            return {"image": image, "label": torch.from_numpy(rows)}
        fill = markers(np.dtype(self.masks.dtype))[0]
        batch: dict[str, Any] = {
            "image": image,
            "label": _stack_padded(labels, tuple(image.shape[-2:]), fill, self.masks.dtype),
        }
        if not self.needs_epoch:
            for key, stacked, arrays in (("sizes", image, images), ("label_sizes", batch["label"], labels)):
                batch[key] = [tuple((stacked if array is None else array).shape[-2:]) for array in arrays]
            if batch["label_sizes"] == batch["sizes"]:
                del batch["label_sizes"]
        return batch

    def fill_missing(self, results: Mapping[str, Any], path: str) -> np.ndarray:
        """The image of a pipeline's results, filled again where the mask is :data:`NO_DATA`.

        Interpolation has mixed the filled values with their neighbors, and distortions have changed them.

        Args:
            results: of the pipeline.
            path: of the image, which determines its modality.
        """
        image: np.ndarray = results["img"]
        mask, fill = results.get("gt_seg_map"), self.read.modalities.fill_value_for(path, self.read.fill)
        if mask is not None and fill is not None:
            missing = mask == markers(mask.dtype)[1]
            if missing.any():
                image = image.copy()
                image[missing] = np.rint(fill) if image.dtype == np.uint8 else fill
        return self.read.modalities.map_statistics(image, path)


def _stack_padded(
    arrays: Sequence[np.ndarray | None], blank: tuple[int, ...], fill: float = 0, dtype: Any = np.uint8
) -> torch.Tensor:
    """Stack arrays (..., H, W) of different sizes, with ``fill`` at the right and at the bottom; None: all is ``fill``.

    The result is of ``dtype``, or float32 if one of them is, and contiguous; of the shape ``blank`` each if all are
    None.
    """
    present = [array for array in arrays if array is not None]
    shape = np.max([array.shape for array in present] or [blank], axis=0)
    batch = np.full((len(arrays), *shape), fill, np.result_type(dtype, *present))
    for row, array in zip(batch, arrays):
        if array is not None:
            row[tuple(map(slice, array.shape))] = array
    return torch.from_numpy(batch)
