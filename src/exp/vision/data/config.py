"""The typed keys of image data: each with its type, its default and its unit. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from omegaconf import II, MISSING

__all__ = ["DistillationDataConfig", "ImageDataConfig", "SceneDataConfig", "SegmentationDataConfig"]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class ImageDataConfig:
    """What image data share (:class:`exp.vision.data.base.ImageData`)."""

    name: str = MISSING
    root: Optional[str] = None
    """Folder of the user's files; null: ``sample_data``."""
    sample_data: Optional[str] = None
    """Folder among the sample data that come with exp."""
    layout: Dict[str, Any] = MISSING
    """How files are laid out: ``_target_`` is a :class:`exp.vision.data.layouts.Layout`; keys of its own beside it."""
    size: int = 256
    """Side of training images in pixels; the pipelines refer to it."""
    channels: int = 3
    """That the model gets: gray images are repeated for 3, colored ones become gray for 1; with ``bands`` as many as
    these."""
    bands: Optional[List[Any]] = None
    """Bands of the files in the order of the model, by number from 1 or by name (``[4,3,2,8]``, ``[B04,B03,B02]``);
    null: all, as they come."""
    mean: Any = None
    """Of each band, in the units of the files: numbers, or ``train``: measured once over the training split and kept,
    with the standard deviation; null: as ``model.normalization`` says."""
    std: Any = None
    """Standard deviations, likewise."""
    datasets: Optional[List[str]] = None
    """MMRS-1M: names of its data sets; null: all that are there."""
    modality: Optional[str] = None
    """MMRS-1M: ``optical``, ``sar`` or ``infrared``; null: any."""
    modality_weights: Optional[Dict[str, float]] = field(default_factory=dict)
    """MMRS-1M: shares of ``optical``, ``sar`` and ``infrared`` images in every epoch of a training; none: as many as
    there are."""
    modality_statistics: Optional[Dict[str, Any]] = field(default_factory=dict)
    """MMRS-1M: modality -> {mean: [...], std: [...]}, 0..255, where these are others than the model's."""
    value_range: Any = None
    """[low, high] that become 0 and 255 where values are not 8 bit, a number each or one for each band; null: only
    8-bit values are taken."""
    split: List[float] = field(default_factory=lambda: [0.7, 0.1, 0.2])
    """Shares of train, val and test where the files do not say; without test, val is tested on."""
    classes: Optional[List[str]] = None
    """Names in the order of their numbers; null: those of the files, sorted."""
    train_pipeline: List[Any] = field(default_factory=list)
    """mmcv's transforms, each as {type: <name>, <arguments>}; loading comes before them."""
    eval_pipeline: List[Any] = field(default_factory=list)
    on_error: str = "raise"
    """``raise`` or ``skip`` a file that cannot be used; the result names those that were skipped."""
    cache_megabytes: int = 0
    """Decoded files are kept in memory up to this size, in each process that loads."""
    seed: int = II("seed")
    """Of the augmentation."""
    eval_batch_size: int = 16
    num_workers: int = 0


@dataclass
class SceneDataConfig(ImageDataConfig):
    """Images with one label each (:class:`exp.vision.data.base.SceneData`)."""

    _target_: str = "exp.vision.data.base.SceneData"
    layout: Dict[str, Any] = field(default_factory=lambda: {"_target_": "exp.vision.data.layouts.ClassFolders"})


@dataclass
class DistillationDataConfig(SceneDataConfig):
    """Images without regard to their labels (:class:`exp.vision.data.base.DistillationData`)."""

    _target_: str = "exp.vision.data.base.DistillationData"
    layout: Dict[str, Any] = field(default_factory=lambda: {"_target_": "exp.vision.data.layouts.ImageFolders"})


@dataclass
class SegmentationDataConfig(ImageDataConfig):
    """Images with a mask each (:class:`exp.vision.data.base.SegmentationData`)."""

    _target_: str = "exp.vision.data.base.SegmentationData"
    layout: Dict[str, Any] = field(default_factory=lambda: {"_target_": "exp.vision.data.layouts.MaskFolders"})
    images: str = "images"
    """Name of the folders of images."""
    masks: str = "masks"
    """Name of the folders of masks, beside those of images; a mask has its image's name."""
    parts: Optional[Dict[str, List[str]]] = field(default_factory=dict)
    """Instead of ``split``: for train, val and test patterns of image paths below ``root``."""
    palette: Optional[Dict[str, str]] = field(default_factory=dict)
    """Masks of colors: class -> "RRGGBB"; none: masks of class numbers, of ``classes``."""
    ignore_colors: List[str] = field(default_factory=list)
    """Colors that do not count; pixels of any other color do not either, but the result tells how many."""
    gsd: Optional[float] = None
    """Of files that do not tell it themselves, as GeoTIFFs do: for areas and scale bars."""
    max_unknown: float = 0.1
    """Masks of colors: the largest share of a mask's pixels that may be of other colors; in a JPEG a tenth of it."""
    mask_values: Optional[Dict[int, int]] = field(default_factory=dict)
    """Masks of numbers: value in the file -> class number; none: they are the class numbers."""
    ignore_values: List[int] = field(default_factory=lambda: [255])
    """Masks of numbers: values that do not count, unless ``mask_values`` has them; -1 in those of 32 bits, too."""
