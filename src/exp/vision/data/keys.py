"""The typed keys of ``data`` for images: each with its type, its default and its unit.

Imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional

from omegaconf import II, MISSING

__all__ = ["DistillationDataConfig", "ImageDataConfig", "SceneDataConfig", "SegmentationDataConfig"]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class ImageDataConfig:
    """Keys of all image data (:class:`exp.vision.data.base.ImageData`)."""

    preflight: ClassVar[str] = "exp.vision.data.preflight"
    """The module that checks the files before a run (:class:`exp.plugins.Plugin`)."""

    name: str = MISSING
    root: Optional[str] = None
    """Folder of the user's files; null: ``sample_data``."""
    sample_data: Optional[str] = None
    """Folder among the sample data that come with exp."""
    layout: Dict[str, Any] = MISSING
    """Where files are: ``_target_`` names a :class:`exp.vision.data.layouts.Layout`; its own keys stand beside it."""
    size: int = 256
    """Side of training images in pixels; the pipelines refer to it."""
    channels: int = 3
    """Channels of the model's input: gray images are repeated for 3, color images become gray for 1; with ``bands`` it
    is the number of these."""
    bands: Optional[List[Any]] = None
    """Bands of the files in the order of the model, by number from 1 or by name (``[4,3,2,8]``, ``[B04,B03,B02]``);
    null: all, in the order of the files."""
    mean: Any = None
    """Mean of each band, in the units of the files: numbers, or ``train``: mean and standard deviation are measured
    once over the training split and saved with the weights; null: those of ``model.normalization``."""
    std: Any = None
    """Standard deviation of each band, likewise."""
    datasets: Optional[List[str]] = None
    """MMRS-1M: names of its data sets; null: all that are there."""
    modality: Optional[str] = None
    """Name of the modality of the images, such as ``sar``, by which ``modality_statistics`` has their statistics."""
    modality_statistics: Optional[Dict[str, Any]] = field(default_factory=dict)
    """modality -> {mean: [...], std: [...]}, 0..255, for modalities with other statistics than the model's."""
    sources: List[Any] = field(default_factory=list)
    """Several sources instead of one, each a dictionary of the keys of ``data`` that it sets otherwise (``name``,
    ``root``, ``layout``, ``bands``, ``value_range``, ``modality``, ``label_map``, ...), with two of its own:
    ``weight``, its share of each training epoch, and ``class_map``, its class -> one of the data (null: ignored)."""
    value_range: Any = None
    """[low, high] that become 0 and 255 if values are not 8-bit: numbers for all bands, or a list for each band; null:
    only 8-bit files are allowed."""
    split_ratio: List[float] = field(default_factory=lambda: [0.7, 0.1, 0.2])
    """Shares of train, val and test if the layout has no splits; with 0 for test, val is the test split, too."""
    classes: Optional[List[str]] = None
    """Names in the order of their numbers; null: those of the files, sorted."""
    train_pipeline: List[Any] = field(default_factory=list)
    """mmcv's transforms after loading, each as {type: <name>, <arguments>}."""
    eval_pipeline: List[Any] = field(default_factory=list)
    """The same for validation, evaluation and prediction."""
    mixup_alpha: float = 0.0
    """MixUp: share of a training image in the mean with another one is drawn from Beta(alpha, alpha); 0: off."""
    cutmix_alpha: float = 0.0
    """CutMix: share of a training image that remains around a box of another one, likewise; 0: off."""
    mix_prob: float = 1.0
    """Probability that a training image is mixed; with both of the above, each is drawn half of the time."""
    on_error: str = "raise"
    """``raise`` or ``skip`` for a file that cannot be used; the result names skipped files."""
    cache_mb: int = 0
    """Size of a cache of decoded files in each process that loads data; 0: no cache."""
    seed: int = II("seed")
    """Seed of the augmentation."""
    eval_batch_size: int = 16
    num_workers: int = 0


@dataclass
class SceneDataConfig(ImageDataConfig):
    """Images with one label each (:class:`exp.vision.data.base.SceneData`)."""

    _target_: str = "exp.vision.data.base.SceneData"
    layout: Dict[str, Any] = field(default_factory=lambda: {"_target_": "exp.vision.data.layouts.ClassFolders"})


@dataclass
class DistillationDataConfig(SceneDataConfig):
    """Images without labels (:class:`exp.vision.data.base.DistillationData`)."""

    _target_: str = "exp.vision.data.base.DistillationData"
    layout: Dict[str, Any] = field(default_factory=lambda: {"_target_": "exp.vision.data.layouts.ImageFolders"})


@dataclass
class PixelDataConfig(ImageDataConfig):
    """Keys of images with a label for each pixel."""

    layout: Dict[str, Any] = field(default_factory=lambda: {"_target_": "exp.vision.data.layouts.MaskFolders"})
    images: str = "images"
    """Name of the folders of images."""
    masks: str = "masks"
    """Name of the folders of masks, beside those of images; a mask has its image's name."""
    splits: Optional[Dict[str, List[str]]] = field(default_factory=dict)
    """Instead of ``split_ratio``: train, val and test -> patterns of image paths below ``root``."""
    gsd: Optional[float] = None
    """Ground sampling distance of the training images in meters per pixel, at which other images are predicted, and
    for areas of files without georeference; null: that of the first training image, if it is georeferenced."""


@dataclass
class RegressionDataConfig(PixelDataConfig):
    """Images with a value for each pixel (:class:`exp.vision.data.regression.RegressionData`)."""

    _target_: str = "exp.vision.data.regression.RegressionData"
    masks: str = "targets"
    """Name of the folders of rasters of one band, beside those of images; a raster has its image's name and size, or
    cells of n x n pixels."""
    target_range: List[float] = MISSING
    """[low, high] of the targets, in their unit. Values outside do not count, like those that a file declares as no
    data; predictions are within it."""
    unit: str = ""
    """Unit of the targets, such as m; empty: not known."""


@dataclass
class SegmentationDataConfig(PixelDataConfig):
    """Images with a mask each (:class:`exp.vision.data.base.SegmentationData`)."""

    _target_: str = "exp.vision.data.base.SegmentationData"
    palette: Optional[Dict[str, str]] = field(default_factory=dict)
    """Masks of colors: class -> "RRGGBB"; empty: masks of class numbers, with names in ``classes``."""
    ignore_colors: List[str] = field(default_factory=list)
    """Masks of colors: colors of ignored pixels. Unknown colors are ignored, too, but counted in the result; a mask
    with more than a tenth of them is refused."""
    label_map: Optional[Dict[int, int]] = field(default_factory=dict)
    """Masks of numbers: value in the file -> class number; empty: values are class numbers."""
    ignore_values: List[int] = field(default_factory=lambda: [255])
    """Masks of numbers: values of ignored pixels, also negative ones, unless ``label_map`` has them. What a file
    declares as no data is ignored, too."""
