"""The typed keys of image experiments: each with its type, its default and its unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from omegaconf import II, MISSING

from exp.plugins import Family, Plugin
from exp.vision.model_config import DistillerConfig, SceneClassifierConfig, SegmenterConfig
from exp.vision.tasks import Export, Features, Probe, Stats

__all__ = [
    "DistillationDataConfig",
    "ImageDataConfig",
    "PredictKeys",
    "SceneDataConfig",
    "SegmentationDataConfig",
    "plugin",
]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class ImageDataConfig:
    """What image data share (:class:`exp.vision.data.base.ImageData`)."""

    name: str = MISSING
    root: Optional[str] = None
    """Folder of the user's files; null: ``sample_data``."""
    sample_data: Optional[str] = None
    """Folder among the sample data that come with exp."""
    size: int = 256
    """Side of training images in pixels; the pipelines refer to it."""
    channels: int = 3
    """That the model gets: grey images are repeated for 3, coloured ones become grey for 1; with ``bands`` as many as
    these."""
    bands: Optional[List[Any]] = None
    """Bands of the files in the order of the model, by number from 1 or by name (``[4,3,2,8]``, ``[B04,B03,B02]``);
    null: all, as they come."""
    band_names: Optional[List[str]] = None
    """Names of all bands of the files, where these do not tell them."""
    stretch: Optional[List[float]] = None
    """[2, 98]: these percentiles of each band become 0 and 255, of 8-bit values, too; null: see ``value_range``."""
    stretch_scope: str = "train"
    """Percentiles of the ``train`` split, kept with the weights, or of each ``image`` by itself."""
    mean: Any = None
    """Of each band, in the units of the files: numbers, a ``statistics.json``, or ``train``: measured once over the
    training split and kept; null: as ``model.normalization`` says."""
    std: Any = None
    """Standard deviations, likewise; null: from where ``mean`` comes."""
    modality_weights: Optional[Dict[str, float]] = field(default_factory=dict)
    """MMRS-1M: shares of ``optical``, ``sar`` and ``infrared`` images in every epoch of a training; none: as many as
    there are."""
    modality_statistics: Optional[Dict[str, Any]] = field(default_factory=dict)
    """MMRS-1M: modality -> {mean: [...], std: [...]}, 0..255, where these are others than the model's."""
    alpha: Optional[bool] = None
    """Whether a channel beyond those is transparency: null: as the file marks it; true: it is; false: it is a band."""
    value_range: Any = None
    """[low, high] that become 0 and 255 where values are not 8 bit, a number each or one for each band; ``auto``:
    percentiles 1 and 99 of training images, kept with the weights; null: only 8-bit values are taken."""
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
    """Images with one label each (:class:`exp.vision.data.scenes.SceneData`)."""

    _target_: str = "exp.vision.data.scenes.SceneData"
    layout: str = "folders"
    """``folders`` ([{train,val,test}/]<class>/*) or ``mmrs1m``."""
    datasets: Optional[List[str]] = None
    """MMRS-1M: names of its data sets; null: all that are there."""
    modality: Optional[str] = None
    """MMRS-1M: ``optical``, ``sar`` or ``infrared``; null: any."""


@dataclass
class DistillationDataConfig(SceneDataConfig):
    """Images without regard to their labels (:class:`exp.vision.data.distillation.DistillationData`)."""

    _target_: str = "exp.vision.data.distillation.DistillationData"


@dataclass
class SegmentationDataConfig(ImageDataConfig):
    """Images with a mask each (:class:`exp.vision.data.segmentation.SegmentationData`)."""

    _target_: str = "exp.vision.data.segmentation.SegmentationData"
    layout: str = "masks"
    """``masks`` (folders of images beside folders of masks), ``loveda`` or ``mmrs1m``."""
    datasets: Optional[List[str]] = None
    """MMRS-1M: names of its data sets; null: all that are there."""
    modality: Optional[str] = None
    """MMRS-1M: ``optical``, ``sar`` or ``infrared``; null: any."""
    images: str = "images"
    """Name of the folders of images."""
    masks: str = "masks"
    """Name of the folders of masks, beside those of images; a mask has its image's name."""
    parts: Optional[Dict[str, List[str]]] = field(default_factory=dict)
    """Instead of ``split``: for train, val and test patterns of image paths below ``root``."""
    palette: Optional[Dict[str, str]] = field(default_factory=dict)
    """Masks of colours: class -> "RRGGBB"; none: masks of class numbers, of ``classes``."""
    ignore_colours: List[str] = field(default_factory=list)
    """Colours that do not count; pixels of any other colour do not either, but the result tells how many."""
    metres_per_pixel: Optional[float] = None
    """Of files that do not tell it themselves, as GeoTIFFs do: for areas and scale bars."""
    max_unknown: float = 0.1
    """Masks of colours: the largest share of a mask's pixels that may be of other colours; in a JPEG a tenth of it."""
    mask_values: Optional[Dict[int, int]] = field(default_factory=dict)
    """Masks of numbers: value in the file -> class number; none: they are the class numbers."""
    ignore_values: List[int] = field(default_factory=lambda: [255])
    """Masks of numbers: values that do not count; -1 in those of 32 bits, too."""


@dataclass
class PredictKeys:
    """Of task=predict, for images."""

    metres_per_pixel: Optional[float] = None
    """For areas and scale bars, whatever the files tell; null: as GeoTIFFs tell it, else that of the data."""
    on_error: str = "raise"
    """What an image that cannot be read means: ``raise``: the run fails once the others are done; ``skip``: it is only
    named."""
    max_images: int = 16
    """How many images are pictured: tiles of the contact sheet."""
    probabilities: bool = False
    """Segmentation: also write the probability of each class as a (Geo)TIFF of float32, with a band for each class."""


_SMALL = ("model.size=tiny", "data.size=64", "global_batch_size=8", "schedule.warmup_steps=1", "data.num_workers=0")
plugin = Plugin(
    structures={
        "model/scenes": SceneClassifierConfig,
        "model/distillation": DistillerConfig,
        "data/distillation": DistillationDataConfig,
        "model/segmentation": SegmenterConfig,
        "data/scenes": SceneDataConfig,
        "data/segmentation": SegmentationDataConfig,
        "task/export": Export,
        "task/features": Features,
        "task/probe": Probe,
        "task/stats": Stats,
    },
    keys={"task/predict": PredictKeys},
    families={
        "scene classification": Family(SceneClassifierConfig, SceneDataConfig, "dinov3_eurosat", _SMALL),
        "segmentation": Family(SegmenterConfig, SegmentationDataConfig, "dinov3_dubai", _SMALL),
    },
)
