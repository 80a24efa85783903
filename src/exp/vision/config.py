"""The typed keys of image experiments: each with its type, its default and its unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from omegaconf import II, MISSING

from exp.plugins import Family, Plugin
from exp.vision.tasks import Export, Features, Probe, Stats

__all__ = [
    "DistillationDataConfig",
    "DistillerConfig",
    "ImageDataConfig",
    "ImageModelConfig",
    "LoraConfig",
    "PredictKeys",
    "SceneClassifierConfig",
    "SceneDataConfig",
    "SegmentationDataConfig",
    "SegmenterConfig",
    "TeacherConfig",
    "plugin",
]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class LoraConfig:
    """Low-rank updates of a frozen backbone (:mod:`exp.vision.dinov3.lora`; Hu et al., arXiv 2106.09685)."""

    rank: int = 0
    """Of the updates; they and the head are all that is trained then. 0: no updates."""
    alpha: float = 16.0
    """Updates are multiplied by alpha / rank."""
    dropout: float = 0.0
    """Probability of dropping an element of an update's input."""
    targets: List[str] = field(default_factory=lambda: ["attention", "mlp"])
    """Which projections have one: ``attention`` (``q``, ``k``, ``v``, ``proj``), ``mlp`` (``fc1``, ``fc2``; of gated
    sizes ``w1``, ``w2``, ``w3``), or names of these."""


@dataclass
class ImageModelConfig:
    """What the models on a DINOv3 backbone share (:class:`exp.vision.dinov3.base.ImageModel`; arXiv 2508.10104).

    The number of classes and of channels comes from the data.
    """

    size: str = "vits16"
    """``vits16``, ``vits16plus``, ``vitb16``, ``vitl16``, ``vitl16plus``, ``vith16plus``, ``vit7b16``, or ``tiny``."""
    patch_size: int = 16
    """Pixels along each side of a patch."""
    embed_dim: Optional[int] = None
    """Elements of a token instead of the size's."""
    depth: Optional[int] = None
    """Blocks instead of the size's."""
    num_heads: Optional[int] = None
    """Attention heads instead of the size's."""
    normalization: str = "auto"
    """``web``, ``satellite``, or ``auto``: as the weights of ``init_from`` want it, else ``web``."""
    blocks: Optional[List[int]] = None
    """Blocks whose features the head sees, from 0 (-1: the last); null: the last, four for ``upernet`` and ``dpt``."""
    layer_scale: float = 1e-5
    """Initial layer scale; the paper's 1e-5 wants long training from random weights."""
    drop_path: float = 0.0
    """Probability of skipping a residual branch in the last block; grows linearly from 0 in the first."""
    freeze: Any = "none"
    """``none``, ``all`` (linear probe), or how many of the first blocks stay as they are."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    rope_rescale: Optional[float] = None
    """In training, positions are rescaled by a random factor up to this one (2 in pretraining); null: not."""
    dropout: float = 0.0
    """Before the last layer of a head."""
    band_init: str = "auto"
    """How the patch embedding of three-band weights begins for other bands: ``mean`` (of its kernels, for each),
    ``named`` (red, green and blue get their own), ``repeat`` (in turn), ``zero`` (the others get none), ``auto``
    (``named`` where the data tell which they are, else ``mean``)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank updates instead of training the backbone's own weights."""


@dataclass
class SceneClassifierConfig(ImageModelConfig):
    """Scene classification (:class:`exp.vision.dinov3.SceneClassifier`)."""

    _target_: str = "exp.vision.dinov3.SceneClassifier"
    label_smoothing: float = 0.0
    """Share of a label that is spread over all classes in the cross-entropy."""
    class_weights: Optional[List[float]] = None
    """One weight per class in the cross-entropy and the focal loss; null: all 1."""
    cross_entropy_weight: float = 1.0
    """Weight of the cross-entropy in the sum of losses; 0: without it."""
    focal_weight: float = 0.0
    """Weight of the focal loss."""
    focal_gamma: float = 2.0
    """How much less the focal loss counts images that are right already; 0: it is the cross-entropy."""


@dataclass
class SegmenterConfig(ImageModelConfig):
    """Semantic segmentation (:class:`exp.vision.dinov3.Segmenter`)."""

    _target_: str = "exp.vision.dinov3.Segmenter"
    head: str = "upsample"
    """``linear`` (one layer per patch), ``upsample`` (two convolutional stages, four times the resolution), or, over
    four blocks, ``upernet`` or ``dpt``."""
    head_channels: int = 256
    """Channels of the head's own layers (not of ``linear``) and of the auxiliary head's."""
    reassemble_channels: Optional[List[int]] = None
    """``dpt``: channels of the four levels before their fusion; null: 1/8, 1/4, 1/2 and all of a token's."""
    head_norm: str = "batch"
    """``batch`` (see ``wrapper.sync_batchnorm``) or ``group``."""
    auxiliary_weight: float = 0.0
    """Weight of the loss of an auxiliary head on an inner block; 0: no such head."""
    auxiliary_block: Optional[int] = None
    """The block that it sees, from 0; null: at two thirds of the depth."""
    class_weights: Optional[List[float]] = None
    """One weight per class in the cross-entropy and the focal loss; null: all 1."""
    cross_entropy_weight: float = 1.0
    """Weight of the cross-entropy in the sum of losses; 0: without it."""
    focal_weight: float = 0.0
    """Weight of the focal loss."""
    focal_gamma: float = 2.0
    """How much less the focal loss counts pixels that are right already; 0: it is the cross-entropy."""
    dice_weight: float = 0.0
    """Weight of the Dice loss."""
    lovasz_weight: float = 0.0
    """Weight of the Lovász-softmax loss, which stands for the mean IoU of each image."""
    inference: str = "slide"
    """``slide`` (overlapping windows) or ``whole`` images."""
    window: int = 512
    """Side of a window in pixels: best as large as training crops."""
    overlap: float = 0.25
    """Share of a window that the next one covers again."""
    tta_scales: List[float] = field(default_factory=lambda: [1.0])
    """Test-time augmentation: images are also predicted at these scales."""
    tta_flip: bool = False
    """Test-time augmentation: images are also predicted mirrored."""


@dataclass
class TeacherConfig:
    """The backbone that a student learns from (:class:`exp.vision.dinov3.distiller.TeacherSettings`)."""

    init_from: Optional[str] = None
    """Its weights: published ones, or a run."""
    size: str = "vitl16"
    """As ``model.size``."""
    patch_size: int = 16
    """Pixels along each side of its patches; other than the student's: its maps are interpolated."""
    embed_dim: Optional[int] = None
    """Elements of a token instead of the size's."""
    depth: Optional[int] = None
    """Blocks instead of the size's."""
    num_heads: Optional[int] = None
    """Attention heads instead of the size's."""


@dataclass
class DistillerConfig(ImageModelConfig):
    """Knowledge distillation of features (:class:`exp.vision.dinov3.Distiller`)."""

    _target_: str = "exp.vision.dinov3.Distiller"
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """It stays as it is, and is in no checkpoint."""
    cls_weight: float = 1.0
    """Weight of the loss of the CLS token: one minus the cosine."""
    patch_weight: float = 1.0
    """Weight of the loss of the patches."""
    smooth_l1_share: float = 0.1
    """Share of the smooth L1 distance in it, from 0 to 1; the rest is one minus the cosine."""


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
    """Masks of numbers: values that do not count."""


@dataclass
class PredictKeys:
    """Of task=predict, for images."""

    window: Optional[int] = None
    """Larger images are cut into windows of so many pixels a side; null: ``model.window``."""
    overlap: float = 0.25
    """Share of a window that the next one covers again; where they overlap, scores fade into one another."""
    metres_per_pixel: Optional[float] = None
    """For areas and scale bars of images that do not tell it themselves, as GeoTIFFs do; null: that of the data."""
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
